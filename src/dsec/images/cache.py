"""What loaded layers take of the node's disk, and how that is bounded: shown, pinned, evicted and forgotten."""

import asyncio
import logging
import os
import sys
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct, structs

from dsec.images.collect import Collected, collect
from dsec.images.making import DATA
from dsec.images.names import NameStore
from dsec.images.ondemand import OnDemand
from dsec.images.origins import ORIGIN, read_origin
from dsec.images.settings import ImagesSettings
from dsec.images.spool import Digest
from dsec.images.store import LayerStore
from dsec.model.errors import Conflict, ImageUnavailable, NotFound
from dsec.model.loading import LayerCache, LoadMode
from dsec.ports.clock import Clock
from dsec.rules.eviction import choose_evictions, taken

__all__ = ["Cache", "Trimmed"]

_log = logging.getLogger("dsec.images")
_MIB = 1 << 20
# A create may have composed a layer and not mounted it yet.
_JUST_USED = 60.0
_QUIET_SECONDS = 60.0


class Trimmed(Struct, frozen=True, kw_only=True):
    """What an eviction did: layers whose chunks went, layers that were forgotten, and the bytes that came free."""

    evicted: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    freed_bytes: int = 0


class Cache:
    """The loaded layers below the state directory `state`. `taken`: bytes that they took when that was last looked at."""

    def __init__(
        self, state: Path, layers: LayerStore, names: NameStore, clock: Clock, on_demand: OnDemand, settings: ImagesSettings
    ) -> None:  # fmt: skip
        self._state = state
        self._pins = state / "pins"
        self._layers = layers
        self._names = names
        self._clock = clock
        self._on_demand = on_demand
        self._settings = settings
        self.taken = 0

    @property
    def marks(self) -> tuple[int, int]:
        """The high and the low mark, in bytes; a high one of 0 evicts nothing."""
        return self._settings.cache_high_mb * _MIB, self._settings.cache_low_mb * _MIB

    def look(self, live: Collection[str]) -> list[LayerCache]:
        """All layers of the node, by digest; `live`: those that sandboxes have."""
        named: dict[str, list[str]] = {}
        for record in self._names.all():
            named.setdefault(record.digest, []).append(record.name)
        pins = self.pins()
        found = []
        for digest in self._layers.digests():
            layer = self._look_at(digest, tuple(named.get(digest, ())), digest in live, pins)
            if layer is not None:
                found.append(layer)
        return found

    def _look_at(self, digest: str, names: tuple[str, ...], live: bool, pins: Collection[str]) -> LayerCache | None:
        folder = self._layers.directory(digest)
        try:
            origin = read_origin(folder)
            sizes = {entry.name: entry.stat().st_blocks * 512 for entry in os.scandir(folder)}
            used = (folder / (ORIGIN if origin else DATA)).stat().st_mtime
        except FileNotFoundError:
            return None  # removed by another process meanwhile
        except ImageUnavailable as error:
            _log.warning("layer %s is left out of the cache: %s", digest, error)
            return None
        in_store = origin is not None
        return LayerCache(
            layer=digest,
            bytes_here=sum(sizes.values()),
            data_here=sizes.get(DATA, 0) if origin is not None and origin.load is LoadMode.ON_DEMAND else 0,
            used=used,
            evictable=in_store,
            live=live,
            pinned=digest in pins,
            # One without a name of its own lies below another, and goes with that.
            pulled=origin is None or origin.pulled or not names,
            names=names,
            source=origin.store if origin is not None else "",
        )

    async def trim(self, live: Collection[str]) -> Trimmed:
        """Evicts down to the low mark, if the high one is reached. Raises what the pager does; what was done until then stays done."""
        high, low = self.marks
        return await self._carry_out(live, high or sys.maxsize, low)

    async def shrink(self, live: Collection[str], low: int) -> Trimmed:
        """Evicts down to `low` bytes, whatever the high mark is."""
        return await self._carry_out(live, low + 1, low)

    async def _carry_out(self, live: Collection[str], high: int, low: int) -> Trimmed:
        layers = await asyncio.to_thread(self.look, live)
        recent = self._clock.now() - _JUST_USED
        layers = [structs.replace(each, live=True) if each.used > recent else each for each in layers]
        self.taken = taken(layers)
        chosen = choose_evictions(layers, high, low)
        evicted: list[str] = []
        forgotten: list[str] = []
        freed = 0
        for each in chosen:
            if each.forget:
                forgotten.append(each.layer)
                continue
            try:
                freed += await self._on_demand.evict(each.layer)
                evicted.append(each.layer)
            except Conflict as busy:
                _log.info("layer %s is not evicted now: %s", each.layer, busy)
        if forgotten:
            done = await asyncio.to_thread(self._forget, forgotten)
            freed += done.freed_bytes
        self.taken = max(0, self.taken - freed)
        return Trimmed(evicted=tuple(evicted), forgotten=tuple(forgotten), freed_bytes=freed)

    def _forget(self, digests: list[str]) -> Collected:
        gone = set(digests)
        for record in self._names.all():
            if record.digest in gone:
                self._names.remove(record.name)
        return collect(self._state, self._layers, self._names)

    def pins(self) -> frozenset[str]:
        """Digests of pinned layers."""
        try:
            return frozenset(f"sha256:{entry.name}" for entry in os.scandir(self._pins) if len(entry.name) == 64)
        except FileNotFoundError:
            return frozenset()

    def pin(self, digests: Collection[str]) -> None:
        """Keeps layers from eviction until `unpin`."""
        self._pins.mkdir(mode=0o700, exist_ok=True)
        for digest in digests:
            (self._pins / Digest(digest).hex).touch(mode=0o600)

    def unpin(self, digests: Collection[str]) -> None:
        """Lets layers be evicted again; those that are not pinned are well."""
        for digest in digests:
            (self._pins / Digest(digest).hex).unlink(missing_ok=True)

    def stack(self, name: str) -> tuple[str, ...]:
        """The layers of the image `name` (a name or a digest), lowest first. Raises NotFound, ImageUnavailable."""
        digest = self._names.record(name).digest
        try:
            return (*self._layers.manifest(digest).below, digest)
        except NotFound as error:
            raise ImageUnavailable(f"the layer of {name!a} is missing in the store: {digest}") from error

    async def evict(self, name: str, live: Collection[str]) -> int:
        """Takes the chunks of an image off the disk; sandboxes that have it (`live`) read them again from its store, and keep what they
        touched in the last minute. The bytes that came free.

        Raises NotFound where a layer of it is in no store.
        """
        freed = 0
        for digest in self.stack(name):
            if self._is_loaded(digest):
                quiet = _QUIET_SECONDS if digest in live else 0.0
                freed += await self._on_demand.evict(digest, quiet_seconds=quiet)
        return freed

    def _is_loaded(self, digest: str) -> bool:
        """Whether the layer's data came from a store, chunk by chunk. Raises NotFound for a layer of no store."""
        origin = read_origin(self._layers.directory(digest))
        if origin is None:
            raise NotFound(f"layer {digest} is in no store: its data is nowhere else", what="store")
        return origin.load is LoadMode.ON_DEMAND
