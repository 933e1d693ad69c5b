"""What an edge asks of the image room: compose by name, and mounts for what was composed."""

from collections.abc import Sequence
from typing import Protocol

from dsec.model.layers import Composition
from dsec.model.plan import Mount
from dsec.model.spec import MountSpec
from dsec.model.views import ImageView

__all__ = ["Images"]


class Images(Protocol):
    """`compose` resolves names to layers (NotFound, Conflict when a name is of another kind). `mounts` makes a composition's
    layers available on this node and holds them for `holder` until `release(holder)`; layers are mounted once a node and shared.
    `extra` does the same for volumes and data layers. Raises ImageUnavailable when a layer cannot be read.
    """

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Composition: ...
    async def mounts(self, composition: Composition, holder: str) -> list[Mount]: ...
    async def extra(self, specs: Sequence[MountSpec], holder: str) -> list[Mount]: ...
    async def release(self, holder: str) -> None: ...
    def list(self) -> list[ImageView]: ...
    def bytes_read(self, digest: str) -> int | None: ...
