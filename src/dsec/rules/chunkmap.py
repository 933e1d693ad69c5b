"""Where a layer's chunks lie in packs: the map that a push writes, a whole pull and the pager read. Little endian.

| at | what |
| --- | --- |
| 0 | `DSECMAP2` |
| 8 | u32 count P of packs; u32 0; u64 count of chunks; zeros up to 64 |
| 64 | the sha256 of each pack, 32 bytes |
| 64 + 32 P | 16 bytes a chunk: u32 number of its pack (0xffffffff: a chunk of zeros, kept nowhere), u32 offset in the pack, u32 stored length, u32 encoding (0 raw, 1 zstd) |

A map is a hint: what is read by it is believed only if it has the chunk's hash.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from dsec.model.errors import ImageUnavailable
from dsec.rules.chunks import MAX_CHUNK_BYTES

__all__ = ["MAX_PACK_BYTES", "MAX_STORED_BYTES", "ChunkMap", "Encoding", "Place", "encode_map", "map_bytes"]

MAX_PACK_BYTES = 32 << 20
MAX_STORED_BYTES = MAX_CHUNK_BYTES + 1024
"""Bytes of a chunk as stored, at most."""
_MAGIC = b"DSECMAP2"
_HEAD = struct.Struct("<8sIIQ40x")
_ENTRY = struct.Struct("<IIII")
_ZEROS = 0xFFFFFFFF


class Encoding(IntEnum):
    """How a chunk's bytes are stored."""

    RAW = 0
    ZSTD = 1


class Place(NamedTuple):
    """Where a chunk is stored: the sha256 of a pack (32 bytes), offset and stored length in it in bytes, and the encoding."""

    pack: bytes
    offset: int
    length: int
    encoding: Encoding


def map_bytes(packs: int, chunks: int) -> int:
    """Bytes of a map of so many packs and chunks."""
    return _HEAD.size + 32 * packs + _ENTRY.size * chunks


def encode_map(places: Sequence[Place | None]) -> bytes:
    """The map of a layer whose chunks lie at `places`, in order; None is a chunk of zeros."""
    packs: dict[bytes, int] = {}
    entries = bytearray()
    for place in places:
        if place is None:
            entries += _ENTRY.pack(_ZEROS, 0, 0, 0)
        else:
            number = packs.setdefault(place.pack, len(packs))
            entries += _ENTRY.pack(number, place.offset, place.length, place.encoding)
    return _HEAD.pack(_MAGIC, len(packs), 0, len(places)) + b"".join(packs) + bytes(entries)


class ChunkMap:
    """A map's bytes, checked: `count` chunks, every place within the bounds. Raises ImageUnavailable for anything else."""

    def __init__(self, raw: bytes, count: int) -> None:
        if len(raw) < _HEAD.size:
            raise _damaged("it is cut off")
        magic, packs, flags, chunks = _HEAD.unpack_from(raw)
        if magic != _MAGIC or flags or any(raw[24 : _HEAD.size]):
            raise _damaged("its head is of another form")
        if chunks != count or packs > count or len(raw) != map_bytes(packs, chunks):
            raise _damaged(f"{chunks} chunks in {packs} packs and {len(raw)} bytes, of {count} chunks")
        self.packs = tuple(raw[64 + 32 * n : 96 + 32 * n] for n in range(packs))
        if len(set(self.packs)) != packs:
            raise _damaged("it names a pack twice")
        self._entries = memoryview(raw)[64 + 32 * packs :]
        for pack, offset, length, encoding in _ENTRY.iter_unpack(self._entries):
            if pack == _ZEROS:
                good = offset == length == encoding == 0
            else:
                good = pack < packs and 0 < length <= MAX_STORED_BYTES and encoding in (0, 1)
                good = good and offset + length <= MAX_PACK_BYTES
            if not good:
                raise _damaged("a place is beyond the bounds")

    def __len__(self) -> int:
        return len(self._entries) // _ENTRY.size

    def place(self, number: int) -> Place | None:
        """Where chunk `number` lies; None for a chunk of zeros."""
        pack, offset, length, encoding = _ENTRY.unpack_from(self._entries, _ENTRY.size * number)
        if pack == _ZEROS:
            return None
        return Place(self.packs[pack], offset, length, Encoding(encoding))


def _damaged(why: str) -> ImageUnavailable:
    return ImageUnavailable(f"the map of the layer's chunks is damaged: {why}")
