"""Push: a layer's new chunks go into packs, then everything else of it, then its manifest, which makes all of it visible.

A push that is killed leaves packs that no manifest names; the next one finds them by their digests. Bounded: a pack being
filled, `uploads` packs on the way, and a few MiB of chunks before a thread each.
"""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from dsec.images.groups import first_failure
from dsec.images.inputs import Progress
from dsec.images.stores.frames import press_file
from dsec.images.stores.known import Known
from dsec.images.stores.layout import PUSH_SECONDS, Folder, Item, Store, mark_of
from dsec.images.stores.sources import LayerSource
from dsec.model.errors import Conflict
from dsec.ports.clock import Clock
from dsec.rules.chunkmap import Place, encode_map
from dsec.rules.packs import Frame, Packer

__all__ = ["PushConfig", "Pushed", "Pusher", "ZSTD_LEVEL"]

ZSTD_LEVEL = 3
_PACKS_TO_KNOW = 32


@dataclass(frozen=True)
class PushConfig:
    """`level`: zstd's for chunks, None keeps them raw; `workers`: threads that compress; `uploads`: packs sent at once."""

    level: int | None = ZSTD_LEVEL
    workers: int = os.cpu_count() or 1
    uploads: int = 4


class Pushed(Struct, frozen=True, kw_only=True):
    """What a push of a layer did: chunks with content, those that the store did not have, and the bytes that it now has more.

    `already`: the layer was there, and nothing was sent.
    """

    digest: str
    already: bool = False
    chunks: int = 0
    new_chunks: int = 0
    new_packs: int = 0
    new_bytes: int = 0


class Pusher:
    """Pushes layers to `store`. `scratch`: a folder for compressed copies of metadata."""

    def __init__(
        self, store: Store, known: Known, clock: Clock, scratch: Path, config: PushConfig, progress: Progress
    ) -> None:
        self._store = store
        self._known = known
        self._clock = clock
        self._scratch = scratch
        self._config = config
        self._progress = progress

    async def has(self, digest: str) -> bool:
        """Whether the store has a layer."""
        layer = digest.removeprefix("sha256:")
        return await self._store.size(Item(Folder.MANIFESTS, layer, layer)) is not None

    async def layer(self, source: LayerSource) -> Pushed:
        """Puts a layer into the store unless it is there. Raises Conflict when that took so long that a `prune` may have removed
        what it builds on; run it again then, what was sent is not sent again."""
        began = self._clock.monotonic()
        condemned = await self._known.condemned()
        self._refuse_condemned(source, condemned)
        if await self.has(source.digest):
            return Pushed(digest=source.digest, already=True)
        index = source.index
        first: dict[bytes, int] = {}
        for number in range(index.count):
            if not index.is_zeros(number):
                first.setdefault(index.digest(number), number)
        places = await self._known.places(first.keys(), condemned)
        missing = [number for digest, number in first.items() if digest not in places]
        self._progress.step(f"push {source.digest[7:19]}", sum(index.length(number) for number in missing))
        sent = _Packs(self._store, self._known, self._config, condemned, self._clock)
        places |= await sent.send(source, missing, self._progress)
        map_raw = encode_map([places.get(index.digest(n)) for n in range(index.count)])
        extra = await self._publish(source, map_raw, places, began)
        return Pushed(
            digest=source.digest, chunks=len(first), new_chunks=len(missing), new_packs=sent.packs,
            new_bytes=sent.bytes + extra,
        )  # fmt: skip

    def _refuse_condemned(self, source: LayerSource, condemned: set[str]) -> None:
        layer = source.digest.removeprefix("sha256:")
        blobs = (source.manifest.meta, source.manifest.files, source.manifest.index)
        items = [Item(folder, layer) for folder in (Folder.MANIFESTS, Folder.MAPS)]
        items += [Item(Folder.BLOBS, blob.digest.removeprefix("sha256:")) for blob in blobs]
        if any(mark_of(item) in condemned for item in items):
            text = f"layer {source.digest} is about to be removed by `dsec image prune`: push again when that has run"
            raise Conflict(text, what="layer")

    async def _publish(self, source: LayerSource, map_raw: bytes, places: dict[bytes, Place], began: float) -> int:
        manifest, layer = source.manifest, source.digest.removeprefix("sha256:")
        blobs = {manifest.meta.digest: "meta.erofs", manifest.files.digest: "files.zst", manifest.index.digest: "index"}
        parts, total = [], 0
        for digest, file in blobs.items():
            item = Item(Folder.BLOBS, digest.removeprefix("sha256:"), layer)
            parts.append(item)
            stored = source.folder / file
            if file != "index":
                stored = self._scratch / f"{layer}.{file}"
                await asyncio.to_thread(press_file, source.folder / file, stored)
            size = stored.stat().st_size
            if await self._store.size(item) != size:
                await self._store.write(item, stored)
                total += size
            if file != "index":
                stored.unlink()
        item = Item(Folder.MAPS, layer, layer)
        await self._store.write(item, map_raw)
        parts.append(item)
        parts += [Item(Folder.PACKS, pack.hex(), layer) for pack in sorted({place.pack for place in places.values()})]
        raw = (source.folder / "manifest.json").read_bytes()
        if self._clock.monotonic() - began > PUSH_SECONDS:
            raise Conflict(f"the push took more than {PUSH_SECONDS / 3600:.0f} hours; run it again", what="push")
        await self._store.publish(layer, raw, parts)
        return total + len(map_raw) + len(raw)


class _Packs:
    """The packs of one layer's push: how many, and their bytes."""

    def __init__(self, store: Store, known: Known, config: PushConfig, condemned: set[str], clock: Clock) -> None:
        self._store = store
        self._known = known
        self._condemned = condemned
        self._clock = clock
        self._slots = asyncio.Semaphore(config.uploads)
        self._places: dict[bytes, Place] = {}
        self._unsaid: dict[bytes, Place] = {}
        self.packs = 0
        self.bytes = 0

    async def send(self, source: LayerSource, numbers: Sequence[int], progress: Progress) -> dict[bytes, Place]:
        """Puts chunks into packs and those into the store; gives where the chunks are."""
        packer, done = Packer(), 0
        with first_failure():
            async with asyncio.TaskGroup() as group, aclosing(source.frames(numbers, group)) as batches:
                async for batch in batches:
                    for frame in batch:
                        full = packer.add(frame)
                        if full is not None:
                            await self._start(group, full)
                    progress.add(sum(source.index.length(n) for n in numbers[done : done + len(batch)]))
                    done += len(batch)
                rest = packer.rest()
                if rest:
                    await self._start(group, rest)
        await self._say()
        return self._places

    async def _start(self, group: asyncio.TaskGroup, frames: Sequence[Frame]) -> None:
        await self._slots.acquire()
        group.create_task(self._upload(frames))
        if self.packs and self.packs % _PACKS_TO_KNOW == 0:
            await self._say()

    async def _upload(self, frames: Sequence[Frame]) -> None:
        try:
            raw = b"".join(frame.stored for frame in frames)
            pack = await asyncio.to_thread(_sha256, raw)
            if mark_of(Item(Folder.PACKS, pack.hex())) in self._condemned:
                # The very same pack is about to be removed: this one gets another name.
                raw += self._clock.random(16)
                pack = await asyncio.to_thread(_sha256, raw)
            item = Item(Folder.PACKS, pack.hex())
            if await self._store.size(item) != len(raw):
                await self._store.write(item, raw)
                self.packs += 1
                self.bytes += len(raw)
            offset = 0
            for frame in frames:
                self._unsaid[frame.digest] = Place(pack, offset, len(frame.stored), frame.encoding)
                offset += len(frame.stored)
        finally:
            self._slots.release()

    async def _say(self) -> None:
        """Enters what is sent into the known index: a push that is killed later need not do it again."""
        unsaid, self._unsaid = self._unsaid, {}
        self._places |= unsaid
        if unsaid:
            await self._known.add(unsaid)


def _sha256(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()
