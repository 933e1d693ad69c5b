"""Segments of the known index of a store: chunk hash to place, so that no push stores a chunk twice. Little endian.

| at | what |
| --- | --- |
| 0 | `DSECKNW2`, u32 count P of packs, u32 count of chunks |
| 16 | the sha256 of each pack, 32 bytes |
| 16 + 32 P | 48 bytes a chunk, by its hash: sha256, u32 number of its pack, u32 offset, u32 stored length, u32 encoding |

A chunk belongs to the shard that the first bits of its hash name. Segments are never changed: a shard with many small ones
gets a new one with all that they said, and they go.
"""

import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from dsec.model.errors import ImageUnavailable
from dsec.rules.chunkmap import MAX_PACK_BYTES, MAX_STORED_BYTES, Encoding, Place

__all__ = [
    "MAX_SEGMENT_BYTES",
    "decode_segment",
    "encode_segment",
    "find_places",
    "shard_of",
    "shard_names",
    "to_merge",
]

MAX_SEGMENT_BYTES = 64 << 20
"""A segment is never longer; nothing is merged into one that would be."""
_MAGIC = b"DSECKNW2"
_HEAD = struct.Struct("<8sII")
_ENTRY = struct.Struct("<32sIIII")
_MERGE_FROM = 8


def shard_of(digest: bytes, bits: int) -> str:
    """The shard (2 hexadecimal digits) of a chunk's sha256, of 2**`bits` shards; `bits` from 0 to 8."""
    return f"{digest[0] >> (8 - bits):02x}"


def shard_names(bits: int) -> list[str]:
    """All shards."""
    return [f"{number:02x}" for number in range(1 << bits)]


def encode_segment(places: Mapping[bytes, Place]) -> bytes:
    """A segment that says `places` by the chunks' sha256; equal ones have equal bytes."""
    packs = {pack: n for n, pack in enumerate(sorted({place.pack for place in places.values()}))}
    entries = (_ENTRY.pack(digest, packs[at.pack], *at[1:]) for digest, at in sorted(places.items()))
    return _HEAD.pack(_MAGIC, len(packs), len(places)) + b"".join(packs) + b"".join(entries)


def decode_segment(raw: bytes) -> Iterator[tuple[bytes, Place]]:
    """What a segment says. Raises ImageUnavailable for one that is damaged."""
    for digest, packs, entry in _entries(raw):
        yield digest, _place(packs, entry)


def find_places(raw: bytes, wanted: Container[bytes]) -> dict[bytes, Place]:
    """Of what a segment says, that about `wanted` chunks. Raises as `decode_segment`."""
    return {digest: _place(packs, entry) for digest, packs, entry in _entries(raw) if digest in wanted}


def to_merge(segments: Sequence[tuple[str, int]]) -> list[str]:
    """Which of a shard's segments (name, bytes) are due to become one: small ones of about one size, once there are eight.

    By sizes of like magnitude, so that a chunk's entry is rewritten a few times and not once a push.
    """
    tiers: dict[int, list[tuple[str, int]]] = {}
    for name, size in segments:
        tiers.setdefault(size.bit_length() // 3, []).append((name, size))
    for _, tier in sorted(tiers.items()):
        chosen, total = [], 0
        for name, size in sorted(tier, key=lambda each: each[1]):
            if total + size > MAX_SEGMENT_BYTES:
                break
            chosen.append(name)
            total += size
        if len(chosen) >= _MERGE_FROM:
            return chosen
    return []


def _entries(raw: bytes) -> Iterator[tuple[bytes, Sequence[bytes], tuple[int, int, int, int]]]:
    if len(raw) < _HEAD.size:
        raise _damaged("it is cut off")
    magic, count, chunks = _HEAD.unpack_from(raw)
    if magic != _MAGIC or len(raw) != _HEAD.size + 32 * count + _ENTRY.size * chunks:
        raise _damaged("its head is of another form")
    packs = [raw[_HEAD.size + 32 * n : _HEAD.size + 32 * n + 32] for n in range(count)]
    entries: Iterable[tuple[bytes, int, int, int, int]] = _ENTRY.iter_unpack(memoryview(raw)[_HEAD.size + 32 * count :])
    for digest, pack, offset, length, encoding in entries:
        if pack >= count or encoding > 1 or not 0 < length <= MAX_STORED_BYTES or offset + length > MAX_PACK_BYTES:
            raise _damaged("a place is beyond the bounds")
        yield digest, packs, (pack, offset, length, encoding)


def _place(packs: Sequence[bytes], entry: tuple[int, int, int, int]) -> Place:
    pack, offset, length, encoding = entry
    return Place(packs[pack], offset, length, Encoding(encoding))


def _damaged(why: str) -> ImageUnavailable:
    return ImageUnavailable(f"a segment of the store's known index is damaged: {why}")
