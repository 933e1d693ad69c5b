"""Chunks and blobs as stored: zstd frames that are opened only as far as was agreed before."""

import hashlib
import os
from pathlib import Path

import zstandard

from dsec.model.errors import ImageUnavailable
from dsec.model.layers import Blob
from dsec.rules.chunkmap import Encoding
from dsec.rules.packs import Frame

__all__ = ["ChunkPress", "check_blob", "open_chunk", "press_file", "stored_limit", "unpress_file"]

_PIECE = 1 << 20
_WINDOW = 128 << 20
_BLOB_LEVEL = 6


class ChunkPress:
    """Compresses chunks at zstd `level`; None keeps them raw. For one thread."""

    def __init__(self, level: int | None) -> None:
        # The content size stays in the frame, so that a reader can refuse one that lies before it opens it.
        self._zstd = None if level is None else zstandard.ZstdCompressor(level=level, write_checksum=False)

    def press(self, data: bytes, digest: bytes) -> Frame:
        """The chunk with sha256 `digest` as stored: raw where zstd does not make it smaller."""
        if self._zstd is not None:
            packed = self._zstd.compress(data)
            if len(packed) < len(data):
                return Frame(digest, Encoding.ZSTD, packed)
        return Frame(digest, Encoding.RAW, data)


def open_chunk(stored: bytes, encoding: Encoding, length: int, digest: bytes) -> bytes | None:
    """A chunk of `length` bytes from what is stored; None for anything that is not the chunk with sha256 `digest`."""
    data = stored
    if encoding is Encoding.ZSTD:
        try:
            # A frame is asked what it will be before any memory is taken for it.
            if zstandard.frame_content_size(stored) != length:
                return None
            data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=length, allow_extra_data=False)
        except zstandard.ZstdError:
            return None
    return data if len(data) == length and hashlib.sha256(data).digest() == digest else None


def stored_limit(size: int) -> int:
    """Bytes at most of the zstd frame of `size` bytes."""
    return size + (size >> 7) + 1024


def press_file(source: Path, target: Path) -> None:
    """Writes the file `source` as one zstd frame to the new file `target`; the same bytes always give the same."""
    compressor = zstandard.ZstdCompressor(level=_BLOB_LEVEL)
    with source.open("rb") as raw, target.open("xb") as out:
        compressor.copy_stream(raw, out, size=source.stat().st_size)


def unpress_file(source: Path, target: Path, blob: Blob, what: str) -> None:
    """Writes what the zstd frame in `source` holds to the new file `target`: the bytes of `blob` and no other, never more.

    Raises ImageUnavailable.
    """
    total, hasher = 0, hashlib.sha256()
    opener = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    try:
        with source.open("rb") as raw, target.open("xb") as out, opener.stream_reader(raw) as reader:
            while data := reader.read(_PIECE):
                total += len(data)
                if total > blob.size:
                    raise ImageUnavailable(f"{what} becomes more than the {blob.size} bytes of its manifest")
                hasher.update(data)
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except zstandard.ZstdError as error:
        raise ImageUnavailable(f"{what} is damaged: {error}") from error
    check_blob(total, hasher.hexdigest(), blob, what)


def check_blob(size: int, sha256: str, blob: Blob, what: str) -> None:
    """Raises ImageUnavailable unless so many bytes with this hash are `blob`."""
    if size != blob.size or f"sha256:{sha256}" != blob.digest:
        raise ImageUnavailable(f"{what} should be {blob.digest} of {blob.size} bytes; it is sha256:{sha256} of {size}")
