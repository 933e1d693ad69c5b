"""From a layer's blob to an uncompressed archive that can be read at any place: gzip and zstd by their first bytes."""

import hashlib
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import zstandard

from dsec.images.inputs import ImportConfig, Progress
from dsec.model.errors import InvalidArgument, Unsupported

__all__ = ["Digest", "compression_of", "open_archive", "sha256_of", "spool"]

_PIECE = 1 << 20
_AHEAD = 8
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x04\x22\x4d\x18": "lz4"}
_MAX_WINDOW = 128 << 20


class Digest:
    """A digest to be checked: "sha256:<64 hex>". Raises InvalidArgument for any other form or algorithm."""

    def __init__(self, text: str) -> None:
        algorithm, _, value = text.partition(":")
        if algorithm != "sha256" or len(value) != 64 or value.strip("0123456789abcdef"):
            raise InvalidArgument(f"digest {text[:100]!a} is not sha256 with 64 hexadecimal digits", field="digest")
        self.text = text
        self.hex = value

    def check(self, found_hex: str, what: str) -> None:
        """Raises InvalidArgument when `found_hex` is another: what was sent is not what was named."""
        if found_hex != self.hex:
            raise InvalidArgument(f"{what} should have digest {self.text} but has sha256:{found_hex}", field="digest")


def sha256_of(file: BinaryIO) -> str:
    """Hexadecimal digest of the rest of an open file."""
    hasher = hashlib.sha256()
    while data := file.read(_PIECE):
        hasher.update(data)
    return hasher.hexdigest()


def compression_of(head: bytes) -> str | None:
    """ "gzip", "zstd" or None for a plain archive, from its first bytes. Raises Unsupported for other compressions."""
    if head.startswith(_GZIP):
        return "gzip"
    if head.startswith(_ZSTD) or (head[1:4] == _SKIPPABLE and head[:1] and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            raise Unsupported(f"archives compressed with {name} are not read; use gzip, zstd or none", what=name)
    return None


def _gunzip(raw: BinaryIO, progress: Progress) -> Iterator[bytes]:
    """All members of a gzip stream, in pieces of a bounded size whatever they expand to."""
    member = zlib.decompressobj(wbits=31)
    began, pending = False, b""
    while True:
        if not pending:
            pending = raw.read(_PIECE)
            progress.add(len(pending))
            if not pending:
                break
        if member.eof:
            # Some writers pad the last member with zeros.
            pending = pending.lstrip(b"\0")
            if not pending:
                continue
            member, began = zlib.decompressobj(wbits=31), False
        data = member.decompress(pending, _PIECE)
        pending = member.unused_data if member.eof else member.unconsumed_tail
        began = True
        yield data
    while not member.eof and (data := member.decompress(b"", _PIECE)):
        yield data
    if began and not member.eof:
        raise InvalidArgument("the gzip stream is cut off", field="source")


def _unzstd(raw: BinaryIO, progress: Progress) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(raw, read_across_frames=True)
    before = raw.tell()
    while data := reader.read(_PIECE):
        yield data
        progress.add(raw.tell() - before)
        before = raw.tell()


def _unpacked(raw: BinaryIO, kind: str, progress: Progress) -> Iterator[bytes]:
    try:
        yield from _gunzip(raw, progress) if kind == "gzip" else _unzstd(raw, progress)
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidArgument(f"damaged {kind} stream: {error}", field="source") from error


def spool(
    raw: BinaryIO, target: Path, config: ImportConfig, progress: Progress, diff_id: Digest | None = None
) -> BinaryIO:
    """Unpacks `raw` (at its start, compressed) into the new file `target`, and opens that for reading.

    `diff_id`: digest of the uncompressed bytes. Raises InvalidArgument for a damaged stream, another digest, or more than
    `config.archive_bytes`; Unsupported for a compression that is not read.
    """
    kind = compression_of(raw.read(8))
    raw.seek(0)
    hasher, total = hashlib.sha256(), 0
    waiting: deque[Future[None]] = deque()

    def take(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[out.write(view) :]
        if diff_id is not None:
            hasher.update(data)

    with target.open("xb", buffering=0) as out, ThreadPoolExecutor(1, thread_name_prefix="dsec-spool") as behind:
        for data in _unpacked(raw, kind, progress) if kind else iter(lambda: raw.read(_PIECE), b""):
            total += len(data)
            if total > config.archive_bytes:
                raise InvalidArgument(f"a layer unpacks to more than {config.archive_bytes} bytes", field="source")
            waiting.append(behind.submit(take, data))
            while len(waiting) > _AHEAD:
                waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    if diff_id is not None:
        diff_id.check(hasher.hexdigest(), "a layer, unpacked,")
    return target.open("rb", buffering=128 << 10)


def open_archive(
    raw: BinaryIO, scratch: Path, config: ImportConfig, progress: Progress, diff_id: Digest | None = None
) -> BinaryIO:
    """The archive `raw` uncompressed: itself, or unpacked into the new file `scratch` (then `raw` is closed).

    Raises as `spool` does.
    """
    compressed = compression_of(raw.read(8)) is not None
    size = raw.seek(0, 2)
    raw.seek(0)
    if compressed:
        with raw:
            return spool(raw, scratch, config, progress, diff_id)
    if size > config.archive_bytes:
        raise InvalidArgument(f"a layer of more than {config.archive_bytes} bytes", field="source")
    if diff_id is not None:
        diff_id.check(sha256_of(raw), "a layer")
        raw.seek(0)
        progress.add(size)
    return raw
