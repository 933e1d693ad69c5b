"""Nouns: ids, specs, states, limits, plans, errors. Imports nothing of ours, touches nothing."""
