"""Contenders beside ours."""
