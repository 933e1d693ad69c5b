"""The data blob of a layer: contents at block boundaries, equal ones once, hashed by file, by chunk and as a whole.

What is written depends on the contents and their order alone. The work is done in pieces of some MiB by a few threads, since all
of it (hashing, writing, reading) is done with the interpreter's lock released; how it falls to them changes nothing.
"""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from dsec.images.index import zeros_digest
from dsec.images.inputs import Input, Progress
from dsec.images.records import FileRecord, record_of
from dsec.kernel.hashing import sha256_each
from dsec.model.errors import ImageUnavailable
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.chunks import BLOCK_BYTES, Cutter
from dsec.rules.compose import shown

__all__ = ["BlobWriter", "Written", "write_contents"]

_SMALL = 1 << 20
_PIECE = 4 << 20
_SYNC = 64 << 20
_WORKERS = 2
_AHEAD = 4
_EMPTY = hashlib.sha256().digest()
_T = TypeVar("_T")


class Written(Struct, frozen=True):
    """A finished blob: its digest as "sha256:<hex>", its size, and its chunks: lengths in blocks, and sha256 one behind the other."""

    digest: str
    size: int
    lengths: list[int]
    chunks: bytes


class BlobWriter:
    """Writes a blob to the descriptor `fd` of a new file, cut at about `target` bytes. Chunks of zeros are left as holes.

    At most some tens of MiB wait for the threads. Leaving the context waits for them; `finish` gives the results.
    """

    def __init__(self, fd: int, target: int) -> None:
        self._fd = fd
        self._cutter = Cutter(target)
        self._parts: list[bytes] = []
        self._held = self._given = self._emitted = self._cut = self._unsynced = 0
        self._whole = hashlib.sha256()
        self._chunks: list[bytes] = []
        self._hashed: deque[Future[bytes]] = deque()
        self._ordered: deque[Future[None]] = deque()
        self._sync: Future[None] | None = None
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="dsec-blob")
        self._line = ThreadPoolExecutor(1, thread_name_prefix="dsec-whole")
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="dsec-sync")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for threads in (self._pool, self._line, self._behind):
            threads.shutdown(wait=True, cancel_futures=True)

    def begin(self, size: int, sha256: bytes) -> int:
        """The next content is of `size` bytes, at least 1, which `append` gets; its place in the blob. `sha256`: its hash, not
        looked at where the content is at least a target long."""
        self._cutter.add(size, sha256)
        return self._given

    def append(self, data: bytes) -> None:
        self._parts.append(data)
        self._given += len(data)
        self._held += len(data)
        if self._held >= _PIECE:
            self._emit()

    def pad(self) -> None:
        """Zeros up to the next block: the end of a content."""
        rest = -self._given % BLOCK_BYTES
        if rest:
            self.append(bytes(rest))

    def hashing(self, data: bytes, lengths: list[int]) -> Future[bytes]:
        """The sha256 of each of the pieces of `data`, by one of the threads."""
        return self._pool.submit(sha256_each, data, lengths)

    def updating(self, hasher: "hashlib._Hash", data: bytes) -> Future[None]:
        """`hasher` takes `data` after all that it was given before."""
        return self._line.submit(hasher.update, data)

    def finish(self) -> Written:
        """All is written then, not yet on disk; nothing can be appended afterwards."""
        lengths = self._cutter.finish()
        self._emit()
        self._drain(self._hashed, 0, self._chunks.append)
        self._drain(self._ordered, 0, _ignore)
        if self._sync is not None:
            self._sync.result()
        os.ftruncate(self._fd, self._given)
        return Written(f"sha256:{self._whole.hexdigest()}", self._given, lengths, b"".join(self._chunks))

    def _emit(self) -> None:
        """Hands the chunks that are whole to the threads."""
        lengths, taken, cuts = [], 0, self._cutter.lengths
        while self._cut < len(cuts) and taken + cuts[self._cut] * BLOCK_BYTES <= self._held:
            lengths.append(cuts[self._cut] * BLOCK_BYTES)
            taken += lengths[-1]
            self._cut += 1
        if not lengths:
            return
        piece = self._take(taken)
        self._drain(self._hashed, _AHEAD, self._chunks.append)
        self._drain(self._ordered, _AHEAD, _ignore)
        self._hashed.append(self._pool.submit(self._store, self._emitted, piece, lengths))
        self._ordered.append(self.updating(self._whole, piece))
        self._emitted += taken
        self._unsynced += taken
        if self._unsynced >= _SYNC and (self._sync is None or self._sync.done()):
            # The disk begins while there is more to do, not at the end.
            if self._sync is not None:
                self._sync.result()
            self._sync, self._unsynced = self._behind.submit(os.fdatasync, self._fd), 0

    def _take(self, size: int) -> bytes:
        """The first `size` bytes of what is held."""
        whole, rest = 0, size
        while whole < len(self._parts) and len(self._parts[whole]) <= rest:
            rest -= len(self._parts[whole])
            whole += 1
        taken = self._parts[:whole]
        del self._parts[:whole]
        if rest:
            taken.append(self._parts[0][:rest])
            self._parts[0] = self._parts[0][rest:]
        self._held -= size
        return b"".join(taken)

    def _store(self, at: int, piece: bytes, lengths: list[int]) -> bytes:
        """Writes chunks that are not all zeros, neighbours together; the hashes of all of them."""
        digests = sha256_each(piece, lengths)
        view, start, end = memoryview(piece), 0, 0
        for number, length in enumerate(lengths):
            if digests[32 * number : 32 * number + 32] == zeros_digest(length):
                self._write(view[start:end], at + start)
                start = end + length
            end += length
        self._write(view[start:end], at + start)
        return digests

    def _write(self, view: memoryview, at: int) -> None:
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    @staticmethod
    def _drain(waiting: deque[Future[_T]], most: int, take: Callable[[_T], None]) -> None:
        while len(waiting) > most:
            take(waiting.popleft().result())


def _ignore(_: None) -> None:
    pass


class _Batch(Struct):
    """Small contents whose hashes are being made: (number, bytes) of each."""

    items: list[tuple[int, bytes]]
    digests: Future[bytes]


class _Contents:
    """Puts contents into the blob in the order in which they are given, each distinct one once.

    `places`: offset and sha256 of each by its number, complete after `flush`.
    """

    def __init__(self, inputs: Sequence[Input], blob: BlobWriter, sizes: Counter[int], progress: Progress) -> None:
        self.places: list[tuple[int, bytes]] = []
        self._inputs = inputs
        self._blob = blob
        self._sizes = sizes
        self._progress = progress
        self._known: dict[tuple[bytes, int], int] = {}
        self._items: list[tuple[int, bytes]] = []
        self._room = _PIECE
        self._batches: deque[_Batch] = deque()

    def add(self, content: Content) -> int:
        """The content's number in `places`."""
        number = len(self.places)
        self.places.append((0, _EMPTY))
        self._progress.add(content.size)
        if content.size > _SMALL:
            self.flush()
            self.places[number] = self._place_large(content)
        elif content.size:
            self._items.append((number, b"".join(self._read(content))))
            self._room -= content.size
            if self._room <= 0:
                self._send()
        return number

    def flush(self) -> None:
        """Everything that was added is in the blob, or on its way there."""
        self._send()
        while self._batches:
            self._place(self._batches.popleft())

    def _send(self) -> None:
        if self._items:
            data = b"".join(data for _, data in self._items)
            hashes = self._blob.hashing(data, [len(data) for _, data in self._items])
            self._batches.append(_Batch(self._items, hashes))
            self._items, self._room = [], _PIECE
        while len(self._batches) > _WORKERS:
            self._place(self._batches.popleft())

    def _place(self, batch: _Batch) -> None:
        digests = batch.digests.result()
        for at, (number, data) in enumerate(batch.items):
            digest = digests[32 * at : 32 * at + 32]
            seen = self._known.get((digest, len(data)))
            if seen is None:
                seen = self._known[digest, len(data)] = self._blob.begin(len(data), digest)
                self._blob.append(data)
                self._blob.pad()
            self.places[number] = (seen, digest)

    def _place_large(self, content: Content) -> tuple[int, bytes]:
        if self._sizes[content.size] > 1:
            # Only a file of the same size can be equal, so only then is a large one read twice.
            digest = self._hash(content)
            seen = self._known.get((digest, content.size))
            if seen is not None:
                return seen, digest
        hasher, waiting = hashlib.sha256(), deque[Future[None]]()
        start = self._blob.begin(content.size, b"")
        for piece in self._read(content):
            waiting.append(self._blob.updating(hasher, piece))
            self._blob.append(piece)
            while len(waiting) > _AHEAD:
                waiting.popleft().result()
        self._blob.pad()
        while waiting:
            waiting.popleft().result()
        self._known.setdefault((hasher.digest(), content.size), start)
        return start, hasher.digest()

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
    entries: Sequence[TreeEntry], inputs: Sequence[Input], blob: BlobWriter, progress: Progress
) -> list[FileRecord]:
    """Puts the contents of composed `entries` into the blob in their order, and gives their records."""
    files = [e.content for e in entries if e.kind is EntryKind.FILE and e.content is not None]
    sizes = Counter(content.size for content in files)
    progress.step("write", sum(content.size for content in files))
    contents = _Contents(inputs, blob, sizes, progress)
    groups: dict[int, int] = {}
    numbers: list[int] = []
    for entry in entries:
        if entry.kind is not EntryKind.FILE:
            numbers.append(-1)
        elif entry.group:
            if entry.group not in groups:
                groups[entry.group] = contents.add(entry.content or Content(0))
            numbers.append(groups[entry.group])
        else:
            numbers.append(contents.add(entry.content or Content(0)))
    contents.flush()
    places = contents.places
    return [
        record_of(entry, *(places[number] if number >= 0 else (0, b"")))
        for entry, number in zip(entries, numbers, strict=True)
    ]
