"""A node on fakes, in process, with a clock that tests move."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dsec.edge.lifecycle import LifecycleSettings
from dsec.edge.network.networks import NetworkParts
from dsec.edge.network.settings import NetworkSettings
from dsec.edge.node import Foundation, Host, Node, NodeSettings
from dsec.edge.operations import OperationSettings
from dsec.edge.tasks import TaskSet
from dsec.model.network import Service
from dsec.model.spec import SandboxSpec
from dsec.model.views import SandboxView
from dsec.ports.cluster import Principal
from dsec.testing.agent import FakeAgent
from dsec.testing.asgi import AsgiClient
from dsec.testing.backend import FakeBackend, FakeCell, FakeCommits, FakeImages, FakeKernel
from dsec.testing.clock import VirtualClock
from dsec.testing.network import FakeFabric, FakeGate

GIB = 1 << 30
SPEC = SandboxSpec(container_image="base", memory_limit_mb=256)
SERVICES = {
    "pypi": Service(name="pypi", mirror="pypi", port=3141, hosts=("index.test",), env={"PIP_INDEX_URL": "{mirror}/simple/"}),
    "debian": Service(name="debian", hosts=("deb.test",), ports=(80, 443)),
    "npm": Service(name="npm", mirror="npm", port=3142, why_not="no npm is installed"),
}  # fmt: skip
PRINCIPAL = Principal(name="tester", project="root/team", permissions=frozenset({"sandbox.read", "sandbox.use"}))


class Rig:
    """One running node and what it stands on."""

    def __init__(
        self, node: Node, clock: VirtualClock, kernel: FakeKernel, backend: FakeBackend, images: FakeImages
    ) -> None:
        self.node = node
        self.clock = clock
        self.kernel = kernel
        self.backend = backend
        self.images = images
        self.commits = FakeCommits(images)
        self.ended: list[str] = []
        self.gate = FakeGate()
        self.client = AsgiClient(node.api, PRINCIPAL)

    async def create(self, spec: SandboxSpec = SPEC, key: str | None = None, project: str = "root/team") -> SandboxView:
        return await self.node.create(
            spec, sandbox_id=self.node.new_id(), principal=PRINCIPAL, project=project, request_id=key
        )

    def cell(self, view: SandboxView) -> FakeCell:
        return self.kernel.cells[view.id]

    def agent(self, view: SandboxView) -> FakeAgent:
        return self.cell(view).agent

    async def call(self, view: SandboxView, method: str, rest: str = "", **options: Any) -> Any:
        return await self.client.request(method, f"/v1/sandboxes/{view.id}{rest}", **options)

    async def exec(self, view: SandboxView, *argv: str, key: str | None = None, **fields: Any) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        return await self.call(view, "POST", "/exec", json={"argv": argv, **fields}, headers=headers)

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await settle()

    def clean(self) -> bool:
        return not self.kernel.cells and not self.images.holders and not self.node.lifecycle.residents


async def settle(rounds: int = 30) -> None:
    """Lets all that is ready run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Waits, without the clock, for a condition that other tasks make true."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come true")


@asynccontextmanager
async def running(
    directory: Path,
    *,
    kernel: FakeKernel | None = None,
    clock: VirtualClock | None = None,
    tasks: TaskSet | None = None,
    grace: float = 0.01,
    boot: str = "boot-1",
    network: tuple[FakeFabric, FakeGate] | None = None,
    why_not: str = "",
    **lifecycle: Any,
) -> AsyncIterator[Rig]:
    """A node on `directory`; give the same kernel, clock and tasks again for the next start of the same node."""
    clock = clock or VirtualClock()
    kernel = kernel or FakeKernel()
    async with TaskSet(clock) as own:
        images = FakeImages(clock)
        commits = FakeCommits(images)
        backend = FakeBackend(kernel, tasks or own)
        ended: list[str] = []
        parts = None
        if network is not None:
            kernel.fabric, gate = network
            parts = NetworkParts(
                fabric=kernel.fabric, gate=gate, services=SERVICES, settings=NetworkSettings(), credentials=frozenset({"token"}),
                ranges=("100.96.0.0/12", "fd5e:c000::/32"),
            )  # fmt: skip

        elif why_not:
            parts = NetworkParts(fabric=None, gate=None, services=SERVICES, settings=NetworkSettings(), why_not=why_not)

        async def on_end(sandbox_id: str) -> None:
            ended.append(sandbox_id)

        foundation = Foundation(
            directory=directory,
            images=images,
            commits=commits,
            backends={"container": backend},
            clock=clock,
            id_key=b"k" * 32,
            host=Host(2.0, lambda: (64 * GIB, 32 * GIB)),
            on_end=on_end,
        )
        settings = NodeSettings(
            lifecycle=LifecycleSettings(**lifecycle), operations=OperationSettings(grace=grace, kept_stream_kib=1)
        )
        node = Node(foundation, settings, parts, boot)
        clock.listeners.append(node.timers.poke)
        async with node:
            rig = Rig(node, clock, kernel, backend, images)
            rig.ended, rig.commits = ended, commits
            if network is not None:
                rig.gate = network[1]
            yield rig
