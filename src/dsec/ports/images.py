"""What an edge asks of the image room: compose by name, and mounts for what was composed."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from dsec.model.layers import Composition
from dsec.model.plan import Mount
from dsec.model.spec import MountSpec
from dsec.model.views import CommitReport, CommitRequest, ImageView

__all__ = ["Changed", "Commits", "Images"]


class Changed(Struct, frozen=True, kw_only=True):
    """What a sandbox has changed, as of one moment: `directory` of the node holds it, in the form of a layer and with owners as the sandbox sees them,
    over the layers of `composition`. `project`: of whoever asks. `most_bytes`: that its files may have."""

    sandbox_id: str
    project: str
    directory: str
    composition: Composition
    most_bytes: int


class Images(Protocol):
    """`compose` resolves names to layers (NotFound, Conflict when a name is of another kind). `mounts` makes a composition's
    layers available on this node and holds them for `holder` until `release(holder)`; layers are mounted once a node and shared.
    `owner` is the project whose image a name is, "" for everyone's and for names that there are not. `extra` does the same for volumes and data layers. Raises ImageUnavailable when a layer cannot be read.

    `lacks` names what is not on this node but may be in a store, `bring` finds it there (NotFound, PermissionDenied). `adopt` is `mounts`
    for a sandbox that lives. `on_lost` is called with a holder, and why, when what it reads can no longer be trusted; `read_errors`
    counts reads of layers that failed for want of their store.
    """

    on_lost: Callable[[str, str], None]

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Composition: ...
    def lacks(self, names: Sequence[str]) -> tuple[str, ...]: ...
    async def bring(self, names: Sequence[str]) -> None: ...
    async def mounts(self, composition: Composition, holder: str) -> list[Mount]: ...
    async def adopt(self, composition: Composition, specs: Sequence[MountSpec], holder: str) -> list[Mount]: ...
    async def extra(self, specs: Sequence[MountSpec], holder: str) -> list[Mount]: ...
    async def release(self, holder: str) -> None: ...
    def list(self) -> list[ImageView]: ...
    def owner(self, name: str) -> str: ...
    async def read_errors(self, digests: Sequence[str]) -> int: ...
    def bytes_read(self, digest: str) -> int | None: ...


class Commits(Protocol):
    """Makes images of what sandboxes have changed. `check` raises what can be known beforehand: InvalidArgument, Busy. `commit`
    makes, publishes and names a layer, all of it or nothing; it raises InvalidArgument, naming the path, for what a layer cannot
    hold, QuotaExceeded and ImageUnavailable.
    """

    def check(self, request: CommitRequest) -> None: ...
    async def commit(self, request: CommitRequest, changed: Changed) -> CommitReport: ...
