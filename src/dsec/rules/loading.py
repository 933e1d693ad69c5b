"""By which path a layer's bytes reach its readers, of those that the host has; and how counters that may begin anew are added up."""

from msgspec import Struct, structs

from dsec.model.errors import Unsupported
from dsec.model.loading import Ladder, LayerReads, LoadMode, LoadPath, Mechanism
from dsec.model.stores import scheme_of

__all__ = ["Place", "choose_path", "grown", "sum_reads"]

_COUNTERS = (
    "bytes_fetched", "bytes_filled", "chunks_filled", "bytes_evicted", "events", "hits", "fetches", "waits", "wait_us_total", "errors",
    "store_errors", "wrong_bytes", "refetched",
)  # fmt: skip


class Place(Struct, frozen=True, kw_only=True):
    """Where a layer is kept. `plain`: path of its uncompressed data on a filesystem of this host, "" where there is none."""

    url: str
    plain: str = ""


def choose_path(asked: LoadMode, mechanism: Mechanism, ladder: Ladder, place: Place) -> LoadPath:
    """The path for a layer at `place`, asked for as `asked`. Raises Unsupported with the reason; nothing weaker is taken instead.

    `mechanism` other than auto is a wish that is kept or refused.
    """
    if asked is LoadMode.WHOLE:
        return LoadPath.WHOLE
    if asked is LoadMode.SHARED:
        why = ladder.why_not(LoadPath.SHARED)
        if not why and scheme_of(place.url) != "file":
            why = f"{place.url} is no filesystem of this host"
        if not why and not place.plain:
            why = "the store has no plain data of it: push it with --plain"
        if why:
            raise Unsupported(f"loading from the shared filesystem: {why}", feature="load.shared")
        return LoadPath.SHARED
    wanted = {
        Mechanism.AUTO: (LoadPath.FANOTIFY, LoadPath.FUSE),
        Mechanism.FANOTIFY: (LoadPath.FANOTIFY,),
        Mechanism.FUSE: (LoadPath.FUSE,),
    }[mechanism]
    reasons = {path: ladder.why_not(path) for path in wanted}
    for path, why in reasons.items():
        if not why:
            return path
    told = "; ".join(f"{path}: {why}" for path, why in reasons.items())
    raise Unsupported(f"loading on demand: {told}", feature="load.on-demand")


def grown(before: LayerReads | None, after: LayerReads) -> LayerReads:
    """What `after` counts beyond `before`; where a counter is lower than it was, its pager began anew and all of it counts."""
    if before is None:
        return after
    changes = {}
    for name in _COUNTERS:
        then, now = getattr(before, name), getattr(after, name)
        changes[name] = now - then if now >= then else now
    return structs.replace(after, **changes)


def sum_reads(one: LayerReads, more: LayerReads) -> LayerReads:
    """`one` with what `more` counts added to its counters; what is here now, and the longest wait, are `more`'s or the longer."""
    changes = {name: getattr(one, name) + getattr(more, name) for name in _COUNTERS}
    return structs.replace(more, **changes, wait_us_max=max(one.wait_us_max, more.wait_us_max))
