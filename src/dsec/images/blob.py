"""The data blob of a layer: contents at block boundaries, equal ones once, hashed by file and as a whole."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO, Self

from dsec.images.inputs import Input, Progress
from dsec.images.records import FileRecord, record_of
from dsec.kernel.erofs import BLOCK_BYTES
from dsec.model.errors import ImageUnavailable
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.chunks import Cutter
from dsec.rules.compose import shown

__all__ = ["BlobWriter", "write_contents"]

_PIECE = 1 << 20
_AHEAD = 8


class BlobWriter:
    """Appends to `file` (new, unbuffered). Pieces are hashed and written by one thread behind, at most 8 ahead of it.

    Pieces of zeros are left as holes. Leaving the context waits for the thread; `finish` gives the results.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pending = bytearray()
        self._given = 0
        self._whole = hashlib.sha256()
        self._zero = bytes(_PIECE)
        self._behind: deque[Future[None]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dsec-blob")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        return self._given

    def append(self, data: bytes) -> None:
        self._given += len(data)
        self._pending += data
        while len(self._pending) >= _PIECE:
            chunk = bytes(memoryview(self._pending)[:_PIECE])
            del self._pending[:_PIECE]
            self._hand_over(chunk)

    def pad(self) -> None:
        """Zeros up to the next block."""
        rest = -self._given % BLOCK_BYTES
        if rest:
            self.append(bytes(rest))

    def finish(self) -> str:
        """The blob's digest. Nothing can be appended afterwards."""
        if self._pending:
            self._hand_over(bytes(self._pending))
            self._pending.clear()
        while self._behind:
            self._behind.popleft().result()
        self._file.truncate(self._given)
        return f"sha256:{self._whole.hexdigest()}"

    def _hand_over(self, chunk: bytes) -> None:
        while len(self._behind) >= _AHEAD:
            self._behind.popleft().result()
        self._behind.append(self._worker.submit(self._store, chunk))

    def _store(self, chunk: bytes) -> None:
        self._whole.update(chunk)
        if chunk == self._zero:
            self._file.seek(len(chunk), 1)
            return
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) :]


class _Contents:
    """Puts contents into the blob, each distinct one once."""

    def __init__(
        self, inputs: Sequence[Input], blob: BlobWriter, sizes: Counter[int], cutter: Cutter, progress: Progress
    ) -> None:
        self._inputs = inputs
        self._blob = blob
        self._sizes = sizes
        self._cutter = cutter
        self._progress = progress
        self._known: dict[tuple[bytes, int], int] = {}

    def place(self, content: Content) -> tuple[int, bytes]:
        """Where the content's bytes are in the blob, and their hash."""
        self._progress.add(content.size)
        if content.size == 0:
            return 0, hashlib.sha256().digest()
        if content.size <= _PIECE:
            data = b"".join(self._read(content))
            digest = hashlib.sha256(data).digest()
            seen = self._known.get((digest, content.size))
            if seen is None:
                seen = self._known[digest, content.size] = self._blob.position
                self._blob.append(data)
                self._blob.pad()
                self._cutter.add(content.size, digest)
            return seen, digest
        if self._sizes[content.size] > 1:
            # Only a file of the same size can be equal, so only then is a large one read twice.
            digest = self._hash(content)
            seen = self._known.get((digest, content.size))
            if seen is not None:
                return seen, digest
        hasher = hashlib.sha256()
        start = self._append(self._read(content), hasher)
        self._cutter.add(content.size, hasher.digest())
        self._known.setdefault((hasher.digest(), content.size), start)
        return start, hasher.digest()

    def _append(self, data: Iterator[bytes], hasher: "hashlib._Hash") -> int:
        start = self._blob.position
        for piece in data:
            hasher.update(piece)
            self._blob.append(piece)
        self._blob.pad()
        return start

    def _hash(self, content: Content) -> bytes:
        hasher = hashlib.sha256()
        for piece in self._read(content):
            hasher.update(piece)
        return hasher.digest()

    def _read(self, content: Content) -> Iterator[bytes]:
        left = content.size
        for piece in self._inputs[content.source].read(content):
            left -= len(piece)
            yield piece
        if left:
            raise ImageUnavailable(f"{shown(content.origin)}: not as long as it was listed")


def write_contents(
    entries: Sequence[TreeEntry], inputs: Sequence[Input], blob: BlobWriter, chunk_bytes: int, progress: Progress
) -> tuple[list[FileRecord], list[int]]:
    """Puts the contents of composed `entries` into the blob in their order; gives their records, and the lengths of the data's
    chunks in blocks."""
    files = [e.content for e in entries if e.kind is EntryKind.FILE and e.content is not None]
    sizes = Counter(content.size for content in files)
    progress.step("write", sum(content.size for content in files))
    cutter = Cutter(chunk_bytes)
    contents = _Contents(inputs, blob, sizes, cutter, progress)
    groups: dict[int, tuple[int, bytes]] = {}
    records = []
    for entry in entries:
        offset, digest = 0, b""
        if entry.kind is EntryKind.FILE:
            if entry.group in groups:
                offset, digest = groups[entry.group]
            else:
                offset, digest = contents.place(entry.content or Content(0))
                if entry.group:
                    groups[entry.group] = (offset, digest)
        records.append(record_of(entry, offset, digest))
    return records, cutter.finish()
