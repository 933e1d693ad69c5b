"""apiserver: the only way in (paper, layer 2). Authenticates, creates through quota and placement, and forwards the rest.

Keeps no state of a sandbox: the id says which edge owns it, so any instance can forward any request.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from dsec.cluster.admin import TenancyHandlers, caller
from dsec.cluster.batch import run_batch
from dsec.cluster.gate import CreationGate
from dsec.cluster.links import link_of
from dsec.cluster.metrics import METRICS_MEDIA, Metrics
from dsec.cluster.routes import ANY_KEY, ROUTES, CancelCreation, ListSandboxes
from dsec.cluster.settlement import Settlement
from dsec.cluster.tenants import Tenants
from dsec.model.errors import (
    Busy,
    DSecError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)
from dsec.model.ids import ID_LENGTH, decode_sandbox_id
from dsec.model.settings import check_positive, setting
from dsec.model.spec import Batch, SandboxSpec
from dsec.model.views import BatchItem, ImageView, ListQuery, Me, Page, SandboxState, SandboxView, StopMany, Stopped
from dsec.ports.clock import Clock
from dsec.ports.cluster import Edge, Iam, Placement, Principal, Receive, Scope, Send, Watcher
from dsec.ports.images import Images
from dsec.rules.access import may_use_image
from dsec.rules.admit import check
from dsec.web import App, Bytes, Call, Route, Stream, bind, document, failure, lines, problem_of, refuse

__all__ = ["ApiServer", "ApiServerSettings", "Services"]

_PREFIX = "/v1/sandboxes/"
_ID_END = len(_PREFIX) + ID_LENGTH
_OWN = frozenset({"/v1/sandboxes/batch", "/v1/sandboxes/cancel", "/v1/sandboxes/stop"})
_MAX_WINDOW = 1024


@dataclass(frozen=True)
class ApiServerSettings:
    """Settings of the apiserver."""

    creations: int = setting(32, "creations under way at any moment; more of them wait")
    creations_waiting: int = setting(8192, "creations that may wait; the rest are answered Busy")
    creation_patience: float = setting(120.0, "seconds that a creation waits for its turn before it is answered Busy")
    retry_after: float = setting(2.0, "seconds after which a client is told to try again when the queue is full")
    placement_tries: int = setting(3, "edges that a creation is offered to before it is answered Busy")
    batch_count: int = setting(32768, "most sandboxes of one batch")
    preview_domain: str | None = setting(
        None,
        "domain whose names PORT-ID.DOMAIN lead to this server: preview links have an origin of their own there; none: paths /p/ID/ alone",
    )
    settle_interval: float = setting(5.0, "seconds between two comparisons of reserved quota with living sandboxes")

    def __post_init__(self) -> None:
        check_positive(
            self, "creations", "creations_waiting", "creation_patience", "retry_after", "placement_tries", "batch_count",
            "settle_interval",
        )  # fmt: skip


class Services(Struct, frozen=True, kw_only=True):
    """What the apiserver stands on, each through its port. `tenants`: IAM's administration."""

    iam: Iam
    tenants: Tenants
    placement: Placement
    watcher: Watcher
    edges: tuple[Edge, ...]
    images: Images
    clock: Clock
    id_key: bytes


class ApiServer:
    """The ASGI application of the platform. `run` does its regular work until it is cancelled.

    `edge_routes`: what the edges' applications serve, for the one OpenAPI document of both.
    """

    def __init__(
        self, services: Services, settings: ApiServerSettings, edge_routes: Sequence[Route], version: str
    ) -> None:
        self._on = services
        self._settings = settings
        self._edges: Mapping[int, Edge] = {edge.number: edge for edge in services.edges}
        self._gate = CreationGate(
            settings.creations, settings.creations_waiting, settings.creation_patience, settings.retry_after
        )
        self.settlement = Settlement(services.iam, self._edges, services.id_key)
        self.counts = Metrics(services.watcher, self._gate)
        self._document = (tuple(edge_routes), version)
        self._openapi: bytes | None = None
        tenancy = [route for route in ROUTES if route.tag == "tenancy" and route.name != "me"]
        handlers = bind([route for route in ROUTES if route not in tenancy], self)
        handlers |= bind(tenancy, TenancyHandlers(services.tenants))
        self._app = App(ROUTES, handlers, services.clock, self._guard)

    async def run(self) -> None:
        """Settle quota at the interval."""
        await self.settlement.run(self._settings.settle_interval)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        link, path = link_of(scope, self._settings.preview_domain), scope["path"]
        if link is not None:
            await self._visit(scope, receive, self._counted(send), link)
        elif path.startswith(_PREFIX) and path not in _OWN:
            await self._forward(scope, receive, self._counted(send))
        else:
            await self._app(scope, receive, self._counted(send))

    def _counted(self, send: Send) -> Send:
        async def counting(message: Any) -> None:
            if message.get("status", 0) >= 400:
                self.counts.failed(message["status"])
            await send(message)

        return counting

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["dsec.principal"] = await self._principal(scope)
            path = scope["path"]
            if len(path) > _ID_END and path[_ID_END] != "/":
                raise NotFound("no such sandbox", what="sandbox")
            sandbox_id = path[len(_PREFIX) : _ID_END]
            edge = self._edges.get(decode_sandbox_id(sandbox_id, self._on.id_key).edge)
            if edge is None:
                raise NotFound("no edge of this platform owns it", what="sandbox")
        except DSecError as error:
            await refuse(scope, send, error)
            return
        method, rest = scope.get("method"), path[_ID_END:]
        if method == "POST" and rest == "/exec":
            began = self._on.clock.monotonic()
            await edge.api(scope, receive, send)
            self.counts.exec_seconds.observe(self._on.clock.monotonic() - began)
        elif method == "DELETE" and not rest:
            await edge.api(scope, receive, self._releasing(sandbox_id, send))
        else:
            await edge.api(scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send, link: str) -> None:
        """A request by a link, whose id names the edge; it needs no key, and one that it carries goes no further."""
        try:
            edge = self._edges.get(decode_sandbox_id("s" + link[1:], self._on.id_key).edge)
        except NotFound:
            edge = None
        if edge is None:
            await refuse(scope, send, NotFound("no such link", what="preview"))
            return
        await edge.api(scope, receive, send)

    def _releasing(self, sandbox_id: str, send: Send) -> Send:
        async def releasing(message: Any) -> None:
            if message.get("status") == 200:
                await self._on.iam.release(sandbox_id)
            await send(message)

        return releasing

    async def _principal(self, scope: Scope) -> Principal:
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, key = value.partition(b" ")
                if kind.lower() == b"bearer":
                    return await self._on.iam.authenticate(key.strip().decode("latin-1"))
        raise Unauthenticated("send the API key as `Authorization: Bearer KEY`")

    async def _guard(self, call: Call[Any, Any]) -> None:
        permission = call.route.permission
        if permission is None:
            return
        call.principal = await self._principal(call.scope)
        if permission != ANY_KEY and permission not in call.principal.permissions:
            raise PermissionDenied(f"this needs the permission {permission}", permission=permission)

    async def create_sandbox(self, call: Call[None, SandboxSpec]) -> SandboxView:
        return await self._create(caller(call), call.body, call.request_id)

    async def _create(self, principal: Principal, spec: SandboxSpec, request_id: str | None) -> SandboxView:
        project = principal.project if spec.project is UNSET else spec.project
        began = self._on.clock.monotonic()
        try:
            check(spec)
            await self._on.iam.authorise(principal, "sandbox.create", project)
            self._check_images(spec, project)
            async with self._gate.enter():
                view = await self._place(principal, spec, project, request_id)
        except DSecError as error:
            self.counts.create_failed(error.code)
            raise
        self.counts.created(self._on.clock.monotonic() - began, view.phases)
        return view

    def _check_images(self, spec: SandboxSpec, project: str) -> None:
        """An image of a project that is neither above nor below is as if it were not there."""
        data = [mount.data for mount in spec.mounts if mount.data is not None]
        for name in (spec.container_image, *([spec.workspace] if spec.workspace else []), *spec.toolkits, *data):
            if not may_use_image(project, self._on.images.owner(name)):
                raise NotFound(f"no image or layer is named {name!a}", what="image")

    async def _place(
        self, principal: Principal, spec: SandboxSpec, project: str, request_id: str | None
    ) -> SandboxView:
        """Offer the spec to edges until one takes it. Whatever was reserved for one that does not is given back."""
        excluded: frozenset[int] = frozenset()
        tries = min(self._settings.placement_tries, len(self._edges))
        while True:
            edge = await self._choose(spec, excluded)
            async with self._reserved(edge, project, spec) as (sandbox_id, kept):
                try:
                    view = await edge.create(
                        spec, sandbox_id=sandbox_id, principal=principal, project=project, request_id=request_id
                    )
                except Busy:
                    excluded |= {edge.number}
                    if len(excluded) == tries:
                        raise
                    continue
                kept.append(view.id == sandbox_id)
            if view.id != sandbox_id and view.state is not SandboxState.GONE:
                # A repeated request_id answers with the first time's sandbox, whose caller may have left before it ran.
                await self._on.iam.reserve(project, view.id, spec)
            return view

    async def _choose(self, spec: SandboxSpec, excluded: frozenset[int]) -> Edge:
        try:
            number = self._on.placement.choose(spec, excluded)
        except Busy:
            # The view may be a poll old: sandboxes can have ended since.
            await self._on.watcher.refresh()
            number = self._on.placement.choose(spec, excluded)
        self._on.placement.placed(number, spec)
        return self._edges[number]

    @asynccontextmanager
    async def _reserved(self, edge: Edge, project: str, spec: SandboxSpec) -> AsyncIterator[tuple[str, list[bool]]]:
        """A new id that holds quota; the reservation is undone unless `kept` says True at the end."""
        sandbox_id, kept = edge.new_id(), list[bool]()
        with self.settlement.creating(sandbox_id):
            try:
                await self._on.iam.reserve(project, sandbox_id, spec)
            except QuotaExceeded:
                if await self.settlement.settle() == 0:
                    raise
                await self._on.iam.reserve(project, sandbox_id, spec)
            try:
                yield sandbox_id, kept
            finally:
                if not any(kept):
                    await self._on.iam.release(sandbox_id)

    async def cancel_creation(self, call: Call[CancelCreation, None]) -> None:
        principal = caller(call)
        project = call.query.project or principal.project
        await self._on.iam.authorise(principal, "sandbox.create", project)
        for edge in self._edges.values():
            await edge.cancel_creation(project, call.query.request_id)

    async def create_batch(self, call: Call[None, Batch]) -> Stream:
        principal, batch = caller(call), call.body
        if not 1 <= batch.count <= self._settings.batch_count:
            raise InvalidArgument(f"a batch has 1 to {self._settings.batch_count} sandboxes", field="count")
        if not 1 <= batch.window <= _MAX_WINDOW:
            raise InvalidArgument(f"the window is 1 to {_MAX_WINDOW}", field="window")
        key = batch.key or call.request_id

        async def create(index: int) -> BatchItem:
            try:
                view = await self._create(principal, batch.spec, None if key is None else f"{key}:{index}")
            except DSecError as error:
                return BatchItem(index=index, problem=problem_of(error))
            except Exception as error:  # noqa: BLE001 - one item's unforeseen failure must not end the others
                return BatchItem(index=index, problem=problem_of(failure(error, self._on.clock, "create_batch")))
            return BatchItem(index=index, sandbox=view)

        async def undo(item: BatchItem) -> None:
            # With a key the client can come back for it; without one nobody ever will.
            if key is None and item.sandbox is not None:
                address = decode_sandbox_id(item.sandbox.id, self._on.id_key)
                await self._edges[address.edge].stop(item.sandbox.id)
                await self._on.iam.release(item.sandbox.id)

        return lines(run_batch(batch, create, undo))

    async def list_sandboxes(self, call: Call[ListSandboxes, None]) -> Page:
        asked, principal = call.query, caller(call)
        project = asked.project or principal.project
        await self._on.iam.authorise(principal, "sandbox.read", project)
        if not 1 <= asked.limit <= 1000:
            raise InvalidArgument("limit is 1 to 1000", field="limit")
        number, cursor = _split_cursor(asked.cursor)
        query = ListQuery(
            project=project,
            job=asked.job,
            labels=_labels(asked.label),
            states=asked.state,
            cursor=cursor,
            limit=asked.limit,
        )
        return await self._page(query, number)

    async def _page(self, query: ListQuery, number: int | None) -> Page:
        """A page, edge by edge: newest first within each."""
        items: list[SandboxView] = []
        for edge in sorted(self._edges.values(), key=lambda edge: edge.number):
            if number is not None and edge.number < number:
                continue
            cursor = query.cursor if edge.number == number else None
            part = await edge.list(msgspec.structs.replace(query, cursor=cursor, limit=query.limit - len(items)))
            items.extend(part.items)
            if part.next_cursor is not None:
                return Page(items=tuple(items), next_cursor=f"{edge.number}:{part.next_cursor}")
            if len(items) == query.limit:
                following = min((n for n in self._edges if n > edge.number), default=None)
                return Page(items=tuple(items), next_cursor=None if following is None else f"{following}:")
        return Page(items=tuple(items))

    async def stop_many(self, call: Call[None, StopMany]) -> Stopped:
        asked = call.body
        if asked.job is None and not asked.labels:
            raise InvalidArgument("give a job, or labels", field="job")
        query = ListQuery(project=caller(call).project, job=asked.job, labels=asked.labels)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(edge.stop_many(query)) for edge in self._edges.values()]
        stopped = tuple(name for task in tasks for name in task.result())
        for name in stopped:
            await self._on.iam.release(name)
        return Stopped(stopped=stopped)

    async def list_images(self, call: Call[None, None]) -> list[ImageView]:
        own = caller(call).project
        return [image for image in self._on.images.list() if may_use_image(own, image.project)]

    async def get_image(self, call: Call[None, None]) -> ImageView:
        own = caller(call).project
        for image in self._on.images.list():
            if image.name == call.params["name"] and may_use_image(own, image.project):
                return image
        raise NotFound("no image or layer of that name", what="image", image=call.params["name"])

    async def me(self, call: Call[None, None]) -> Me:
        return await self._on.iam.me(caller(call))

    async def healthz(self, call: Call[None, None]) -> Bytes:
        return Bytes(body=b"ok\n", media="text/plain")

    async def readyz(self, call: Call[None, None]) -> Bytes:
        if not any(status.healthy for status in self._on.watcher.view()):
            raise Unavailable("no edge is healthy")
        return Bytes(body=b"ready\n", media="text/plain")

    async def metrics(self, call: Call[None, None]) -> Bytes:
        return Bytes(body=self.counts.text(), media=METRICS_MEDIA)

    async def openapi(self, call: Call[None, None]) -> Bytes:
        if self._openapi is None:
            edge_routes, version = self._document
            found = document(
                (*ROUTES, *edge_routes), title="DSec", version=version,
                description="Sandboxes for training and evaluating language-model agents.",
            )  # fmt: skip
            self._openapi = msgspec.json.encode(found)
        return Bytes(body=self._openapi, media="application/json")


def _labels(pairs: tuple[str, ...]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise InvalidArgument("a label is key=value", field="label")
        labels[name] = value
    return labels


def _split_cursor(cursor: str | None) -> tuple[int | None, str | None]:
    if cursor is None:
        return None, None
    number, sign, rest = cursor.partition(":")
    if not sign or not (number.isascii() and number.isdecimal() and len(number) <= 5):
        raise InvalidArgument("not a cursor of this platform", field="cursor")
    return int(number), rest or None
