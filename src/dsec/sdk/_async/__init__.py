"""The asynchronous client, by hand. tools/unasync.py makes the blocking face from its public classes."""
