"""Layers read back from the disk against their manifests, and what is damaged fetched again from a store that has it."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from dsec.images.inputs import Progress
from dsec.images.making import DATA, FILES, INDEX, META
from dsec.images.origins import read_origin
from dsec.images.settings import Stores
from dsec.images.store import LayerStore
from dsec.images.stores.layout import Store
from dsec.images.stores.opening import open_store
from dsec.images.stores.pull import Fetched, fetch_layer, read_chunks, wanted_places
from dsec.images.verify import check_chunks
from dsec.model.errors import DSecError
from dsec.model.layers import Blob, LayerManifest
from dsec.model.stores import StoreOptions
from dsec.rules.packs import plan_reads

__all__ = ["Checked", "Fsck"]

_log = logging.getLogger("dsec.images")


class Checked(Struct, frozen=True, kw_only=True):
    """What was found of one layer: `files` and `chunks` that are damaged, whether all of them are `repaired`, and why not."""

    layer: str
    files: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    repaired: bool = False
    why_not: str = ""

    @property
    def sound(self) -> bool:
        """Whether the layer is as it should be now."""
        return self.repaired or not (self.files or self.chunks)


class Fsck:
    """Checks layers, and repairs them from the store that each came from, else from any configured one that has it."""

    def __init__(self, layers: LayerStore, stores: Stores, progress: Progress) -> None:
        self._layers = layers
        self._stores = stores
        self._progress = progress

    async def check(self, digest: str, *, repair: bool) -> Checked:
        """Reads all that is here of a layer. Raises NotFound for no such layer, ImageUnavailable for one whose manifest is damaged."""
        manifest, folder = self._layers.manifest(digest), self._layers.directory(digest)
        self._progress.step(f"check {digest[7:19]}", manifest.data.size)
        files, chunks = await asyncio.to_thread(self._damages, folder, manifest)
        found = Checked(layer=digest, files=tuple(files), chunks=tuple(chunks))
        if found.sound or not repair:
            return found
        return await self._repair(found, folder, manifest)

    def _damages(self, folder: Path, manifest: LayerManifest) -> tuple[list[str], list[int]]:
        files = [name for name, blob in _blobs(manifest) if not _is(folder / name, blob)]
        if INDEX in files or not (folder / DATA).exists():
            return files, []  # the chunks are checked by the index, once it is repaired
        return files, check_chunks(folder, manifest, self._progress)

    async def _repair(self, found: Checked, folder: Path, manifest: LayerManifest) -> Checked:
        reasons = []
        for options in self._candidates(folder):
            try:
                await self._repair_from(options, found, folder, manifest)
                files, chunks = await asyncio.to_thread(self._damages, folder, manifest)
            except (DSecError, OSError) as error:
                reasons.append(f"{options.url}: {error}")
                continue
            if not files and not chunks:
                return Checked(layer=found.layer, files=found.files, chunks=found.chunks, repaired=True)
            reasons.append(f"{options.url}: {len(files)} files and {len(chunks)} chunks are still damaged")
        why = "; ".join(reasons) or "no store is known that could have it"
        return Checked(layer=found.layer, files=found.files, chunks=found.chunks, why_not=why)

    def _candidates(self, folder: Path) -> Iterator[StoreOptions]:
        origin = read_origin(folder)
        first = [self._stores.find(origin.store)] if origin is not None else []
        yield from first
        yield from (store for store in self._stores.all() if store not in first)

    async def _repair_from(self, options: StoreOptions, found: Checked, folder: Path, manifest: LayerManifest) -> None:
        store = await asyncio.to_thread(open_store, options)
        try:
            with self._layers.scratch() as scratch:
                fetched = await fetch_layer(store, found.layer, scratch / "layer")
                chunks: Sequence[int] = found.chunks
                for name in found.files:
                    await asyncio.to_thread(os.replace, fetched.folder / name, folder / name)
                if INDEX in found.files and await asyncio.to_thread((folder / DATA).exists):
                    chunks = await asyncio.to_thread(check_chunks, folder, manifest, self._progress)
                await _rewrite(store, fetched, chunks, folder / DATA)
        finally:
            await store.close()


async def _rewrite(store: Store, fetched: Fetched, chunks: Sequence[int], data: Path) -> None:
    """Puts chunks in their place again: those of zeros as such, the others as the store has them, checked."""
    index = fetched.index
    filled = [number for number in chunks if not index.is_zeros(number)]
    if not chunks:
        return
    fd = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    try:
        for number in set(chunks) - set(filled):
            await asyncio.to_thread(_write, fd, bytes(index.length(number)), index.start(number))
        for read in plan_reads(wanted_places(fetched, filled)):
            for number, content in await read_chunks(store, fetched, read):
                await asyncio.to_thread(_write, fd, content, index.start(number))
        await asyncio.to_thread(os.fsync, fd)
    finally:
        os.close(fd)


def _write(fd: int, content: bytes, start: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count


def _blobs(manifest: LayerManifest) -> tuple[tuple[str, Blob], ...]:
    return (META, manifest.meta), (FILES, manifest.files), (INDEX, manifest.index)


def _is(path: Path, blob: Blob) -> bool:
    """Whether the file has the blob's size and digest."""
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if os.fstat(file.fileno()).st_size != blob.size:
                return False
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        _log.warning("%s cannot be read: %s", path, error.strerror)
        return False
    return digest == blob.digest
