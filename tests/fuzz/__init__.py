"""Fuzz targets in Python. Each is a function of bytes that raises where a promise is broken; `python -m fuzz` runs them.

Those that run in process are driven by coverage (atheris); the live ones throw seeded bytes at a real sandbox and a real
node. The Rust targets are in crates/fuzz, and share the folder of kept inputs, `corpus`.
"""
