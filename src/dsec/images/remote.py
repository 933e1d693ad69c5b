"""Images that this node does not have, found by name in the operator's stores.

What comes is the metadata, all of it checked; the data follows as it is read, is read where it is, or is copied first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dsec.images.importing import Quiet
from dsec.images.inputs import Progress
from dsec.images.making import Made
from dsec.images.names import NameStore, check_name
from dsec.images.origins import MAP, decode_profile, keep_profile, make_sparse, read_profile, write_origin
from dsec.images.settings import ImagesSettings, Stores
from dsec.images.store import LayerStore
from dsec.images.stores.layout import Folder, Item, Store, open_head
from dsec.images.stores.objects import Directory
from dsec.images.stores.opening import open_store
from dsec.images.stores.plain import plain_item
from dsec.images.stores.pull import Fetched, fetch_data, fetch_layer
from dsec.images.stores.signing import parse_key, require_signature
from dsec.images.stores.transfer import PulledImage, stack_of, stored_name
from dsec.images.turns import Turns
from dsec.model.errors import DSecError, ImageUnavailable, InvalidArgument, NotFound, PermissionDenied
from dsec.model.layers import NameRecord
from dsec.model.loading import Ladder, LoadMode, LoadPath, Mechanism, Origin
from dsec.model.stores import StoreOptions
from dsec.ports.clock import Clock
from dsec.rules.loading import Place, choose_path

__all__ = ["Asked", "Remote", "plain_place", "push_profile"]

_log = logging.getLogger("dsec.images")
_AT_ONCE = 8
_MISSING_SECONDS, _MISSING_NAMES = 5.0, 4096
_PROFILE_BYTES = 64 << 20
_PROFILES = 1000


class Asked:
    """How a name was asked for. `load` None: as the node is set; `pulled`: by a person, so that eviction does not forget it."""

    def __init__(self, load: LoadMode | None = None, *, pulled: bool = False) -> None:
        self.load = load
        self.pulled = pulled


class Remote:
    """The configured stores of a node. `ladder`: the paths that its host has, asked when first needed."""

    def __init__(
        self, layers: LayerStore, names: NameStore, clock: Clock, stores: Stores, settings: ImagesSettings,
        ladder: Callable[[], Awaitable[Ladder]],
    ) -> None:  # fmt: skip
        self._layers = layers
        self._names = names
        self._clock = clock
        self._stores = stores
        self._settings = settings
        self._ladder = ladder
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._turns = Turns()
        self._missing: dict[str, float] = {}

    @property
    def configured(self) -> bool:
        """Whether there is any store to look in."""
        return bool(self._stores.all())

    async def find(self, name: str, asked: Asked | None = None) -> NameRecord:
        """Brings `name`, which is not here, from the first store that has it; for one name at a time, however many ask.

        Raises NotFound where every store says so, PermissionDenied without a signature that is asked for, and ImageUnavailable
        where a store does not answer or gives what is wrong.
        """
        if not name.startswith("sha256:"):
            check_name(name)
        async with self._turns.of(name):
            try:
                return self._names.record(name)
            except NotFound as missing:
                if self._is_missing(name):
                    raise
                first = missing
            try:
                async with self._slots, asyncio.timeout(self._settings.fetch_seconds):
                    return await self._search(name, asked or Asked(), first)
            except TimeoutError as error:
                raise ImageUnavailable(
                    f"no store gave {name!a} within {self._settings.fetch_seconds:.0f} s", image=name
                ) from error

    async def _search(self, name: str, asked: Asked, missing: NotFound) -> NameRecord:
        failed: DSecError | None = None
        for options in self._stores.all():
            try:
                await self.pull(options, name, asked)
                return self._names.record(name)
            except NotFound as absent:
                failed = await _store_fault(options, absent) or failed
            except (PermissionDenied, InvalidArgument):
                raise
            except DSecError as error:
                failed = error
        if failed is not None:
            raise ImageUnavailable(f"{name!a}: {failed.detail}", image=name) from failed
        self._miss(name)
        raise missing

    async def pull(
        self, options: StoreOptions, name: str, asked: Asked, progress: Progress | None = None
    ) -> PulledImage:
        """Brings `name` from that store, in place of what it stood for here. A layer that is here stays as it is. Raises as `find`, and as
        the store's client does."""
        store = open_store(options)
        try:
            stored = await stored_name(store, name)
            signed = await require_signature(store, stored.digest, name, [parse_key(key) for key in options.keys])
            digests = await stack_of(store, stored.digest)
            with self._layers.scratch() as scratch:
                made = []
                for number, digest in enumerate(digests):
                    if not self._layers.exists(digest):
                        origin = Origin(
                            store=options.url, load=asked.load or LoadMode(self._settings.load), pulled=asked.pulled
                        )
                        made.append(
                            await self._fetch(store, digest, scratch / str(number), origin, progress or Quiet())
                        )
                record = NameRecord(
                    name=name, digest=stored.digest, origin=stored.origin or options.url, created=self._clock.now()
                )
                await asyncio.to_thread(self._keep, made, record)
            fetched = tuple(layer.digest for layer in made)
            return PulledImage(
                name=name, digest=stored.digest, fetched=fetched, signed_by=tuple(key.text for key in signed)
            )
        finally:
            await store.close()

    async def _fetch(self, store: Store, digest: str, folder: Path, origin: Origin, progress: Progress) -> Made:
        profile: bytes | None = None

        async def look() -> None:
            nonlocal profile
            profile = await _newest_profile(store, digest)

        async with _together() as group:
            group.create_task(look())
            fetched = await fetch_layer(store, digest, folder)
        plain = await asyncio.to_thread(plain_place, store, fetched.manifest.data.digest)
        place = Place(url=origin.store, plain=plain)
        path = choose_path(origin.load, Mechanism(self._settings.mechanism), await self._ladder(), place)
        await self._give_data(store, fetched, path, progress)
        if profile is not None:
            _keep_checked(folder, profile, digest, fetched.index.count)
        write_origin(folder, origin)
        return Made(folder, digest, fetched.manifest)

    async def _give_data(self, store: Store, fetched: Fetched, path: LoadPath, progress: Progress) -> None:
        if path in (LoadPath.FANOTIFY, LoadPath.FUSE):
            make_sparse(fetched.folder, fetched.index)
            return
        if path is LoadPath.WHOLE:
            await fetch_data(store, fetched, progress)
        (fetched.folder / MAP).unlink()

    def _keep(self, made: Sequence[Made], record: NameRecord) -> None:
        def give_name(_: str) -> None:
            if not record.name.startswith("sha256:"):
                self._names.set(record)

        if made:
            self._layers.publish(made, give_name)
        else:
            give_name(record.digest)

    def _is_missing(self, name: str) -> bool:
        until = self._missing.get(name)
        return until is not None and self._clock.monotonic() < until

    def _miss(self, name: str) -> None:
        """Remembers for a moment that no store has it: a loop of creates is no load on them."""
        if len(self._missing) >= _MISSING_NAMES:
            self._missing.clear()
        self._missing[name] = self._clock.monotonic() + _MISSING_SECONDS


@asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first failure as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as several:
        raise several.exceptions[0] from several


async def _store_fault(options: StoreOptions, absent: NotFound) -> DSecError | None:
    """Why a store that lacks a name cannot be believed: it is not there itself, as a filesystem that is not mounted; None where it is."""
    if absent.fields.get("what") == "store":
        return absent
    store = open_store(options)
    try:
        await open_head(store, create=False)
    except DSecError as error:
        return error
    finally:
        await store.close()
    return None


def plain_place(store: Store, data_digest: str) -> str:
    """The file with the store's uncompressed copy of that data on this host; "" where there is none."""
    place = store.place(plain_item(data_digest)) if isinstance(store, Directory) else None
    return str(place) if place is not None and place.is_file() else ""


async def _newest_profile(store: Store, digest: str) -> bytes | None:
    """The profile of the highest version that the store has. One that cannot be read is no reason not to start."""
    layer = digest.removeprefix("sha256:")
    try:
        best = await _newest_version(store, layer)
        return await store.read(Item(Folder.PROFILES, f"{layer}/{best}", layer), _PROFILE_BYTES) if best else None
    except DSecError as error:
        _log.warning("layer %s starts without a profile: %s", layer, error)
        return None


async def push_profile(store: Store, folder: Path, digest: str, chunks: int) -> int | None:
    """Puts the profile beside a layer into its store, as a version above those that the store has; that version, None for no profile.

    Raises InvalidArgument for a damaged one, and as the store does.
    """
    profile = await asyncio.to_thread(read_profile, folder, digest, chunks)
    if profile is None:
        return None
    layer = digest.removeprefix("sha256:")
    newest = await _newest_version(store, layer)
    if newest >= profile.version:
        profile = replace(profile, version=newest + 1)
        await asyncio.to_thread(keep_profile, folder, profile)
    await store.write(Item(Folder.PROFILES, f"{layer}/{profile.version}", layer), msgspec.json.encode(profile))
    return profile.version


async def _newest_version(store: Store, layer: str) -> int:
    best = seen = 0
    async for stored in store.list(Folder.PROFILES, layer):
        seen += 1
        version = stored.name.rpartition("/")[2]
        if version.isascii() and version.isdecimal() and len(version) < 10:
            best = max(best, int(version))
        if seen >= _PROFILES:
            break
    return best


def _keep_checked(folder: Path, raw: bytes, layer: str, chunks: int) -> None:
    try:
        profile = decode_profile(raw, layer, chunks)
    except InvalidArgument as error:
        _log.warning("layer %s starts without its store's profile: %s", layer, error)
        return
    keep_profile(folder, profile)
