"""The record of a layer's files that `verify` reads back: every attribute and each file's hash, one block of bytes a layer.

Form: zstd over msgpack documents: one RecordHead, then one FileRecord an entry in path order.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard
from msgspec import Struct

from dsec.kernel.erofs import ErofsEntry
from dsec.model.errors import ImageUnavailable, InvalidArgument
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import components, shown

__all__ = ["RECORD_VERSION", "FileRecord", "RecordHead", "read_records", "record_of", "to_erofs", "write_records"]

RECORD_VERSION = 2
_LEVEL = 6
_MAX_DOCUMENT = 64 << 20


class RecordHead(Struct, frozen=True, array_like=True):
    """`version`: of the form of what follows."""

    version: int


class FileRecord(Struct, frozen=True, array_like=True, gc=False):
    """One path as the layer holds it. `kind` as EntryKind; `offset` and `size` in the data blob; `sha256` of a file's bytes."""

    path: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    rdev: tuple[int, int]
    target: bytes
    xattrs: tuple[tuple[bytes, bytes], ...]
    group: int
    offset: int
    size: int
    sha256: bytes


def record_of(entry: TreeEntry, offset: int, sha256: bytes) -> FileRecord:
    """The record of a composed entry whose bytes lie at `offset`."""
    size = entry.content.size if entry.content is not None and entry.kind is EntryKind.FILE else 0
    return FileRecord(
        entry.path, int(entry.kind), entry.mode, entry.uid, entry.gid, entry.mtime, entry.mtime_ns, entry.rdev,
        entry.target, entry.xattrs, entry.group, offset, size, sha256,
    )  # fmt: skip


def to_erofs(record: FileRecord) -> ErofsEntry:
    return ErofsEntry(
        record.path, record.kind, record.mode, record.uid, record.gid, record.mtime, record.mtime_ns, record.rdev,
        record.target, record.xattrs, record.group, record.offset, record.size,
    )  # fmt: skip


def write_records(out: BinaryIO, records: Iterable[FileRecord]) -> None:
    """Writes the whole record; each document has its length (4 bytes, big-endian) before it."""
    encoder = msgspec.msgpack.Encoder()
    with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(out, closefd=False) as packed:
        for document in (RecordHead(RECORD_VERSION), *records):
            raw = encoder.encode(document)
            packed.write(len(raw).to_bytes(4, "big") + raw)


def read_records(path: Path) -> Iterator[FileRecord]:
    """The records, as they are read. Raises ImageUnavailable for a record that is damaged, missing, or of another version."""
    documents = _documents(path)
    try:
        head = msgspec.msgpack.decode(next(documents, b""), type=RecordHead)
    except msgspec.DecodeError as error:
        raise ImageUnavailable(f"{path.name} is damaged: {error}") from error
    if head.version != RECORD_VERSION:
        raise ImageUnavailable(f"the record has version {head.version}, this program reads version {RECORD_VERSION}")
    return _records(documents, path)


def _records(documents: Iterator[bytes], path: Path) -> Iterator[FileRecord]:
    decoder = msgspec.msgpack.Decoder(FileRecord)
    try:
        for raw in documents:
            record = decoder.decode(raw)
            if b"/".join(components(record.path)) != record.path:
                raise ImageUnavailable(f"{path.name} is damaged: {shown(record.path)} is no path of a layer")
            yield record
    except (msgspec.DecodeError, InvalidArgument) as error:
        raise ImageUnavailable(f"{path.name} is damaged: {error}") from error


def _documents(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            # Buffered by hand: a read of the decompressor for each small document would cost more than the document.
            reader = zstandard.ZstdDecompressor().stream_reader(file)
            buffer, position = b"", 0
            while True:
                while len(buffer) - position < 4 or len(buffer) - position < 4 + _length(buffer, position):
                    more = reader.read(1 << 20)
                    if not more:
                        if position < len(buffer):
                            raise ImageUnavailable(f"{path.name} is cut off")
                        return
                    buffer, position = buffer[position:] + more, 0
                end = position + 4 + _length(buffer, position)
                yield buffer[position + 4 : end]
                position = end
    except (OSError, zstandard.ZstdError) as error:
        raise ImageUnavailable(f"{path.name} cannot be read: {error}") from error


def _length(buffer: bytes, position: int) -> int:
    length = int.from_bytes(buffer[position : position + 4], "big")
    if length > _MAX_DOCUMENT:
        raise ImageUnavailable(f"a record of {length} bytes; the bound is {_MAX_DOCUMENT}")
    return length
