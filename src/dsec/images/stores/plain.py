"""The uncompressed data of layers in a directory store, which nodes that share its filesystem mount from where it is."""

import asyncio
import errno
import os
from pathlib import Path

from dsec.images.stores.layout import Folder, Item, Store
from dsec.images.stores.objects import Directory
from dsec.images.stores.sources import LocalLayer
from dsec.model.errors import Unavailable, Unsupported

__all__ = ["plain_item", "put_plain"]

_PIECE = 8 << 20


def plain_item(data_digest: str) -> Item:
    """The item of a data blob."""
    return Item(Folder.PLAIN, data_digest.removeprefix("sha256:"))


async def put_plain(store: Store, source: LocalLayer) -> None:
    """Puts the layer's data into a directory store as it is, at once or not at all. Raises Unsupported for another kind of store."""
    if not isinstance(store, Directory):
        raise Unsupported(f"{store.url} is no directory: nothing can be mounted from it", what="plain")
    item = plain_item(source.manifest.data.digest)
    if await store.size(item) == source.manifest.data.size:
        return
    try:
        await asyncio.to_thread(_copy, source.folder / "data", store.place(item))
    except OSError as error:
        raise Unavailable(f"{store.url}: {error.strerror}") from error


def _copy(source: Path, target: Path) -> None:
    """A copy with the same holes, renamed into place when it is on disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name as obstore gives files that are not done: listings leave them out, and `prune` removes them.
    part = target.with_name(f"{target.name}#{os.getpid()}")
    try:
        with source.open("rb") as data, part.open("wb") as out:
            size = os.fstat(data.fileno()).st_size
            out.truncate(size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(data.fileno(), at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:
                        break
                    raise
                end = os.lseek(data.fileno(), at, os.SEEK_HOLE)
                while at < end:
                    os.lseek(out.fileno(), at, os.SEEK_SET)
                    piece = os.pread(data.fileno(), min(_PIECE, end - at), at)
                    at += out.write(piece)
                    out.flush()
            os.fsync(out.fileno())
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
