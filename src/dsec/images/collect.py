"""Which layers can go: those that no name stands for and that nothing on this node has mounted."""

from pathlib import Path

from msgspec import Struct

from dsec.images.kept import Kept
from dsec.images.mounts import mounted_below
from dsec.images.names import NameStore
from dsec.images.store import LayerStore
from dsec.model.errors import ImageUnavailable, NotFound

__all__ = ["Collected", "collect"]


class Collected(Struct, frozen=True, kw_only=True):
    """What was removed, with the bytes it took on disk, and what is unnamed but still mounted."""

    removed: tuple[str, ...]
    freed_bytes: int
    in_use: tuple[str, ...]


def collect(state: Path, layers: LayerStore, names: NameStore, *, dry_run: bool = False) -> Collected:
    """Removes unnamed layers, and what imports that were cut off left. One that is mounted is kept: a sandbox may need it after a restart of the server.

    A server unmounts what no sandbox holds after a while, and at its end; then the next call removes it.
    """
    with layers.collecting():
        named: set[str] = set()
        for record in names.all():
            named.add(record.digest)
            named.update(_below(layers, record.digest))
        mounted = {f"sha256:{place.name}" for place in mounted_below(state.resolve() / "mnt")}
        removed, in_use, freed = [], [], 0
        for digest in layers.digests():
            if digest in named:
                continue
            if digest in mounted:
                in_use.append(digest)
                continue
            freed += layers.stored_bytes(digest)
            removed.append(digest)
            if not dry_run:
                layers.remove(digest)
    freed += Kept(layers.spool, 0).clear(dry_run=dry_run)
    return Collected(removed=tuple(removed), freed_bytes=freed, in_use=tuple(in_use))


def _below(layers: LayerStore, digest: str) -> tuple[str, ...]:
    """The layers that a named layer lies on; none of a layer that this version cannot read."""
    try:
        return layers.manifest(digest).below
    except (NotFound, ImageUnavailable):
        return ()
