"""What a push takes layers from: this node's own store, or what was fetched from another shared store."""

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from dsec.images.index import ChunkIndex
from dsec.images.stores.frames import ChunkPress
from dsec.images.stores.layout import Store
from dsec.images.stores.pull import Fetched, read_stored, wanted_places
from dsec.model.errors import ImageUnavailable, Unsupported
from dsec.model.layers import LayerManifest
from dsec.rules.chunkmap import Place
from dsec.rules.packs import READ_BYTES, Frame, plan_reads

__all__ = ["LayerSource", "LocalLayer", "RemoteLayer"]

_BATCH_BYTES = 2 << 20
_READS = 4


class LayerSource(Protocol):
    """A layer to be pushed: `folder` has its files but `data`; `frames` gives chunks as stored, all checked, in the order asked;
    tasks that read ahead are of `group`."""

    digest: str
    manifest: LayerManifest
    folder: Path
    index: ChunkIndex

    def frames(self, numbers: Sequence[int], group: asyncio.TaskGroup) -> AsyncGenerator[list[Frame]]: ...


class LocalLayer:
    """A layer of this node, in `folder`. `level`: zstd's; None stores chunks raw. `workers`: threads that compress.

    Raises Unsupported for a layer that is not whole here, and ImageUnavailable for one that is damaged.
    """

    def __init__(self, digest: str, manifest: LayerManifest, folder: Path, level: int | None, workers: int) -> None:
        if (folder / "have").exists():
            raise Unsupported(f"layer {digest} is not whole on this node: fetch all of it first", what="layer")
        self.digest = digest
        self.manifest = manifest
        self.folder = folder
        self.index = ChunkIndex.read(folder / "index", manifest)
        self._level = level
        self._workers = workers

    async def frames(self, numbers: Sequence[int], group: asyncio.TaskGroup) -> AsyncGenerator[list[Frame]]:
        pending: deque[Future[list[Frame]]] = deque()
        with ThreadPoolExecutor(self._workers, "dsec-push") as pool, (self.folder / "data").open("rb") as data:
            try:
                for batch in self._batches(numbers):
                    if len(pending) >= 2 * self._workers:
                        yield await asyncio.wrap_future(pending.popleft())
                    pending.append(pool.submit(self._press, data.fileno(), batch))
                while pending:
                    yield await asyncio.wrap_future(pending.popleft())
            finally:
                for each in pending:
                    each.cancel()

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 0
        for number in numbers:
            batch.append(number)
            size += self.index.length(number)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _press(self, data: int, numbers: Sequence[int]) -> list[Frame]:
        press = ChunkPress(self._level)
        frames = []
        for number in numbers:
            raw = os.pread(data, self.index.length(number), self.index.start(number))
            digest = self.index.digest(number)
            if hashlib.sha256(raw).digest() != digest:
                raise ImageUnavailable(
                    f"layer {self.digest} is damaged on this node: chunk {number} is not what it was"
                )
            frames.append(press.press(raw, digest))
        return frames


class RemoteLayer:
    """A layer of the shared store `store`, whose metadata has been fetched. Its chunks keep the form that they have there."""

    def __init__(self, store: Store, fetched: Fetched) -> None:
        self.digest = fetched.digest
        self.manifest = fetched.manifest
        self.folder = fetched.folder
        self.index = fetched.index
        self._store = store
        self._fetched = fetched

    async def frames(self, numbers: Sequence[int], group: asyncio.TaskGroup) -> AsyncGenerator[list[Frame]]:
        pending: deque[asyncio.Task[list[Frame]]] = deque()
        # Chunk order is kept, so that neighbours stay neighbours in the packs of the other store.
        for run in self._runs(numbers):
            if len(pending) >= _READS:
                yield await pending.popleft()
            pending.append(group.create_task(self._read(run)))
        while pending:
            yield await pending.popleft()

    def _runs(self, numbers: Sequence[int]) -> Iterator[list[tuple[int, Place]]]:
        run: list[tuple[int, Place]] = []
        size = 0
        for number, place in wanted_places(self._fetched, numbers):
            run.append((number, place))
            size += place.length
            if size >= READ_BYTES:
                yield run
                run, size = [], 0
        if run:
            yield run

    async def _read(self, run: Sequence[tuple[int, Place]]) -> list[Frame]:
        stored: dict[int, bytes] = {}
        for read in plan_reads(run):
            stored.update(await read_stored(self._store, self._fetched, read))
        return [Frame(self.index.digest(number), place.encoding, stored[number]) for number, place in run]
