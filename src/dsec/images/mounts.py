"""The image room as an edge sees it: names to layers, layers to mounts, each layer mounted once a node and shared.

A mount is held by whoever asked for it, by a name of his, until he releases it. Mounts outlive the process: at `open` those
below STATE/mnt are taken over. What nobody holds stays mounted for a while, as the next sandbox is likely to want it, and is
unmounted when too many such or too old. A running sandbox does not need the mount it was started from: its root has its own.

The data of a layer that came from a store may be served by the pager (dsec.images.ondemand), for as long as it is mounted.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dsec.images.making import DATA, META
from dsec.images.names import NameStore
from dsec.images.ondemand import OnDemand
from dsec.images.remote import Remote
from dsec.images.settings import ImagesSettings
from dsec.images.store import LayerStore
from dsec.images.turns import Turns
from dsec.images.volumes import Volumes
from dsec.kernel.erofs import cached_bytes
from dsec.kernel.errors import KernelError
from dsec.kernel.mounts import mount_erofs, umount
from dsec.model.errors import DSecError, ImageUnavailable, InvalidArgument, NotFound
from dsec.model.layers import Composition, LayerKind
from dsec.model.plan import Mount
from dsec.model.spec import MountSpec
from dsec.model.views import ImageView
from dsec.ports.clock import Clock

__all__ = ["NodeImages", "mounted_below"]

_log = logging.getLogger("dsec.images")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def mounted_below(folder: Path) -> list[Path]:
    """What is mounted directly below `folder`, from /proc/self/mountinfo."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        place = Path(_ESCAPE.sub(lambda m: chr(int(m[1], 8)), line.split(" ")[4]))
        if place.parent == folder:
            found.append(place)
    return found


class NodeImages:
    """Implements `dsec.ports.images.Images` on the state directory `state`. `volumes`: None where the node has no pool.

    Every method but `open` and `close` is cheap when the layers are mounted: a stat for a name, no thread, no call to mount.
    """

    def __init__(
        self,
        state: Path,
        layers: LayerStore,
        names: NameStore,
        clock: Clock,
        *,
        volumes: Volumes | None = None,
        config: ImagesSettings | None = None,
        remote: Remote | None = None,
        on_demand: OnDemand | None = None,
    ) -> None:
        self._folder = state.resolve() / "mnt"
        self._layers = layers
        self._names = names
        self._clock = clock
        self._volumes = volumes
        self._config = config or ImagesSettings()
        self._mounts: dict[str, Mount] = {}
        self._holders: dict[str, set[str]] = {}
        self._held: dict[str, set[str]] = {}
        self._idle: dict[str, float] = {}
        self._remote = remote
        self._on_demand = on_demand
        self._turns = Turns()
        self._unserved: set[str] = set()
        self.on_lost: Callable[[str, str], None] = _nobody

    async def open(self) -> None:
        """Takes over what is mounted from before, and removes what a killed import left. Raises ImageUnavailable when the state directory's path cannot be used."""
        if "," in str(self._folder):
            raise ImageUnavailable(f"layers cannot be mounted below {self._folder}: mount options end at a comma")
        # Set-uid files of an image are root's on the host: only root may reach them.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        self._layers.clean()
        for place in mounted_below(self._folder):
            digest = f"sha256:{place.name}"
            try:
                self._layers.manifest(digest)
            except (NotFound, InvalidArgument, ImageUnavailable):
                self._unmount(place)
                continue
            self._mounts[digest] = self._mount_of(digest, place, self._layers.directory(digest) / DATA)
            self._idle[digest] = self._clock.monotonic()
        if self._on_demand is not None:
            await self._find_served(self._on_demand)

    async def _find_served(self, on_demand: OnDemand) -> None:
        """Of what is mounted, finds what the pager still serves. What it does not has been read without it: nobody may trust it."""
        served = {digest for digest in self._mounts if on_demand.is_served(digest)}
        if not served:
            return
        alive = set(await on_demand.serving()) if await on_demand.process.running() else set()
        on_demand.took_over(served & alive)
        self._abandon(served - alive)

    def _abandon(self, digests: Iterable[str]) -> None:
        """Unmounts layers that lost their pager; sandboxes that hold them are told of, and those of before are not adopted."""
        for digest in digests:
            _log.error("layer %s is no longer served by a pager: what read it meanwhile may have read zeros", digest)
            self._unserved.add(digest)
            self._idle.pop(digest, None)
            mount = self._mounts.pop(digest, None)
            if mount is not None:
                self._unmount(Path(mount.source))
            for holder in tuple(self._holders.get(digest, ())):
                self.on_lost(holder, f"layer {digest} could not be read: its pager ended")

    async def close(self) -> None:
        """Unmounts what nobody holds. Mounts of sandboxes that live on stay, for the next process to take over."""
        for digest in list(self._idle):
            await self._drop(digest)

    def lacks(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of `names` that are not on this node, if a store is configured in which they could be found."""
        if self._remote is None or not self._remote.configured:
            return ()
        return tuple(name for name in dict.fromkeys(names) if not self._names.has(name))

    async def bring(self, names: Sequence[str]) -> None:
        """Finds `names` in the configured stores. Raises NotFound, ImageUnavailable, PermissionDenied (no valid signature)."""
        if self._remote is None:
            return
        for name in names:
            await self._remote.find(name)

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Composition:
        """Layers by name or digest, lowest first. Raises NotFound, Conflict (another kind), ImageUnavailable."""
        digest, manifest = self._names.resolve(base, LayerKind.BASE)
        layers = [*manifest.below, digest]
        if workspace is not None:
            layers.append(self._names.resolve(workspace, LayerKind.WORKSPACE)[0])
        layers.extend(self._names.resolve(toolkit, LayerKind.TOOLKIT)[0] for toolkit in toolkits)
        repeated = next((layer for layer in layers if layers.count(layer) > 1), None)
        if repeated is not None:
            raise InvalidArgument(f"layer {repeated} is asked for twice", field="toolkits")
        return Composition(layers=tuple(layers), config=manifest.config)

    async def mounts(self, composition: Composition, holder: str) -> list[Mount]:
        """The composition's layers, mounted and held for `holder`. Raises ImageUnavailable; then nothing more is held."""
        before = set(self._held.get(holder, ()))
        try:
            await self._warm(composition.layers)
            return [await self._hold(digest, holder) for digest in composition.layers]
        except BaseException:
            for digest in self._held.get(holder, set()) - before:
                self._let_go(digest, holder)
            raise

    async def _warm(self, digests: Sequence[str]) -> None:
        """Mounts all that are not mounted at once, so that their stores are waited for together."""
        wanted = [digest for digest in digests if digest not in self._mounts]
        if len(wanted) < 2:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for digest in wanted:
                    group.create_task(self._mounted(digest))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several

    async def adopt(self, composition: Composition, specs: Sequence[MountSpec], holder: str) -> list[Mount]:
        """As `mounts`, for a sandbox that lives and reads these layers. Raises ImageUnavailable too where it may have read what is wrong."""
        read = set(composition.layers)
        for name in (spec.data for spec in specs if spec.data is not None):
            try:
                read.add(self._names.record(name).digest)
            except NotFound:
                continue  # its name is gone, or stands for another layer by now
        if lost := read & self._unserved:
            raise ImageUnavailable(f"layer {min(lost)} was not served by a pager for a while")
        return await self.mounts(composition, holder)

    async def extra(self, specs: Sequence[MountSpec], holder: str) -> list[Mount]:
        """Volumes and data layers at their targets, held for `holder`. Raises NotFound, Conflict, InvalidArgument."""
        found = []
        for spec in specs:
            if (spec.volume is None) == (spec.data is None):
                raise InvalidArgument("a mount is either a volume or a data layer", field="mounts")
            if spec.data is not None:
                digest, _ = self._names.resolve(spec.data, LayerKind.DATA)
                layer = await self._hold(digest, holder)
                found.append(
                    Mount(kind="layer", source=layer.source, target=spec.target, digest=digest, images=layer.images)
                )
                continue
            if self._volumes is None:
                raise NotFound("this node has no volumes", what="volume")
            source = self._volumes.directory(spec.volume or "")
            found.append(Mount(kind="volume", source=str(source), target=spec.target, read_only=spec.read_only))
        return found

    async def release(self, holder: str) -> None:
        """Lets go of all that `holder` holds; any number of times."""
        for digest in tuple(self._held.get(holder, ())):
            self._let_go(digest, holder)
        await self._evict()

    def list(self) -> list[ImageView]:
        """All names with their layers."""
        return self._names.views()

    def owner(self, name: str) -> str:
        """The project whose image `name` is; "" for everyone's, and for a name or digest that there is not."""
        try:
            return self._names.record(name).project
        except (NotFound, InvalidArgument, ImageUnavailable):
            return ""

    def held(self) -> frozenset[str]:
        """Digests of layers that somebody holds."""
        return frozenset(digest for digest, holders in self._holders.items() if holders)

    async def read_errors(self, digests: Sequence[str]) -> int:
        """Reads of these layers that failed for want of their store, since they were mounted."""
        return 0 if self._on_demand is None else await self._on_demand.errors(digests)

    async def look(self) -> None:
        """Looks after what is loaded on demand, now and then: that the pager lives, and what it counts."""
        on_demand = self._on_demand
        if on_demand is None or not on_demand.attached:
            return
        if not await on_demand.process.running():
            lost = on_demand.lose()
            self._abandon(lost)
            return
        await on_demand.read_stats()

    def bytes_read(self, digest: str) -> int | None:
        """How much of the layer's data has been read from disk and is in memory now: its pages in the page cache.

        All sandboxes of the node share it; pages that the kernel took back under pressure are not counted. None: not known.
        """
        try:
            return cached_bytes(str(self._layers.directory(digest) / DATA))
        except KernelError:
            return None

    async def _hold(self, digest: str, holder: str) -> Mount:
        mount = self._mounts.get(digest) or await self._mounted(digest)
        self._idle.pop(digest, None)
        self._holders.setdefault(digest, set()).add(holder)
        self._held.setdefault(holder, set()).add(digest)
        return mount

    async def _mounted(self, digest: str) -> Mount:
        """Mounts a layer, which is idle then. A caller that is cancelled goes when it is mounted, so that no mount is nobody's."""
        async with self._turns.of(digest):
            if digest in self._mounts:
                return self._mounts[digest]
            if self._on_demand is None:
                return await self._make(digest, self._layers.directory(digest) / DATA)
            async with self._on_demand.opened(digest) as data:
                return await self._make(digest, data)

    async def _make(self, digest: str, data: Path) -> Mount:
        making = asyncio.get_running_loop().run_in_executor(None, self._mount, digest, data)
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            raise
        finally:
            if making.done() and making.exception() is None:
                self._mounts[digest] = making.result()
                self._idle[digest] = self._clock.monotonic()
                self._unserved.discard(digest)
        return self._mounts[digest]

    def _let_go(self, digest: str, holder: str) -> None:
        mine = self._held.get(holder)
        if mine is not None:
            mine.discard(digest)
            if not mine:
                del self._held[holder]
        holders = self._holders.get(digest)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                del self._holders[digest]
                self._idle[digest] = self._clock.monotonic()

    async def _evict(self) -> None:
        """Unmounts the longest idle beyond the bound, and those idle for too long. `_idle` is in the order of time."""
        oldest = self._clock.monotonic() - self._config.idle_seconds
        while self._idle:
            digest, since = next(iter(self._idle.items()))
            if len(self._idle) <= self._config.idle_mounts and since > oldest:
                return
            await self._drop(digest)

    async def _drop(self, digest: str) -> None:
        """Unmounts an idle layer; done where somebody holds it meanwhile."""
        async with self._turns.of(digest):
            if self._idle.pop(digest, None) is None:
                return
            self._unmount(Path(self._mounts.pop(digest).source))
            if self._on_demand is None:
                return
            try:
                await self._on_demand.close(digest)
            except DSecError as error:
                _log.warning("layer %s stays with the pager: %s", digest, error)

    def _unmount(self, place: Path) -> None:
        try:
            # Lazily: a mount that another process looks into just now goes with its last user.
            if os.path.ismount(place):
                umount(str(place), lazy=True)
            place.rmdir()
        except (KernelError, OSError) as error:
            raise ImageUnavailable(f"{place} cannot be unmounted: {error}") from error

    def _mount(self, digest: str, data: Path) -> Mount:
        manifest = self._layers.manifest(digest)
        meta = self._layers.directory(digest) / META
        place = self._folder / digest.removeprefix("sha256:")
        for name, path, blob in ((META, meta, manifest.meta), (DATA, data, manifest.data)):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ImageUnavailable(f"layer {digest}: {name}: {error.strerror}") from error
            if size != blob.size:
                raise ImageUnavailable(f"layer {digest}: {name} has {size} bytes, its manifest says {blob.size}")
        try:
            place.mkdir(mode=0o755, exist_ok=True)
            if not os.path.ismount(place):
                mount_erofs(str(meta.resolve()), str(data.resolve()), str(place))
        except (KernelError, OSError) as error:
            raise ImageUnavailable(f"layer {digest} cannot be mounted: {error}") from error
        return self._mount_of(digest, place, data)

    def _mount_of(self, digest: str, place: Path, data: Path) -> Mount:
        meta = self._layers.directory(digest) / META
        return Mount(kind="layer", source=str(place), digest=digest, images=(str(meta), str(data)))


def _nobody(holder: str, why: str) -> None:
    return None
