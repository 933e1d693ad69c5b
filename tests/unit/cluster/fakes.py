"""A small edge in memory, and a platform of several of them, for tests of the services around the edge."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import uvicorn
from msgspec import structs

from dsec.cluster.apiserver import ApiServer, ApiServerSettings, Services
from dsec.cluster.iam import SqlIam
from dsec.cluster.placement import PlacementSettings, SamplingPlacement
from dsec.cluster.tenants import Tenants
from dsec.cluster.watcher import PollingWatcher, WatcherSettings
from dsec.model.errors import Busy, NotFound
from dsec.model.ids import RANDOM_BYTES, SandboxAddress, encode_sandbox_id
from dsec.model.layers import Composition
from dsec.model.plan import Capabilities, Mount
from dsec.model.spec import MountSpec, SandboxSpec
from dsec.model.views import ExecRequest, ImageView, LayerView, ListQuery, Page, SandboxState, SandboxView
from dsec.ports.cluster import EdgeStatus, Principal
from dsec.rules.access import sees
from dsec.web import App, Call, Route, Socket

KEY = b"k" * 32
EDGE_ROUTES = (
    Route(
        name="get_sandbox",
        method="GET",
        path="/v1/sandboxes/{id}",
        summary="One.",
        answer=SandboxView,
        permission="sandbox.read",
    ),
    Route(
        name="stop_sandbox",
        method="DELETE",
        path="/v1/sandboxes/{id}",
        summary="End it.",
        answer=SandboxView,
        permission="sandbox.use",
    ),
    Route(
        name="exec",
        method="POST",
        path="/v1/sandboxes/{id}/exec",
        summary="Run.",
        body=ExecRequest,
        answer=dict,
        permission="sandbox.use",
    ),
    Route(name="echo", method="WS", path="/v1/sandboxes/{id}/echo", summary="Echo.", permission="sandbox.use"),
)


class RealClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def random(self, n: int) -> bytes:
        return os.urandom(n)


class FakeEdge:
    """Sandboxes in a dict. `room`: how many it takes; `pace`: seconds of a create; `trouble`: raised by the next creates."""

    def __init__(self, number: int, room: int = 1000) -> None:
        self.number = number
        self.room = room
        self.pace = 0.0
        self.trouble: Exception | None = None
        self.healthy = True
        self.boxes: dict[str, SandboxView] = {}
        self.by_request: dict[tuple[str, str], str] = {}
        self.most = self.running = self.cancelled = 0
        self.idle = asyncio.Event()
        handlers = {"get_sandbox": self._get, "stop_sandbox": self._stop, "exec": self._exec, "echo": self._echo}
        self.api = App(EDGE_ROUTES, handlers, RealClock())

    def new_id(self) -> str:
        return encode_sandbox_id(SandboxAddress(self.number, 1, os.urandom(RANDOM_BYTES)), KEY)

    async def status(self) -> EdgeStatus:
        live = [box for box in self.boxes.values() if box.state is not SandboxState.GONE]
        return EdgeStatus(
            edge=self.number, epoch=1, healthy=self.healthy, sandboxes=len(live), sandbox_capacity=self.room,
            memory_bytes=1 << 50, memory_committed=sum(box.spec.memory_limit_mb << 20 for box in live),
            cpu_cores=2.0, cpu_committed=0.0, backends=(Capabilities(backend="container", available=True),),
        )  # fmt: skip

    async def create(
        self, spec: SandboxSpec, *, sandbox_id: str, principal: Principal, project: str, request_id: str | None
    ) -> SandboxView:
        if request_id is not None and (project, request_id) in self.by_request:
            return self.boxes[self.by_request[project, request_id]]
        self.running += 1
        self.idle.clear()
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.pace)
            if self.trouble is not None:
                raise self.trouble
            if len(await self.live()) >= self.room:
                raise Busy("full", retry_after=7.0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            if self.running == 0:
                self.idle.set()
        view = SandboxView(
            id=sandbox_id,
            state=SandboxState.RUNNING,
            spec=spec,
            project=project,
            created=time.time(),
            phases={"start": 0.001},
        )
        self.boxes[sandbox_id] = view
        if request_id is not None:
            self.by_request[project, request_id] = sandbox_id
        return view

    async def list(self, query: ListQuery) -> Page:
        found = [box for box in reversed(self.boxes.values()) if sees(query.project, box.project)]
        start = int(query.cursor or 0)
        end = start + query.limit
        return Page(items=tuple(found[start:end]), next_cursor=str(end) if end < len(found) else None)

    async def cancel_creation(self, project: str, request_id: str) -> None:
        if (project, request_id) in self.by_request:
            await self.stop(self.by_request[project, request_id])

    async def stop_many(self, query: ListQuery) -> tuple[str, ...]:
        names = tuple(
            name for name, box in self.boxes.items()
            if sees(query.project, box.project) and (query.job is None or box.spec.job == query.job) and box.state is SandboxState.RUNNING
        )  # fmt: skip
        for name in names:
            await self.stop(name)
        return names

    async def stop(self, sandbox_id: str) -> None:
        if sandbox_id in self.boxes:
            self.boxes[sandbox_id] = structs.replace(self.boxes[sandbox_id], state=SandboxState.GONE)

    async def live(self) -> frozenset[str]:
        return frozenset(name for name, box in self.boxes.items() if box.state is not SandboxState.GONE)

    def _mine(self, call: Call) -> SandboxView:
        box = self.boxes.get(call.params["id"])
        if box is None or not sees(call.principal.project, box.project):
            raise NotFound("no such sandbox", what="sandbox")
        return box

    async def _get(self, call: Call) -> SandboxView:
        return self._mine(call)

    async def _stop(self, call: Call) -> SandboxView:
        await self.stop(self._mine(call).id)
        return self._mine(call)

    async def _exec(self, call: Call) -> dict:
        self._mine(call)
        return {"argv": call.body.argv}

    async def _echo(self, call: Call, ws: Socket) -> None:
        self._mine(call)
        await ws.accept()
        await ws.send_text(str(await ws.receive()))


class FakeImages:
    def __init__(self) -> None:
        self.on_lost: Callable[[str, str], None] = lambda holder, why: None

    def lacks(self, names: Sequence[str]) -> tuple[str, ...]:
        return ()

    async def bring(self, names: Sequence[str]) -> None:
        raise NotImplementedError

    async def adopt(self, composition: Composition, specs: Sequence[MountSpec], holder: str) -> list[Mount]:
        raise NotImplementedError

    async def read_errors(self, digests: Sequence[str]) -> int:
        return 0

    def list(self) -> list[ImageView]:
        layer = LayerView(digest="sha256:0", kind="base", entries=1, content_bytes=2, stored_bytes=3, origin="test")
        return [ImageView(name="python-3.11", layer=layer), ImageView(name="team/x@1", layer=layer)]

    def compose(self, base: str, workspace: str | None, toolkits: object) -> Composition:
        raise NotImplementedError

    async def mounts(self, composition: Composition, holder: str) -> list[Mount]:
        raise NotImplementedError

    async def extra(self, specs: list[MountSpec], holder: str) -> list[Mount]:
        raise NotImplementedError

    async def release(self, holder: str) -> None:
        raise NotImplementedError

    def bytes_read(self, digest: str) -> int | None:
        return None

    def owner(self, name: str) -> str:
        return "root/one" if name.startswith("one/") else ""


class Platform:
    """Services on fake edges behind a real socket on loopback."""

    def __init__(
        self,
        folder: Path,
        edges: list[FakeEdge],
        settings: ApiServerSettings,
        edge_routes: tuple[Route, ...] = EDGE_ROUTES,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.edges = edges
        clock = RealClock()
        self.keys: list[str] = []
        self.iam = SqlIam(folder / "iam.db", clock)
        self.iam.open(self.keys.append)
        self.watcher = PollingWatcher(edges, clock, WatcherSettings())
        self.services = Services(
            iam=self.iam, tenants=Tenants(self.iam, clock), placement=SamplingPlacement(self.watcher, clock, PlacementSettings()),
            watcher=self.watcher, edges=tuple(edges), images=FakeImages(), clock=clock, id_key=KEY,
        )  # fmt: skip
        self.app = ApiServer(self.services, settings, edge_routes, "0")
        self.url = ""

    def client(self, key: str | None = None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, headers={"authorization": f"Bearer {key or self.keys[0]}"})


class QuietServer(uvicorn.Server):
    """Leaves the test process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def platform(
    folder: Path, *edges: FakeEdge, edge_routes: tuple[Route, ...] = EDGE_ROUTES, **settings: object
) -> AsyncIterator[Platform]:
    """A served platform; ends with its server."""
    world = Platform(folder, list(edges) or [FakeEdge(1)], ApiServerSettings(**settings), edge_routes)  # type: ignore[arg-type]
    config = uvicorn.Config(world.app, log_level="error", access_log=False, lifespan="off", ws="websockets-sansio")
    server = QuietServer(config)
    await world.watcher.refresh()
    async with asyncio.TaskGroup() as group:
        listener = socket.create_server(("127.0.0.1", 0))
        world.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        group.create_task(server.serve([listener]))
        try:
            yield world
        finally:
            server.should_exit = True
    world.iam.close()
