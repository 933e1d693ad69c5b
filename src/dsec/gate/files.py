"""Files that mirrors have fetched: once a node, checked against the index's hash, within a bound of disk, whole or not there at all.

Readers follow a download while it comes; its last part is held back until the hash is right, so nobody gets a whole wrong file.
"""

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator
from pathlib import Path

from msgspec import Struct

from dsec.gate.refusal import Refused
from dsec.gate.settings import Credential, GateSettings
from dsec.gate.upstream import Upstream

__all__ = ["Files", "Stored", "Wanted"]

_STEP = 1 << 20
_HELD_BACK = 64 * 1024
_STRONG = ("sha512", "sha384", "sha256", "sha1")


class Wanted(Struct, frozen=True):
    """A file of an index. `hashes`: by algorithm, hexadecimal; none: the first one that comes is kept under `key`. `size` where the index says it."""

    key: str
    url: str
    hashes: dict[str, str]
    size: int | None = None
    credential: Credential | None = None

    @property
    def algorithm(self) -> str | None:
        """The strongest that the index gives."""
        return next((name for name in _STRONG if name in self.hashes), None)

    @property
    def name(self) -> str:
        """The file's name in the cache."""
        algorithm = self.algorithm
        text = f"{algorithm}:{self.hashes[algorithm].lower()}" if algorithm else f"key:{self.key}"
        return hashlib.sha256(text.encode()).hexdigest()


class Stored:
    """A file that is there or on its way. `size`: None until it is known."""

    def __init__(self, path: Path, size: int | None = None, done: bool = False) -> None:
        self.path = path
        self.size = size
        self.written = size or 0 if done else 0
        self.done = done
        self.error: Refused | None = None
        self._changed = asyncio.Event()

    def change(self) -> None:
        """Wakes the readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def begun(self) -> int:
        """The size, once it is known. Raises Refused."""
        while self.size is None and not self.done:
            self._check()
            await self._next()
        self._check()
        assert self.size is not None
        return self.size

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Its bytes, as they come. Raises Refused when the download fails, before the last of them."""
        descriptor, at = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), 0
        try:
            while True:
                self._check()
                end = self.written if self.done else self.written - _HELD_BACK
                if at < end:
                    data = await asyncio.to_thread(os.pread, descriptor, min(_STEP, end - at), at)
                    at += len(data)
                    yield data
                elif self.done:
                    return
                else:
                    await self._next()
        finally:
            os.close(descriptor)

    async def _next(self) -> None:
        await self._changed.wait()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


class Files:
    """The cache. `folder` is there, and its own."""

    def __init__(self, folder: Path, settings: GateSettings, upstream: Upstream, group: asyncio.TaskGroup) -> None:
        self._folder = folder
        self._settings = settings
        self._upstream = upstream
        self._group = group
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._coming: dict[str, Stored] = {}
        self._turns = asyncio.Semaphore(settings.downloads)
        self._number = 0
        self.bytes = 0
        self._load()

    def _load(self) -> None:
        """Takes over what an earlier process kept; what it had not finished is removed."""
        found = []
        for path in self._folder.iterdir():
            if path.name.startswith("."):
                path.unlink()
            else:
                found.append((path.stat().st_mtime, path.name, path.stat().st_size))
        for _, name, size in sorted(found):
            self._kept[name] = size
            self.bytes += size
        self._evict()

    def open(self, wanted: Wanted) -> Stored:
        """The file, from disk or as it comes; many who want it at once share one download."""
        name = wanted.name
        if name in self._coming:
            return self._coming[name]
        if name in self._kept:
            self._kept.move_to_end(name)
            path = self._folder / name
            os.utime(path)  # the order outlives this process
            return Stored(path, self._kept[name], done=True)
        self._number += 1
        temporary = self._folder / f".{self._number}"
        number = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stored = self._coming[name] = Stored(temporary)
        self._group.create_task(self._download(wanted, name, stored, number))
        return stored

    async def _download(self, wanted: Wanted, name: str, stored: Stored, number: int) -> None:
        try:
            async with self._turns:
                await self._fetch(wanted, stored, number)
            await asyncio.to_thread(os.fsync, number)
            stored.path = stored.path.rename(self._folder / name)
            self._kept[name] = stored.written
            self.bytes += stored.written
            self._evict()
        except Refused as refused:
            stored.error = refused
        except Exception as error:  # noqa: BLE001 - it is told to who waits; the other downloads go on
            stored.error = Refused("upstream", f"the file could not be fetched: {type(error).__name__}")
        finally:
            os.close(number)
            del self._coming[name]
            if stored.error is None and not stored.path.name.startswith("."):
                stored.size, stored.done = stored.written, True
            else:
                stored.error = stored.error or Refused("upstream", "the download was given up")
                stored.path.unlink(missing_ok=True)
            stored.change()

    async def _fetch(self, wanted: Wanted, stored: Stored, number: int) -> None:
        most = self._settings.file_mb * 1_000_000
        digest = hashlib.new(wanted.algorithm) if wanted.algorithm else None
        async with self._upstream.get(wanted.url, {"Accept-Encoding": "identity"}, wanted.credential) as answer:
            if answer.status != 200:
                raise Refused("upstream", f"the server behind the mirror answers {answer.status}")
            size = answer.content_length if wanted.size is None else wanted.size
            if (size or 0) > most:
                raise Refused("upstream", "a file beyond the node's bound")
            stored.size = size
            stored.change()
            async for data in answer.content.iter_chunked(_STEP):
                if stored.written + len(data) > (most if size is None else size):
                    raise Refused("upstream", "a file longer than it should be")
                await asyncio.to_thread(_append, number, digest, data)
                stored.written += len(data)
                stored.change()
        if size is not None and stored.written != size:
            raise Refused("upstream", "a file shorter than it should be")
        if digest is not None and digest.hexdigest() != wanted.hashes[digest.name].lower():
            raise Refused("hash", "the file is not the one that the index names")

    def _evict(self) -> None:
        while self.bytes > self._settings.cache_mb * 1_000_000 and self._kept:
            name, size = self._kept.popitem(last=False)
            (self._folder / name).unlink(missing_ok=True)
            self.bytes -= size


def _append(number: int, digest: object, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
    if digest is not None:
        digest.update(data)  # type: ignore[attr-defined]
