"""Pull: a layer's metadata, and all or none of its data. Whatever comes from a store is checked before it is used.

Chunks are read in range requests of neighbours. One that is wrong is read once more, by itself; is it wrong again, the pull ends.
"""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec.images.groups import first_failure
from dsec.images.index import ChunkIndex
from dsec.images.inputs import Progress
from dsec.images.manifests import MAX_MANIFEST_BYTES, decode_manifest
from dsec.images.spool import Digest
from dsec.images.stores.frames import check_blob, open_chunk, stored_limit, unpress_file
from dsec.images.stores.layout import Folder, Item, Store
from dsec.model.errors import ImageUnavailable, NotFound
from dsec.model.layers import Blob, LayerManifest
from dsec.rules.chunkmap import ChunkMap, Place, map_bytes
from dsec.rules.packs import Read, plan_reads

__all__ = [
    "FETCHED",
    "Fetched",
    "fetch_data",
    "fetch_layer",
    "fetch_manifest",
    "read_chunks",
    "read_stored",
    "wanted_places",
]

FETCHED = ("manifest.json", "meta.erofs", "files.zst", "index", "map")
"""The files that `fetch_layer` makes."""
_PARALLEL = 6
_PIECE = 8 << 20
_MAX_META = 16 << 30


@dataclass(frozen=True)
class Fetched:
    """A layer whose metadata has been fetched into `folder`; its chunks are at `places` of the store's packs."""

    digest: str
    manifest: LayerManifest
    folder: Path
    index: ChunkIndex
    places: ChunkMap

    @property
    def layer(self) -> str:
        return self.digest.removeprefix("sha256:")


async def fetch_manifest(store: Store, digest: str) -> tuple[bytes, LayerManifest]:
    """A layer's manifest, as stored and checked. Raises NotFound, InvalidArgument for what is no digest, ImageUnavailable."""
    layer = Digest(digest).hex
    raw = await store.read(Item(Folder.MANIFESTS, layer, layer), MAX_MANIFEST_BYTES)
    return raw, decode_manifest(raw, digest)


async def fetch_layer(store: Store, digest: str, folder: Path) -> Fetched:
    """Fetches all of layer `digest` but its data into the new folder `folder`, as the files FETCHED, each checked.

    Raises NotFound for a layer that the store does not have, ImageUnavailable for one that it has wrong or in part, Unavailable.
    """
    layer = digest.removeprefix("sha256:")
    raw, manifest = await fetch_manifest(store, digest)
    await asyncio.to_thread(folder.mkdir, 0o755)
    if manifest.meta.size > _MAX_META or manifest.files.size > _MAX_META:
        raise ImageUnavailable(f"layer {digest} has metadata of more than {_MAX_META} bytes")
    try:
        index_raw = await store.read(_blob(manifest.index, layer), manifest.index.size)
        check_blob(len(index_raw), hashlib.sha256(index_raw).hexdigest(), manifest.index, "the index")
        index = ChunkIndex(index_raw, manifest)
        map_raw = await store.read(Item(Folder.MAPS, layer, layer), map_bytes(index.count, index.count))
        places = ChunkMap(map_raw, index.count)
        await _fetch_blob(store, _blob(manifest.meta, layer), manifest.meta, folder / "meta.erofs")
        await _fetch_blob(store, _blob(manifest.files, layer), manifest.files, folder / "files.zst")
    except NotFound as error:
        raise ImageUnavailable(f"layer {digest} is not whole in {store.url}: {error}") from error
    for name, content in (("index", index_raw), ("map", map_raw), ("manifest.json", raw)):
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return Fetched(digest, manifest, folder, index, places)


async def fetch_data(store: Store, fetched: Fetched, progress: Progress) -> None:
    """Fetches all of the layer's data into `folder`/data; zeros stay holes. Raises ImageUnavailable, Unavailable."""
    index = fetched.index
    numbers = [number for number in range(index.count) if not index.is_zeros(number)]
    progress.step(f"pull {fetched.layer[:12]}", sum(index.length(number) for number in numbers))
    fd = os.open(fetched.folder / "data", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, index.data_bytes)
        slots = asyncio.Semaphore(_PARALLEL)

        async def fill(read: Read) -> None:
            try:
                for number, data in await read_chunks(store, fetched, read):
                    await asyncio.to_thread(_write, fd, data, index.start(number))
                    progress.add(len(data))
            finally:
                slots.release()

        with first_failure():
            async with asyncio.TaskGroup() as group:
                for read in plan_reads(wanted_places(fetched, numbers)):
                    await slots.acquire()
                    group.create_task(fill(read))
        await asyncio.to_thread(os.fsync, fd)
    finally:
        os.close(fd)


def wanted_places(fetched: Fetched, numbers: Sequence[int]) -> list[tuple[int, Place]]:
    """Where chunks with content lie. Raises ImageUnavailable for one that the map says is zeros."""
    found = []
    for number in numbers:
        place = fetched.places.place(number)
        if place is None:
            raise ImageUnavailable(f"the map of layer {fetched.digest} does not say where chunk {number} is")
        found.append((number, place))
    return found


async def read_chunks(store: Store, fetched: Fetched, read: Read) -> list[tuple[int, bytes]]:
    """The chunks of one range request, uncompressed and checked; a wrong one is read once more. Raises ImageUnavailable."""
    return [(number, data) for number, _, data in await _read_checked(store, fetched, read)]


async def read_stored(store: Store, fetched: Fetched, read: Read) -> dict[int, bytes]:
    """The chunks of one range request in the form in which they are stored, checked as `read_chunks` does."""
    return {number: stored for number, stored, _ in await _read_checked(store, fetched, read)}


async def _read_checked(store: Store, fetched: Fetched, read: Read) -> list[tuple[int, bytes, bytes]]:
    """(number, as stored, uncompressed) of each chunk of a read."""
    pack = Item(Folder.PACKS, read.pack.hex(), fetched.layer)
    try:
        try:
            raw = await store.read_range(pack, read.offset, read.length)
        except ImageUnavailable:
            raw = b""  # a pack that ends too early may still have some of the chunks
        chunks = await asyncio.to_thread(_open_all, fetched, read, raw)
        good = {number for number, _, _ in chunks}
        for number, place in read.chunks:
            if number not in good:
                stored = await store.read_range(pack, place.offset, place.length)
                data = _open_one(fetched, number, place, stored)
                if data is None:
                    raise ImageUnavailable(f"{store.url}: chunk {number} of layer {fetched.digest} is wrong, twice")
                chunks.append((number, stored, data))
    except NotFound as error:
        raise ImageUnavailable(f"layer {fetched.digest} is not whole in {store.url}: {error}") from error
    return chunks


def _open_all(fetched: Fetched, read: Read, raw: bytes) -> list[tuple[int, bytes, bytes]]:
    chunks = []
    for number, place in read.chunks:
        at = place.offset - read.offset
        stored = raw[at : at + place.length]
        data = _open_one(fetched, number, place, stored)
        if data is not None:
            chunks.append((number, stored, data))
    return chunks


def _open_one(fetched: Fetched, number: int, place: Place, stored: bytes) -> bytes | None:
    return open_chunk(stored, place.encoding, fetched.index.length(number), fetched.index.digest(number))


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _blob(blob: Blob, layer: str) -> Item:
    return Item(Folder.BLOBS, blob.digest.removeprefix("sha256:"), layer)


async def _fetch_blob(store: Store, item: Item, blob: Blob, target: Path) -> None:
    """Fetches a blob that is stored as a zstd frame, piece by piece, and opens it."""
    size = await store.size(item)
    if size is None:
        raise NotFound(f"{store.url} has no {item.path}", what="store item")
    if size > stored_limit(blob.size):
        raise ImageUnavailable(f"{item.path} of {store.url} is longer than its {blob.size} bytes can make it")
    packed = target.with_name(f"{target.name}.packed")
    try:
        with packed.open("xb") as out:
            for offset in range(0, size, _PIECE):
                out.write(await store.read_range(item, offset, min(_PIECE, size - offset)))
        await asyncio.to_thread(unpress_file, packed, target, blob, item.path)
    finally:
        packed.unlink(missing_ok=True)
