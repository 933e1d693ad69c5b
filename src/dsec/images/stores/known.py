"""The known index of a store: which chunks it has and where, so that a related image stores what is new in it and no more."""

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from dsec.images.groups import first_failure
from dsec.images.stores.layout import SAFE_SECONDS, Folder, Item, Store, Stored, StoreHead, mark_of
from dsec.model.errors import ImageUnavailable, NotFound
from dsec.ports.clock import Clock
from dsec.rules.chunkmap import Place
from dsec.rules.known import MAX_SEGMENT_BYTES, decode_segment, encode_segment, find_places, shard_of, to_merge

__all__ = ["Known"]

_PARALLEL = 8
_CACHE_BYTES = 128 << 20
_READ_BYTES = 2 << 30


class Known:
    """The known index of `store`. Nothing in it must be right for a store to be sound: an entry that is missing costs space, and
    packs that are gone, or that `prune` will remove, are not believed in."""

    def __init__(self, store: Store, head: StoreHead, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._bits = head.known_bits
        self._cache: dict[str, bytes] = {}
        self._cached = 0

    async def condemned(self) -> set[str]:
        """The marks of what a push must leave alone: `prune` may remove it at any time from now on."""
        oldest = self._clock.now() - SAFE_SECONDS
        return {stored.name async for stored in self._store.list(Folder.CONDEMNED) if stored.modified <= oldest}

    async def places(self, wanted: Collection[bytes], condemned: Collection[str]) -> dict[bytes, Place]:
        """Where chunks (by sha256) are that the store has; in packs that are there and have no mark in `condemned`."""
        shards = {shard_of(digest, self._bits) for digest in wanted}
        listed = [s async for s in self._store.list(Folder.KNOWN) if s.name.partition("/")[0] in shards]
        wanted, found, left = frozenset(wanted), dict[bytes, Place](), _READ_BYTES
        slots = asyncio.Semaphore(_PARALLEL)

        async def look(stored: Stored) -> None:
            async with slots:
                raw = await self._segment(stored.name)
            if raw is not None:
                with suppress(ImageUnavailable):  # a damaged segment costs space, no more
                    found.update(await asyncio.to_thread(find_places, raw, wanted))

        with first_failure():
            async with asyncio.TaskGroup() as group:
                for stored in sorted(listed, key=lambda each: each.size, reverse=True):
                    left -= stored.size
                    if left >= 0:
                        group.create_task(look(stored))
        sizes = await self._sizes({place.pack for place in found.values()})
        return {
            digest: place
            for digest, place in found.items()
            if mark_of(_pack(place.pack)) not in condemned and place.offset + place.length <= (sizes[place.pack] or 0)
        }

    async def add(self, places: Mapping[bytes, Place]) -> None:
        """Says where new chunks are. What is said more than once does no harm."""
        shards: dict[str, dict[bytes, Place]] = {}
        for digest, place in places.items():
            shards.setdefault(shard_of(digest, self._bits), {})[digest] = place
        slots = asyncio.Semaphore(_PARALLEL)

        async def write(shard: str, part: Mapping[bytes, Place]) -> None:
            async with slots:
                await self._write(shard, part)

        with first_failure():
            async with asyncio.TaskGroup() as group:
                for shard, part in shards.items():
                    group.create_task(write(shard, part))

    async def compact(self) -> int:
        """Makes one segment of many small ones, shard by shard; how many went. Readers find the new one before the old ones go."""
        shards: dict[str, list[tuple[str, int]]] = {}
        async for stored in self._store.list(Folder.KNOWN):
            shards.setdefault(stored.name.partition("/")[0], []).append((stored.name, stored.size))
        gone = 0
        for shard, segments in shards.items():
            if chosen := to_merge(segments):
                gone += await self._replace(shard, chosen, frozenset())
        return gone

    async def forget(self, packs: Collection[bytes]) -> None:
        """Takes all that lies in `packs` out of the index, and segments that are damaged."""
        async for stored in self._store.list(Folder.KNOWN):
            raw = await self._segment(stored.name)
            said = None if raw is None else _said(raw)
            if said is None or any(place.pack in packs for place in said.values()):
                await self._replace(stored.name.partition("/")[0], [stored.name], packs)

    async def _replace(self, shard: str, names: Sequence[str], without: Collection[bytes]) -> int:
        merged: dict[bytes, Place] = {}
        for name in names:
            raw = await self._segment(name)
            said = _said(raw) if raw is not None else None
            merged.update((digest, place) for digest, place in (said or {}).items() if place.pack not in without)
        kept = await self._write(shard, merged) if merged else ""
        for name in names:
            if name != kept:
                await self._store.remove(Item(Folder.KNOWN, name))
        return len(names)

    async def _write(self, shard: str, places: Mapping[bytes, Place]) -> str:
        raw = encode_segment(places)
        name = f"{shard}/{hashlib.sha256(raw).hexdigest()}"
        await self._store.write(Item(Folder.KNOWN, name), raw)
        return name

    async def _segment(self, name: str) -> bytes | None:
        """A segment's bytes; None for one that was merged away since it was listed, or that is not what its name says."""
        if name in self._cache:
            return self._cache[name]
        try:
            raw = await self._store.read(Item(Folder.KNOWN, name), MAX_SEGMENT_BYTES)
        except (NotFound, ImageUnavailable):
            return None
        if hashlib.sha256(raw).hexdigest() != name.rpartition("/")[2]:
            return None
        if self._cached + len(raw) <= _CACHE_BYTES:
            self._cache[name] = raw
            self._cached += len(raw)
        return raw

    async def _sizes(self, packs: Collection[bytes]) -> dict[bytes, int | None]:
        slots = asyncio.Semaphore(_PARALLEL)
        sizes: dict[bytes, int | None] = {}

        async def ask(pack: bytes) -> None:
            async with slots:
                sizes[pack] = await self._store.size(_pack(pack))

        with first_failure():
            async with asyncio.TaskGroup() as group:
                for pack in packs:
                    group.create_task(ask(pack))
        return sizes


def _said(raw: bytes) -> dict[bytes, Place] | None:
    """All that a segment says; None for a damaged one."""
    try:
        return dict(decode_segment(raw))
    except ImageUnavailable:
        return None


def _pack(pack: bytes) -> Item:
    return Item(Folder.PACKS, pack.hex())
