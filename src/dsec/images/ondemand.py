"""Layers whose data comes from a store: the file that is mounted for each, and the pager that fills it as it is read."""

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from dsec.images.index import ChunkIndex
from dsec.images.inputs import Progress
from dsec.images.making import DATA, INDEX
from dsec.images.origins import HAVE, ORIGIN, present_bytes, read_origin, read_profile
from dsec.images.pagerprocess import PagerProcess
from dsec.images.remote import plain_place
from dsec.images.settings import ImagesSettings, Stores
from dsec.images.store import LayerStore
from dsec.images.stores.opening import open_store
from dsec.model.errors import Conflict, DSecError, ImageUnavailable, InvalidArgument, NotFound, Unavailable
from dsec.model.loading import Ladder, LayerReads, LoadMode, Mechanism, Origin
from dsec.rules.loading import Place, choose_path, grown, sum_reads
from dsec.rules.profiles import ranges_of

__all__ = ["OnDemand", "touch"]

_log = logging.getLogger("dsec.images")
_PREFETCH_GAP = 1
_FILL_LOOK = 0.1
_T = TypeVar("_T")


class OnDemand:
    """Opens and closes the data of layers. `ladder`: the paths that the host has, asked when first needed.

    `total`: what was counted of all layers since this process began, also over starts of the pager.
    """

    def __init__(
        self, layers: LayerStore, stores: Stores, process: PagerProcess, settings: ImagesSettings,
        ladder: Callable[[], Awaitable[Ladder]],
    ) -> None:  # fmt: skip
        self.process = process
        self._layers = layers
        self._stores = stores
        self._settings = settings
        self._ladder = ladder
        self._attached: set[str] = set()
        self._last: dict[str, LayerReads] = {}
        self.total = LayerReads(size=0)

    @property
    def attached(self) -> frozenset[str]:
        """Digests of the layers that the pager serves for this process."""
        return frozenset(self._attached)

    def is_served(self, digest: str) -> bool:
        """Whether chunks of the layer may be missing here, so that it must not be read without its pager."""
        return (self._layers.directory(digest) / HAVE).exists()

    def bytes_here(self, digest: str) -> int:
        """Bytes of the layer's data that are on this node, zeros that are holes included where they were asked for."""
        folder, manifest = self._layers.directory(digest), self._layers.manifest(digest)
        if not (folder / DATA).exists():
            return 0
        return present_bytes(folder, ChunkIndex.read(folder / INDEX, manifest))

    def took_over(self, digests: Iterable[str]) -> None:
        """These are mounted from before, and a living pager serves them."""
        self._attached.update(digests)

    @asynccontextmanager
    async def opened(self, digest: str, *, prefetch: bool = True) -> AsyncIterator[Path]:
        """The file to mount as the layer's data, ready to be read; within the context no other process ends its service. `prefetch`: begin
        to fetch along its profile. Raises ImageUnavailable."""
        folder = self._layers.directory(digest)
        origin = await asyncio.to_thread(read_origin, folder)
        if origin is None:
            yield folder / DATA
            return
        async with _locked(folder, fcntl.LOCK_SH):
            touch(folder)
            try:
                if origin.load is LoadMode.SHARED:
                    path = await self._shared(digest, origin)
                else:
                    path = folder / DATA
                    if self.is_served(digest):
                        path = await self._attach(digest, folder, origin, prefetch=prefetch)
            except ImageUnavailable:
                raise
            except DSecError as error:
                raise ImageUnavailable(f"layer {digest} cannot be loaded: {error.detail}", layer=digest) from error
            yield path

    async def _shared(self, digest: str, origin: Origin) -> Path:
        data = self._layers.manifest(digest).data
        store = open_store(self._stores.find(origin.store))
        there = await asyncio.to_thread(plain_place, store, data.digest)
        choose_path(origin.load, Mechanism.AUTO, await self._ladder(), Place(url=origin.store, plain=there))
        return Path(there)

    async def _attach(self, digest: str, folder: Path, origin: Origin, *, prefetch: bool) -> Path:
        place = Place(url=origin.store)
        path = choose_path(LoadMode.ON_DEMAND, Mechanism(self._settings.mechanism), await self._ladder(), place)
        await self.process.ensure()
        layer = digest.removeprefix("sha256:")
        found = await self.process.client.attach(
            layer, folder, self._stores.find(origin.store), Mechanism(str(path)), self._settings.wait_seconds
        )
        self._attached.add(digest)
        if prefetch and not found.whole:
            await self._prefetch(digest, folder)
        return Path(found.data_path)

    async def _prefetch(self, digest: str, folder: Path) -> None:
        """Begins to fetch along the layer's profile. A start without it is slower, and no failure."""
        try:
            profile = await asyncio.to_thread(self._profile, digest, folder)
            if profile:
                await self.process.client.prefetch(digest.removeprefix("sha256:"), ranges_of(profile, _PREFETCH_GAP))
        except (DSecError, OSError) as error:
            _log.warning("layer %s is not prefetched: %s", digest, error)

    def _profile(self, digest: str, folder: Path) -> tuple[int, ...]:
        try:
            index = ChunkIndex.read(folder / INDEX, self._layers.manifest(digest))
            profile = read_profile(folder, digest, index.count)
        except InvalidArgument as error:
            raise ImageUnavailable(error.detail) from error
        return profile.order if profile is not None else ()

    async def close(self, digest: str) -> None:
        """Ends serving a layer that is no longer mounted; any number of times."""
        if digest not in self._attached:
            return
        await self.read_stats()
        touch(self._layers.directory(digest))
        await self._end(digest)

    async def serving(self) -> tuple[str, ...]:
        """Digests of all layers that the pager serves, for whomever."""
        return tuple(f"sha256:{each.layer}" for each in await self.process.client.stats())

    def lose(self) -> frozenset[str]:
        """The pager has ended with all that it served: forgets that, and says what it was."""
        lost, self._attached = frozenset(self._attached), set()
        self._last.clear()
        return lost

    async def read_stats(self) -> dict[str, LayerReads]:
        """What the pager counts of each attached layer by now; adds it to `total`. Empty where none is attached."""
        if not self._attached:
            return {}
        found = {f"sha256:{each.layer}": each for each in await self.process.client.stats()}
        for digest, reads in found.items():
            self.total = sum_reads(self.total, grown(self._last.get(digest), reads))
            self._last[digest] = reads
        return found

    async def errors(self, digests: Iterable[str]) -> int:
        """Reads of these layers that have failed, since they were attached."""
        wanted = self._attached.intersection(digests)
        if not wanted:
            return 0
        found = await self.read_stats()
        return sum(found[digest].errors for digest in wanted if digest in found)

    async def evict(self, digest: str, *, quiet_seconds: float = 0.0) -> int:
        """Takes the chunks of a layer off the disk, attached or not; the bytes that came free. `quiet_seconds`: where it is mounted, not those
        asked for within: who was let through may still be about to read them, so 0 is for a layer that no sandbox has.

        Raises NotFound for a layer of no store, Conflict where another command is at work with it.
        """
        folder, layer = self._layers.directory(digest), digest.removeprefix("sha256:")
        origin = read_origin(folder)
        if origin is None:
            raise NotFound(f"layer {digest} is in no store: its data is nowhere else", what="store")
        await self.process.ensure()
        if digest in self._attached:
            return await self.process.client.evict(layer, quiet_seconds=quiet_seconds)
        path = choose_path(
            LoadMode.ON_DEMAND, Mechanism(self._settings.mechanism), await self._ladder(), Place(url=origin.store)
        )
        store, wait = self._stores.find(origin.store), self._settings.wait_seconds
        async with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            await self.process.client.attach(layer, folder, store, Mechanism(str(path)), wait)
            try:
                return await self.process.client.evict(layer, quiet_seconds=quiet_seconds)
            finally:
                await self._detach(layer)

    async def fill(self, digest: str, progress: Progress) -> None:
        """Fetches all that is missing of a layer, and waits for it. Raises Unavailable where nothing comes for twice the time that a read waits."""
        if not await asyncio.to_thread(self.is_served, digest):
            return
        layer = digest.removeprefix("sha256:")
        async with self.opened(digest):
            await self.process.client.fill(layer)
            (reads,) = await self.process.client.stats(layer)
            progress.step(f"fill {layer[:12]}", reads.size - reads.bytes_present)
            here, patience = reads.bytes_present, 2 * self._settings.wait_seconds
            left = patience
            while not reads.whole:
                await asyncio.sleep(_FILL_LOOK)
                (reads,) = await self.process.client.stats(layer)
                progress.add(reads.bytes_present - here)
                left = patience if reads.bytes_present > here else left - _FILL_LOOK
                here = reads.bytes_present
                if left <= 0:
                    raise Unavailable(f"{reads.source} gave nothing more of layer {digest} for {patience:.0f} s")
        await self._end(digest)

    async def trace(
        self, digests: Sequence[str], run: Callable[[], Awaitable[_T]]
    ) -> tuple[_T, dict[str, tuple[int, ...]]]:
        """What `run` gives, and the chunks of each layer in the order in which they were first touched meanwhile."""
        touched: dict[str, tuple[int, ...]] = {}
        async with AsyncExitStack() as stack:
            for digest in digests:
                await stack.enter_async_context(self.opened(digest, prefetch=False))
                await self.process.client.trace(digest.removeprefix("sha256:"), True)
            found = await run()
            for digest in digests:
                touched[digest] = await self.process.client.trace(digest.removeprefix("sha256:"), False)
        for digest in digests:
            await self._end(digest)
        return found, touched

    async def _end(self, digest: str) -> None:
        """Lets go of a layer, unless it is mounted or another process is about something with it, which does that in time."""
        self._attached.discard(digest)
        self._last.pop(digest, None)
        try:
            async with _locked(self._layers.directory(digest), fcntl.LOCK_EX | fcntl.LOCK_NB):
                await self._detach(digest.removeprefix("sha256:"))
        except Conflict as busy:
            _log.info("layer %s stays attached: %s", digest, busy)

    async def _detach(self, layer: str) -> None:
        try:
            await self.process.client.detach(layer)
        except Conflict as busy:
            _log.debug("layer %s stays attached: %s", layer, busy)  # it is mounted


@asynccontextmanager
async def _locked(folder: Path, how: int) -> AsyncIterator[None]:
    """A layer's folder, locked against other processes: who mounts it, and who ends its service, exclude each other. Raises Conflict where
    `how` is not to wait."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            await asyncio.to_thread(fcntl.flock, fd, how)
        except BlockingIOError:
            raise Conflict(f"another command is at work with layer {folder.name}", what="layer") from None
        yield
    finally:
        os.close(fd)


def touch(folder: Path) -> None:
    """Marks a layer of a store as used now, for the least recently used to be told."""
    try:
        os.utime(folder / ORIGIN)
    except FileNotFoundError:
        return
