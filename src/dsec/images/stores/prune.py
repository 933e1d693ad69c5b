"""Prune: what no name of a store reaches goes, and no push that runs meanwhile is undone.

In two steps. What is found unreached gets a mark in `condemned/`; a later prune removes what is still unreached and whose mark is
GRACE_SECONDS old. A push may build on what is unreached or marked, as long as the mark is younger than SAFE_SECONDS: it publishes
within PUSH_SECONDS or not at all, so what it builds on is reached again before the mark is old enough. What has an older
mark a push neither uses nor writes.
"""

import asyncio
import urllib.parse
from collections.abc import Collection, Iterable

from msgspec import Struct

from dsec.images.groups import first_failure
from dsec.images.index import ENTRY_BYTES, HEAD_BYTES
from dsec.images.stores.known import Known
from dsec.images.stores.layout import (
    GRACE_SECONDS,
    MAX_DOCUMENT_BYTES,
    Folder,
    Item,
    Store,
    Stored,
    mark_of,
    open_head,
    read_name,
)
from dsec.images.stores.objects import Directory
from dsec.images.stores.pull import fetch_manifest
from dsec.model.errors import NotFound
from dsec.model.layers import LayerManifest
from dsec.ports.clock import Clock
from dsec.rules.chunkmap import ChunkMap, map_bytes

__all__ = ["GRACE_SECONDS", "Pruned", "prune"]

_PARALLEL = 8
# Manifests first: what is left of a prune that is killed is invisible.
_FOLDERS = (Folder.MANIFESTS, Folder.MAPS, Folder.PLAIN, Folder.BLOBS, Folder.SIGNATURES, Folder.PROFILES, Folder.PACKS)


class Pruned(Struct, frozen=True, kw_only=True):
    """What went: layers, items (layers among them) and their bytes. `marked`: items that a later prune may remove."""

    layers: int = 0
    items: int = 0
    freed_bytes: int = 0
    marked: int = 0


async def prune(store: Store, clock: Clock, grace: float = GRACE_SECONDS, *, dry_run: bool = False) -> Pruned:
    """Removes, or marks, what no name reaches. `grace`: seconds; 0 removes at once, for a store that nobody pushes to meanwhile.

    Raises ImageUnavailable, and removes nothing, when what a name stands for cannot be read; Unsupported for a registry.
    """
    known = Known(store, await open_head(store, create=False), clock)
    marks = {stored.name: stored.modified async for stored in store.list(Folder.CONDEMNED)}
    listed = {folder: [stored async for stored in store.list(folder)] for folder in _FOLDERS}
    # After the listing: what is published meanwhile is reached, or was not listed.
    reached = await _reached(store)
    doomed, fresh = [], []
    for folder, items in listed.items():
        for stored in items:
            item = Item(folder, stored.name)
            mark = mark_of(item)
            if _key(folder, stored.name) in reached:
                continue
            age = clock.now() - marks[mark] if mark in marks else -1.0
            if grace <= 0 or age >= grace:
                doomed.append((item, stored))
            elif mark not in marks:
                fresh.append(item)
    stale = marks.keys() - {
        mark_of(Item(f, s.name)) for f, items in listed.items() for s in items if _key(f, s.name) not in reached
    }
    if not dry_run:
        await _carry_out(store, known, doomed, fresh, stale)
        if isinstance(store, Directory):
            await asyncio.to_thread(store.remove_leftovers, clock.now() - grace)
    return Pruned(
        layers=sum(item.folder is Folder.MANIFESTS for item, _ in doomed),
        items=len(doomed),
        freed_bytes=sum(stored.size for _, stored in doomed),
        marked=len(fresh),
    )


async def _carry_out(
    store: Store, known: Known, doomed: Iterable[tuple[Item, Stored]], fresh: Iterable[Item], stale: Iterable[str]
) -> None:
    packs = {bytes.fromhex(item.name) for item, _ in doomed if item.folder is Folder.PACKS}
    if packs:
        await known.forget(packs)
    for mark in stale:
        await store.remove(Item(Folder.CONDEMNED, mark))
    for item, _ in doomed:
        await store.remove(item)
        await store.remove(Item(Folder.CONDEMNED, mark_of(item)))
    for item in fresh:
        await store.write(Item(Folder.CONDEMNED, mark_of(item)), b"{}")


def _key(folder: Folder, name: str) -> tuple[Folder, str]:
    """What an item's being reached goes by: the layer, for what lies beside a layer."""
    return folder, name.partition("/")[0]


async def _reached(store: Store) -> Collection[tuple[Folder, str]]:
    """The keys of all that names of the store reach."""
    tops = set()
    async for stored in store.list(Folder.NAMES):
        name = urllib.parse.unquote(stored.name)
        try:
            tops.add(read_name(await store.read(Item(Folder.NAMES, stored.name), MAX_DOCUMENT_BYTES), name).digest)
        except NotFound:
            continue  # removed meanwhile
    reached: set[tuple[Folder, str]] = set()
    slots = asyncio.Semaphore(_PARALLEL)
    done: set[str] = set()

    async def follow(digest: str) -> tuple[str, ...]:
        async with slots:
            try:
                _, manifest = await fetch_manifest(store, digest)
            except NotFound:
                return ()
            reached.update(await _keys_of(store, digest.removeprefix("sha256:"), manifest))
            return manifest.below

    while tops := tops - done:
        done |= tops
        with first_failure():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(follow(digest)) for digest in sorted(tops)]
        tops = {below for task in tasks for below in task.result()}
    return reached


async def _keys_of(store: Store, layer: str, manifest: LayerManifest) -> list[tuple[Folder, str]]:
    count = (manifest.index.size - HEAD_BYTES) // ENTRY_BYTES
    found = [(folder, layer) for folder in (Folder.MANIFESTS, Folder.MAPS, Folder.SIGNATURES, Folder.PROFILES)]
    blobs = (manifest.meta, manifest.files, manifest.index)
    found += [(Folder.BLOBS, blob.digest.removeprefix("sha256:")) for blob in blobs]
    found.append((Folder.PLAIN, manifest.data.digest.removeprefix("sha256:")))
    places = ChunkMap(await store.read(Item(Folder.MAPS, layer, layer), map_bytes(count, count)), count)
    return found + [(Folder.PACKS, pack.hex()) for pack in places.packs]
