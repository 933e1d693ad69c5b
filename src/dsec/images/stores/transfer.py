"""Images between this node and a shared store, or from one shared store to another: names with all layers that they stand on."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from dsec.images.inputs import Progress
from dsec.images.making import Made
from dsec.images.names import NameStore
from dsec.images.store import LayerStore
from dsec.images.stores.known import Known
from dsec.images.stores.layout import (
    MAX_DOCUMENT_BYTES,
    Folder,
    Item,
    Store,
    StoredName,
    listed_name,
    named,
    open_head,
    read_name,
    write_name,
)
from dsec.images.stores.plain import put_plain
from dsec.images.stores.pull import fetch_data, fetch_layer, fetch_manifest
from dsec.images.stores.push import PushConfig, Pushed, Pusher
from dsec.images.stores.signing import PublicKey, Signer, require_signature, sign
from dsec.images.stores.sources import LocalLayer, RemoteLayer
from dsec.model.errors import ImageUnavailable, NotFound
from dsec.model.layers import NameRecord
from dsec.ports.clock import Clock

__all__ = [
    "Node",
    "PulledImage",
    "PushedImage",
    "pull_images",
    "push_images",
    "stored_name",
    "stored_names",
    "sync_images",
]

_MAX_BESIDE = 256
_BESIDE_BYTES = 16 << 20


@dataclass(frozen=True)
class Node:
    """This node's own store, and what work on it needs."""

    layers: LayerStore
    names: NameStore
    clock: Clock
    progress: Progress


class PushedImage(Struct, frozen=True, kw_only=True):
    """A name that now stands for `digest` in the store, and what was sent for each layer, lowest first."""

    name: str
    digest: str
    layers: tuple[Pushed, ...]


class PulledImage(Struct, frozen=True, kw_only=True):
    """A name that now stands for `digest` on this node, the layers fetched for it, and the keys that had signed it."""

    name: str
    digest: str
    fetched: tuple[str, ...] = ()
    signed_by: tuple[str, ...] = ()


async def stored_name(store: Store, name: str) -> StoredName:
    """What `name` stands for in the store; a layer's digest stands for itself. Raises NotFound, ImageUnavailable."""
    if name.startswith("sha256:"):
        return StoredName(digest=name)
    try:
        return read_name(await store.read(named(name), MAX_DOCUMENT_BYTES), name)
    except NotFound:
        raise NotFound(f"{store.url} has no image named {name!a}", what="image") from None


async def stored_names(store: Store) -> list[str]:
    """All names of a store, sorted; what nobody could have named so is left out."""
    return sorted([name async for s in store.list(Folder.NAMES) if (name := listed_name(s.name)) is not None])


async def push_images(
    node: Node,
    store: Store,
    names: Sequence[str],
    config: PushConfig,
    signer: Signer | None = None,
    *,
    plain: bool = False,
) -> AsyncIterator[PushedImage]:
    """Pushes images of this node, each with its layers, and gives each once its name stands. Raises as Store and Pusher do."""
    head = await open_head(store, create=True)
    known = Known(store, head, node.clock)
    with node.layers.scratch() as scratch:
        pusher = Pusher(store, known, node.clock, scratch, config, node.progress)
        for name in names:
            record = node.names.record(name)
            done = []
            for digest in (*node.layers.manifest(record.digest).below, record.digest):
                folder, manifest = node.layers.directory(digest), node.layers.manifest(digest)
                source = LocalLayer(digest, manifest, folder, config.level, config.workers)
                done.append(await pusher.layer(source))
                if plain:
                    await put_plain(store, source)
            if signer is not None:
                await sign(store, record.digest, name, signer)
            if not name.startswith("sha256:"):
                stands = StoredName(digest=record.digest, origin=record.origin, created=node.clock.now())
                await write_name(store, name, stands)
            yield PushedImage(name=name, digest=record.digest, layers=tuple(done))
    await known.compact()


async def pull_images(
    node: Node, store: Store, names: Sequence[str], keys: Sequence[PublicKey] = ()
) -> AsyncIterator[PulledImage]:
    """Fetches images whole, each with its layers, and gives each once this node has it under its name.

    With `keys`, one of them must have signed it. Raises PermissionDenied, NotFound, ImageUnavailable, Unavailable.
    """
    await open_head(store, create=False)
    for name in names:
        stored = await stored_name(store, name)
        signed = await require_signature(store, stored.digest, name, keys)
        made = []
        with node.layers.scratch() as scratch:
            for number, digest in enumerate(await stack_of(store, stored.digest)):
                if not node.layers.exists(digest):
                    made.append(await _fetch_whole(node, store, digest, scratch / str(number)))
            _keep(node, name, stored, store, made)
        fetched = tuple(layer.digest for layer in made)
        signed_by = tuple(key.text for key in signed)
        yield PulledImage(name=name, digest=stored.digest, fetched=fetched, signed_by=signed_by)


async def stack_of(store: Store, digest: str) -> tuple[str, ...]:
    """The layers of an image by its topmost, lowest first. Raises ImageUnavailable when they do not fit together."""
    _, manifest = await fetch_manifest(store, digest)
    for number, below in enumerate(manifest.below):
        _, other = await fetch_manifest(store, below)
        if other.below != manifest.below[:number]:
            raise ImageUnavailable(f"layer {below} lies on other layers than {digest} says")
    return (*manifest.below, digest)


async def sync_images(
    node: Node, source: Store, target: Store, names: Sequence[str], config: PushConfig, keys: Sequence[PublicKey] = ()
) -> AsyncIterator[PushedImage]:
    """Brings `target` what it lacks of images of `source` (all of them, if no names are given), with their signatures and profiles.

    Chunks are checked on the way, and keep their compression. With `keys`, one of them must have signed each image.
    """
    await open_head(source, create=False)
    known = Known(target, await open_head(target, create=True), node.clock)
    for name in names or await stored_names(source):
        stored = await stored_name(source, name)
        await require_signature(source, stored.digest, name, keys)
        done = []
        for digest in await stack_of(source, stored.digest):
            with node.layers.scratch() as scratch:
                pusher = Pusher(target, known, node.clock, scratch, config, node.progress)
                if await pusher.has(digest):
                    done.append(Pushed(digest=digest, already=True))
                else:
                    folder = scratch / "layer"
                    fetched = await fetch_layer(source, digest, folder)
                    done.append(await pusher.layer(RemoteLayer(source, fetched)))
            await _copy_beside(source, target, digest)
        if not name.startswith("sha256:"):
            await write_name(target, name, stored)
        yield PushedImage(name=name, digest=stored.digest, layers=tuple(done))
    await known.compact()


async def _copy_beside(source: Store, target: Store, digest: str) -> None:
    """Copies what lies beside a layer: signatures and profiles. They are checked by who uses them."""
    layer = digest.removeprefix("sha256:")
    for folder in (Folder.SIGNATURES, Folder.PROFILES):
        listed = [stored async for stored in source.list(folder, layer)]
        for stored in listed[:_MAX_BESIDE]:
            item = Item(folder, stored.name, layer)
            if await target.size(item) != stored.size:
                await target.write(item, await source.read(item, _BESIDE_BYTES))


async def _fetch_whole(node: Node, store: Store, digest: str, folder: Path) -> Made:
    fetched = await fetch_layer(store, digest, folder)
    await fetch_data(store, fetched, node.progress)
    (folder / "map").unlink()
    return Made(folder, digest, fetched.manifest)


def _keep(node: Node, name: str, stored: StoredName, store: Store, made: Sequence[Made]) -> None:
    record = NameRecord(name=name, digest=stored.digest, origin=stored.origin or store.url, created=node.clock.now())

    def give_name(_: str) -> None:
        if not name.startswith("sha256:"):
            node.names.set(record)

    if made:
        node.layers.publish(made, give_name)
    else:
        give_name(stored.digest)
