"""Hashes of many pieces in one call, with the interpreter's lock released."""

from dsec import _native

__all__ = ["sha256_each"]


def sha256_each(data: bytes, lengths: list[int]) -> bytes:
    """The sha256, 32 bytes each, of the pieces of `lengths` bytes that lie one behind the other in `data`.

    Raises ValueError where the pieces are not all of the data.
    """
    return _native.sha256_each(data, lengths)
