"""Decisions as pure functions. No async, clock, randomness or I/O."""
