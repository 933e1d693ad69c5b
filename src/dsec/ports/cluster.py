"""The services between a client and an edge: IAM, placement, watcher, and the edge as the apiserver sees it."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from msgspec import Struct

from dsec.model.plan import Capabilities
from dsec.model.spec import SandboxSpec
from dsec.model.views import ListQuery, Me, Page, SandboxView

__all__ = [
    "Asgi", "Edge", "EdgeStatus", "Iam", "Placement", "Principal", "Receive", "Scope", "Send", "Watcher",
]  # fmt: skip

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Principal(Struct, frozen=True, kw_only=True):
    """Who asks: a person, service or agent, acting in one project with `permissions`.

    `project` is a path ("root/team/run-7"); a principal sees its own project and those below it.
    """

    name: str
    project: str
    permissions: frozenset[str]


class Iam(Protocol):
    """Authentication, authorisation and quota. `authenticate` raises Unauthenticated; `authorise` PermissionDenied, also
    for a project that the principal may not see; `reserve` QuotaExceeded. A reservation is held until `release` and named by
    the sandbox's id, so that both are idempotent; `held` has the ids of all.
    """

    async def authenticate(self, key: str) -> Principal: ...
    async def authorise(self, principal: Principal, permission: str, project: str) -> None: ...
    async def reserve(self, project: str, sandbox_id: str, spec: SandboxSpec) -> None: ...
    async def release(self, sandbox_id: str) -> None: ...
    def held(self) -> frozenset[str]: ...
    async def me(self, principal: Principal) -> Me: ...


class EdgeStatus(Struct, frozen=True, kw_only=True):
    """What an edge says of itself; bytes and counts. `committed` is what admitted sandboxes may use at most."""

    edge: int
    epoch: int
    healthy: bool
    sandboxes: int
    sandbox_capacity: int
    memory_bytes: int
    memory_committed: int
    cpu_cores: float
    cpu_committed: float
    backends: tuple[Capabilities, ...]


class Edge(Protocol):
    """An edge as the rest of the platform sees it: its number, its status, typed calls for what has no id yet or spans
    edges, and `api`, an ASGI application for everything below /v1/sandboxes/{id}.

    The ASGI scope carries the caller under "dsec.principal" (a Principal). `create` answers when the sandbox runs; the same
    `request_id` of the same project gives the same sandbox again. It raises Busy (placement then tries another edge),
    Unsupported, NotFound, QuotaExceeded, ImageUnavailable, RuntimeFailure. Cancelling it undoes the sandbox.
    `cancel_creation` ends what that request made or is making, if it is known here.
    `live` has the ids of all sandboxes that are not gone, those being created too. `stop` ends one in any state; also one
    that it does not know.
    """

    @property
    def number(self) -> int: ...
    @property
    def api(self) -> Asgi: ...
    async def status(self) -> EdgeStatus: ...
    def new_id(self) -> str: ...
    async def create(
        self, spec: SandboxSpec, *, sandbox_id: str, principal: Principal, project: str, request_id: str | None
    ) -> SandboxView: ...
    async def cancel_creation(self, project: str, request_id: str) -> None: ...
    async def list(self, query: ListQuery) -> Page: ...
    async def stop_many(self, query: ListQuery) -> tuple[str, ...]: ...
    async def stop(self, sandbox_id: str) -> None: ...
    async def live(self) -> frozenset[str]: ...


class Watcher(Protocol):
    """The polled view of all edges; empty until the first poll. `asked`: monotonic seconds when that edge's report was asked
    for. `refresh` polls now; calls that come while one is under way share it."""

    def view(self) -> tuple[EdgeStatus, ...]: ...
    def asked(self, edge: int) -> float: ...
    async def refresh(self) -> None: ...


class Placement(Protocol):
    """Chooses an edge for a spec. Raises Unsupported (no edge can ever) and Busy (none can now)."""

    def choose(self, spec: SandboxSpec, exclude: frozenset[int] = frozenset()) -> int: ...
    def placed(self, edge: int, spec: SandboxSpec) -> None: ...
