"""The chunk index of a layer's data: how long each chunk is and the sha256 of its bytes. Little endian, to be mapped as it is.

| at | what |
| --- | --- |
| 0 | `DSECIDX2` |
| 8 | u32 4096, the bytes of a block; u32 1024, the entries of a page |
| 16 | u64 count of chunks; u64 bytes of the data |
| 32 | u32 target of a chunk in bytes; zeros up to 64 |
| 64 | an entry a chunk, 36 bytes: u32 length in blocks, sha256 of the chunk's bytes |

A chunk starts where the ones before it end. The root, which the manifest names, is the sha256 of the head and of the sha256 of
each page of 1,024 entries: so a reader can check one page without the others.
"""

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from dsec.model.errors import ImageUnavailable
from dsec.model.layers import LayerManifest
from dsec.rules.chunks import BLOCK_BYTES, MAX_CHUNK_BYTES

__all__ = ["ENTRY_BYTES", "HEAD_BYTES", "PAGE_ENTRIES", "ChunkIndex", "encode_index", "index_root", "zeros_digest"]

HEAD_BYTES, ENTRY_BYTES, PAGE_ENTRIES = 64, 36, 1024
_MAGIC = b"DSECIDX2"
_HEAD = struct.Struct("<8sIIQQI28x")
_ENTRY = struct.Struct("<I32s")
_MAX_BLOCKS = MAX_CHUNK_BYTES // BLOCK_BYTES


@lru_cache(maxsize=_MAX_BLOCKS)
def zeros_digest(length: int) -> bytes:
    """The sha256 of `length` zero bytes: a chunk that has it is a hole, which no store keeps."""
    return hashlib.sha256(bytes(length)).digest()


def encode_index(data_bytes: int, target: int, lengths: Sequence[int], digests: bytes) -> bytes:
    """An index of chunks of `lengths` blocks whose sha256 lie one behind the other in `digests`."""
    head = _HEAD.pack(_MAGIC, BLOCK_BYTES, PAGE_ENTRIES, len(lengths), data_bytes, target)
    entries = (_ENTRY.pack(length, digests[32 * n : 32 * n + 32]) for n, length in enumerate(lengths))
    return head + b"".join(entries)


def index_root(raw: bytes) -> str:
    """The root over an index's bytes, as "sha256:<64 hex>"."""
    total, view = hashlib.sha256(raw[:HEAD_BYTES]), memoryview(raw)
    for start in range(HEAD_BYTES, len(raw), PAGE_ENTRIES * ENTRY_BYTES):
        total.update(hashlib.sha256(view[start : start + PAGE_ENTRIES * ENTRY_BYTES]).digest())
    return f"sha256:{total.hexdigest()}"


class ChunkIndex:
    """A layer's chunks, checked against its manifest: `raw` has the manifest's hash root and describes exactly its data.

    `count` chunks cover `data_bytes` bytes; `target` is the length that chunks were aimed at. Chunks are known by their number,
    from 0. All offsets and lengths are in bytes. Raises ImageUnavailable for bytes that are no such index.
    """

    def __init__(self, raw: bytes, manifest: LayerManifest) -> None:
        if len(raw) != manifest.index.size or len(raw) < HEAD_BYTES:
            raise _damaged(f"{len(raw)} bytes, the manifest says {manifest.index.size}")
        if index_root(raw) != manifest.hash_root:
            raise _damaged("its root is not the manifest's")
        magic, block, page, self.count, self.data_bytes, self.target = _HEAD.unpack_from(raw)
        if (magic, block, page) != (_MAGIC, BLOCK_BYTES, PAGE_ENTRIES) or any(raw[36:HEAD_BYTES]):
            raise _damaged("its head is of another form")
        if self.count != (len(raw) - HEAD_BYTES) / ENTRY_BYTES:
            raise _damaged(f"it says {self.count} chunks and has room for another number")
        if (self.data_bytes, self.target) != (manifest.data.size, manifest.chunk_bytes):
            raise _damaged("it is of other data than the manifest")
        self.raw = raw
        lengths = [length for length, _ in _ENTRY.iter_unpack(memoryview(raw)[HEAD_BYTES:])]
        if lengths and not 0 < min(lengths) <= max(lengths) <= _MAX_BLOCKS:
            raise _damaged("a chunk's length is beyond the bounds")
        if sum(lengths) * BLOCK_BYTES != self.data_bytes:
            raise _damaged("its chunks do not cover the data")
        self._starts: array[int] = array("Q", accumulate((length * BLOCK_BYTES for length in lengths), initial=0))

    @classmethod
    def read(cls, path: Path, manifest: LayerManifest) -> "ChunkIndex":
        """The index in the file at `path`; no more of it is read than the manifest says it has."""
        try:
            with path.open("rb") as file:
                raw = file.read(manifest.index.size + 1)
        except OSError as error:
            raise ImageUnavailable(f"{path.name} cannot be read: {error.strerror}") from error
        return cls(raw, manifest)

    def start(self, number: int) -> int:
        """Where the chunk begins in the data; for `count`, where the data ends."""
        return self._starts[number]

    def length(self, number: int) -> int:
        return self._starts[number + 1] - self._starts[number]

    def digest(self, number: int) -> bytes:
        """The sha256 of the chunk's bytes, 32 bytes."""
        at = HEAD_BYTES + ENTRY_BYTES * number + 4
        return self.raw[at : at + 32]

    def is_zeros(self, number: int) -> bool:
        """Whether all of the chunk is zeros: it is a hole in the data, and no store keeps it."""
        return self.digest(number) == zeros_digest(self.length(number))

    def find(self, offset: int) -> int:
        """The chunk that the byte at `offset` of the data is in. Raises IndexError beyond the data."""
        if not 0 <= offset < self.data_bytes:
            raise IndexError(offset)
        return bisect_right(self._starts, offset) - 1

    def covering(self, offset: int, length: int) -> range:
        """The chunks that hold any of `length` bytes from `offset` on."""
        return range(self.find(offset), self.find(offset + length - 1) + 1) if length else range(0)

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """(start, length, sha256) of each chunk in order."""
        for number in range(self.count):
            yield self.start(number), self.length(number), self.digest(number)


def _damaged(why: str) -> ImageUnavailable:
    return ImageUnavailable(f"the chunk index is damaged: {why}")
