"""Shared stores for tests: in a directory, on an S3 server, in a registry; and what a hostile one does."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec.images.importing import Quiet
from dsec.images.stores.layout import Folder, Item, Store, Stored
from dsec.images.stores.opening import open_store
from dsec.images.stores.push import PushConfig
from dsec.images.stores.signing import PublicKey, Signer
from dsec.images.stores.transfer import Node, PulledImage, PushedImage, pull_images, push_images, sync_images
from dsec.model.stores import StoreOptions
from imagekit import CLOCK, Shelf, file, folder, tar

__all__ = ["CONFIG", "Meddled", "content", "node", "options", "pull_all", "push_all", "same_layer", "sync_all"]

CONFIG = PushConfig(level=3, workers=2)


def node(shelf: Shelf) -> Node:
    return Node(shelf.layers, shelf.names, CLOCK, Quiet())


def content(seed: int, size: int) -> bytes:
    """Bytes that compress a little, the same for the same seed."""
    state, out = seed * 2654435761 + 1, bytearray()
    while len(out) < size:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out += f"{state >> 40:x} line of text {seed}\n".encode()
    return bytes(out[:size])


def import_tree(shelf: Shelf, name: str, files: dict[str, bytes], at: Path) -> str:
    """Imports an image of these files; gives its digest."""
    path = at / f"{name.replace('/', '_')}.tar"
    path.write_bytes(tar([folder("d"), *(file(f"d/{each}", raw) for each, raw in files.items())]))
    return shelf.import_image(name, path).digest


def options(url: str, **more: object) -> StoreOptions:
    return StoreOptions(url=url, **more)  # type: ignore[arg-type]


async def push_all(
    shelf: Shelf,
    store: Store,
    names: Sequence[str],
    signer: Signer | None = None,
    *,
    config: PushConfig = CONFIG,
    plain: bool = False,
) -> list[PushedImage]:
    return [p async for p in push_images(node(shelf), store, names, config, signer, plain=plain)]


async def pull_all(
    shelf: Shelf, store: Store, names: Sequence[str], keys: Sequence[PublicKey] = ()
) -> list[PulledImage]:
    return [p async for p in pull_images(node(shelf), store, names, keys)]


async def sync_all(shelf: Shelf, source: Store, target: Store, names: Sequence[str] = ()) -> list[PushedImage]:
    return [p async for p in sync_images(node(shelf), source, target, names, CONFIG)]


def same_layer(one: Shelf, other: Shelf, digest: str) -> bool:
    """Whether both shelves have the layer, each file of it with the same bytes."""
    places = [shelf.layers.directory(digest) for shelf in (one, other)]
    names = [{entry.name for entry in place.iterdir()} for place in places]
    return names[0] == names[1] and all((places[0] / n).read_bytes() == (places[1] / n).read_bytes() for n in names[0])


def _warm() -> None:
    """Starts obstore's own threads, whose descriptors live as long as the process and are no test's."""
    with tempfile.TemporaryDirectory() as place:
        open_store(options("s3://bucket/warm"))
        asyncio.run(open_store(options(f"file://{place}")).size(Item(Folder.PACKS, "none")))


_warm()


@dataclass
class Meddled:
    """A store that lies: `instead` has what it says for a path, `counts` how often each path was read."""

    inner: Store
    instead: dict[str, bytes] = field(default_factory=dict)
    once: dict[str, bytes] = field(default_factory=dict)
    listed: Sequence[Stored] = ()
    reads: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.inner.url

    def _lie(self, item: Item) -> bytes | None:
        self.reads.append(item.path)
        return self.once.pop(item.path, None) or self.instead.get(item.path)

    async def read(self, item: Item, limit: int) -> bytes:
        lie = self._lie(item)
        return lie if lie is not None else await self.inner.read(item, limit)

    async def read_range(self, item: Item, offset: int, length: int) -> bytes:
        lie = self._lie(item)
        return lie[offset : offset + length] if lie is not None else await self.inner.read_range(item, offset, length)

    async def size(self, item: Item) -> int | None:
        lie = self.instead.get(item.path)
        return len(lie) if lie is not None else await self.inner.size(item)

    async def write(self, item: Item, data: bytes | Path) -> None:
        await self.inner.write(item, data)

    async def publish(self, layer: str, manifest: bytes, parts: Sequence[Item]) -> None:
        await self.inner.publish(layer, manifest, parts)

    async def list(self, folder: str, below: str = "") -> AsyncIterator[Stored]:
        for stored in self.listed:
            yield stored
        async for stored in self.inner.list(folder, below):  # type: ignore[arg-type]
            yield stored

    async def remove(self, item: Item) -> None:
        await self.inner.remove(item)

    async def close(self) -> None:
        await self.inner.close()
