"""Nouns of layers that are loaded from a store: how, by which means, what was read, what is kept, and what a run touched first."""

from enum import StrEnum

from msgspec import Struct, field

__all__ = [
    "ChunkRange", "Ladder", "LayerCache", "LayerReads", "LoadMode", "LoadPath", "Mechanism", "Origin", "Profile", "Way",
]  # fmt: skip

ChunkRange = tuple[int, int]
"""First chunk, and the one after the last."""


class LoadMode(StrEnum):
    """How a layer of a store comes to the node: chunks as they are read, read in place on a shared filesystem, or copied first."""

    ON_DEMAND = "on-demand"
    SHARED = "shared"
    WHOLE = "whole"


class Mechanism(StrEnum):
    """How reads of chunks that are not there are caught; auto: the best that the host has."""

    AUTO = "auto"
    FANOTIFY = "fanotify"
    FUSE = "fuse"


class LoadPath(StrEnum):
    """A way by which a layer's bytes reach its readers."""

    FANOTIFY = "fanotify"
    FUSE = "fuse"
    SHARED = "shared"
    WHOLE = "whole"


class Way(Struct, frozen=True, kw_only=True):
    """A path as this host has it: whether it works here, and why not, or how."""

    path: LoadPath
    ok: bool
    why: str = ""


class Ladder(Struct, frozen=True, kw_only=True):
    """All paths of a host, found out by trying."""

    ways: tuple[Way, ...]

    def why_not(self, path: LoadPath) -> str:
        """ "" where the path works, else why not."""
        for way in self.ways:
            if way.path is path:
                return "" if way.ok else (way.why or "it does not work here")
        return "it was not tried"


class Origin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`origin.json` beside a layer that came from a store: the store's URL, how the layer is loaded, and whether a person pulled it (such a
    layer stays when its chunks are evicted)."""

    store: str
    load: LoadMode
    pulled: bool = False


class LayerReads(Struct, frozen=True, kw_only=True):
    """What was read of one layer since its pager attached it. `size` (as `bytes` in JSON): of the whole data, of which `bytes_present` are
    here; `bytes_fetched` from the store, as stored there; `bytes_filled` written to disk, in `chunks_filled` chunks. `events`: reads
    that the pager was asked about; `hits`: those that found all there; `fetches`: requests to the store; `waits` of readers, and their
    microseconds; `errors`: reads that failed; `store_errors`: requests that did; `wrong_bytes`: chunks that were not as they are to
    be, and `refetched`; `bytes_evicted`. `source`: the store's URL; `mechanism`: how reads are caught."""

    size: int = field(name="bytes")
    layer: str = ""
    whole: bool = False
    mechanism: str = ""
    source: str = ""
    chunks: int = 0
    present: int = 0
    bytes_present: int = 0
    bytes_fetched: int = 0
    bytes_filled: int = 0
    chunks_filled: int = 0
    bytes_evicted: int = 0
    events: int = 0
    hits: int = 0
    fetches: int = 0
    waits: int = 0
    wait_us_total: int = 0
    wait_us_max: int = 0
    errors: int = 0
    store_errors: int = 0
    wrong_bytes: int = 0
    refetched: int = 0

    @property
    def share(self) -> float:
        """The part of the layer's data that is here, 0 to 1."""
        return 1.0 if self.size == 0 else min(1.0, self.bytes_present / self.size)


class LayerCache(Struct, frozen=True, kw_only=True):
    """One layer as the cache sees it. `bytes_here`: on disk, all its files; `data_here`: of these the chunks, which can be evicted where
    `evictable` (they are in a store). `used`: Unix seconds of its last use. `live`: a sandbox has it. `pulled`: a person asked for
    it, so that it is not forgotten as a whole."""

    layer: str
    bytes_here: int
    data_here: int
    used: float
    evictable: bool = False
    live: bool = False
    pinned: bool = False
    pulled: bool = False
    names: tuple[str, ...] = ()
    source: str = ""


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The order in which runs first touch a layer's chunks. `version` grows by one a merge; `layer`: digest of the manifest it is
    for; `runs`: how many runs it holds; `order`: chunks, earliest first; `rank_sums` and `seen`: of each of them over the runs, from
    which the next merge goes on."""

    layer: str
    version: int
    runs: int
    order: tuple[int, ...]
    seen: tuple[int, ...]
    rank_sums: tuple[int, ...]
