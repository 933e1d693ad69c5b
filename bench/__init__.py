"""Benchmarks: `python -m bench NAME`. Ours and the peers run in turns, in the same run, on the same machine."""
