"""Honest fakes of a backend and of the image room: they keep what they made, so that a test can see what is left.

`FakeKernel` outlives backends as a real kernel outlives an edge: give the same one to the next backend after a crash.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum

from dsec.edge.tasks import TaskSet
from dsec.model.errors import Busy, DSecError, ImageUnavailable, NotFound
from dsec.model.layers import Composition, ImageConfig
from dsec.model.outcome import End
from dsec.model.plan import Aftermath, Capabilities, Handle, Life, Mount, Plan, Usage
from dsec.model.spec import BackendKind, MountSpec
from dsec.model.views import CommitReport, CommitRequest, ImageView
from dsec.ports.backend import BackendFailure, Started, TellKills
from dsec.ports.clock import Clock
from dsec.ports.images import Changed
from dsec.testing.agent import FakeAgent
from dsec.testing.network import FakeFabric

__all__ = ["FakeBackend", "FakeCell", "FakeCommits", "FakeImages", "FakeKernel", "Trouble"]


class Trouble(StrEnum):
    """What goes wrong with a start: it fails leaving nothing, fails leaving parts, or never answers (until it is cancelled,
    leaving parts)."""

    CLEAN = "clean"
    PARTS = "parts"
    HANG = "hang"


class FakeCell:
    """A cell in the fake kernel. `broken`: only parts of it are there. `taken`: contexts of `changes` that are open."""

    def __init__(self, agent: FakeAgent, plan: Plan) -> None:
        self.agent = agent
        self.plan = plan
        self.broken = False
        self.ended: tuple[End, str] | None = None
        self.changed = asyncio.Event()
        self.oom_kills = 0
        self.pids_refused = 0
        self.disk_bytes = 0
        self.taken = 0
        self.tell_kills: TellKills | None = None

    def die(self, end: End = End.RUNTIME, reason: str = "planted") -> None:
        """It ends by itself."""
        self.ended = (end, reason)
        self.agent.die()
        self.changed.set()


class FakeKernel:
    """What exists, by sandbox id. `most`: the most cells there ever were. `fabric`: its network, None for none."""

    def __init__(self) -> None:
        self.cells: dict[str, FakeCell] = {}
        self.slots: dict[str, int] = {}
        self.most = 0
        self.fabric: FakeFabric | None = None


class FakeBackend:
    """Implements ports.backend.Backend. `start_troubles` and `stop_failures` are used up one a start or stop; `start_delay`
    seconds a start takes."""

    def __init__(self, kernel: FakeKernel, tasks: TaskSet, kind: BackendKind = "container") -> None:
        self._kernel = kernel
        self._tasks = tasks
        self._kind = kind
        self.start_troubles: list[Trouble] = []
        self.stop_failures = 0
        self.start_delay = 0.0
        self.started = 0
        self._slots = kernel.slots

    @property
    def offers(self) -> Capabilities:
        """Available, with the network that the kernel has."""
        return Capabilities(backend=self._kind, available=True, network=self._kernel.fabric is not None)

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do: cells stay."""

    def reserve(self, plan: Plan) -> Handle:
        """The handle names the sandbox."""
        if plan.link is not None:
            self._slots[plan.sandbox_id] = len(self._slots)
        return Handle(backend=self._kind, state=plan.sandbox_id.encode())

    def slot(self, handle: Handle) -> int | None:
        """A number of its own for each sandbox that was reserved with a link."""
        return self._slots.get(handle.state.decode())

    def cell(self, handle: Handle) -> FakeCell | None:
        """What the kernel has of it."""
        return self._kernel.cells.get(handle.state.decode())

    async def start(self, plan: Plan, handle: Handle) -> Started:
        """Makes the cell in two steps, between which it can fail or be cancelled."""
        trouble = self.start_troubles.pop(0) if self.start_troubles else None
        if trouble is Trouble.CLEAN:
            raise BackendFailure("planted", aftermath=Aftermath.UNDONE, end=End.RUNTIME)
        cell = FakeCell(FakeAgent(self._tasks), plan)
        cell.broken = True
        self._kernel.cells[plan.sandbox_id] = cell
        self._kernel.most = max(self._kernel.most, len(self._kernel.cells))
        slot = self._slots.get(plan.sandbox_id)
        if plan.link is not None and self._kernel.fabric is not None and slot is not None:
            self._kernel.fabric.link(slot, -1)
            self._kernel.fabric.apply(slot, plan.link.policy.allows, plan.link.policy.limits, plan.link.group)
        if trouble is Trouble.HANG:
            await asyncio.Event().wait()
        if self.start_delay:
            await asyncio.sleep(self.start_delay)
        if trouble is Trouble.PARTS:
            raise BackendFailure("planted", aftermath=Aftermath.BROKEN, end=End.RUNTIME)
        cell.broken = False
        self.started += 1
        return Started({"fake": 0.001})

    async def adopt(self, handle: Handle) -> Life:
        """What the kernel says."""
        cell = self.cell(handle)
        if cell is None:
            return Life.GONE
        return Life.BROKEN if cell.broken or cell.ended else Life.ALIVE

    def agent(self, handle: Handle) -> FakeAgent:
        """The cell's aether."""
        cell = self.cell(handle)
        if cell is None:
            raise BackendFailure("no such cell", aftermath=Aftermath.UNTOUCHED, end=End.RUNTIME)
        return cell.agent

    async def wait_end(self, handle: Handle) -> tuple[End, str]:
        """Until the cell dies by itself."""
        cell = self.cell(handle)
        if cell is None:
            return End.RUNTIME, "no such cell"
        while cell.ended is None:
            await cell.changed.wait()
        return cell.ended

    def tell_kills(self, handle: Handle, tell: TellKills) -> None:
        """Kept on the cell, for the test to call."""
        cell = self.cell(handle)
        if cell is not None:
            cell.tell_kills = tell

    async def stop(self, handle: Handle) -> None:
        """Removes the cell in any state, or fails as planted."""
        await asyncio.sleep(0)
        if self.stop_failures:
            self.stop_failures -= 1
            raise BackendFailure("planted", aftermath=Aftermath.BROKEN, end=End.RUNTIME)
        cell = self._kernel.cells.pop(handle.state.decode(), None)
        slot = self.slot(handle)
        if slot is not None and self._kernel.fabric is not None:
            self._kernel.fabric.unlink(slot)
        if cell is not None:
            cell.agent.die()

    async def usage(self, handle: Handle) -> Usage:
        """Counts that the test set on the cell."""
        cell = self.cell(handle)
        if cell is None:
            raise BackendFailure("no such cell", aftermath=Aftermath.UNTOUCHED, end=End.RUNTIME)
        limits = cell.plan.limits
        return Usage(
            memory_bytes=1,
            memory_peak_bytes=2,
            memory_limit_bytes=limits.memory_bytes,
            cpu_seconds=0.1,
            pids=1,
            disk_bytes=cell.disk_bytes,
            disk_limit_bytes=limits.disk_bytes,
            oom_kills=cell.oom_kills,
            pids_refused=cell.pids_refused,
        )

    @asynccontextmanager
    async def changes(self, handle: Handle) -> AsyncIterator[str]:
        """A name that says whose they are; there is no such directory."""
        cell = self.cell(handle)
        if cell is None or cell.broken:
            raise BackendFailure("no such cell", aftermath=Aftermath.UNTOUCHED, end=End.RUNTIME)
        cell.taken += 1
        try:
            yield f"/fake/{handle.state.decode()}"
        finally:
            cell.taken -= 1


class FakeImages:
    """Implements ports.images.Images over names. `elsewhere`: what a store would give. `holders` hold mounts now; `broken` names images that cannot
    be read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.configs: dict[str, ImageConfig] = {"base": ImageConfig()}
        self.holders: set[str] = set()
        self.broken: set[str] = set()
        self.owners: dict[str, str] = {}
        self.release_failures = 0
        self.elsewhere: dict[str, ImageConfig] = {}
        self.failed_reads = 0
        self.on_lost: Callable[[str, str], None] = lambda holder, why: None

    def lacks(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that are in `elsewhere` alone."""
        return tuple(name for name in names if name in self.elsewhere and name not in self.configs)

    async def bring(self, names: Sequence[str]) -> None:
        """Moves names from `elsewhere` here."""
        for name in names:
            self.configs[name] = self.elsewhere[name]

    async def adopt(self, composition: Composition, specs: Sequence[MountSpec], holder: str) -> list[Mount]:
        """As `mounts`."""
        return await self.mounts(composition, holder)

    async def read_errors(self, digests: Sequence[str]) -> int:
        """`failed_reads`."""
        return self.failed_reads

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Composition:
        """Raises NotFound for a name that is not in `configs`."""
        names = [base, *([workspace] if workspace else []), *toolkits]
        for name in names:
            if name not in self.configs:
                raise NotFound(f"no image {name}", what="image")
        return Composition(layers=tuple(names), config=self.configs[base])

    async def mounts(self, composition: Composition, holder: str) -> list[Mount]:
        """Raises ImageUnavailable for one in `broken`."""
        self.holders.add(holder)
        for name in composition.layers:
            if name in self.broken:
                raise ImageUnavailable(f"{name} cannot be read")
        return [Mount(kind="layer", source=f"/fake/{name}") for name in composition.layers]

    async def extra(self, specs: Sequence[MountSpec], holder: str) -> list[Mount]:
        """One volume each."""
        return [Mount(kind="volume", source=f"/fake/{each.volume}", target=each.target) for each in specs]

    async def release(self, holder: str) -> None:
        """Lets go; fails as planted."""
        if self.release_failures:
            self.release_failures -= 1
            raise ImageUnavailable("planted")
        self.holders.discard(holder)

    def list(self) -> list[ImageView]:
        """None."""
        return []

    def owner(self, name: str) -> str:
        """As the test, or a commit, set it."""
        return self.owners.get(name, "")

    def bytes_read(self, digest: str) -> int | None:
        """Not told."""
        return None


class FakeCommits:
    """Implements ports.images.Commits: what is committed becomes a name of `images`. `fails`: what the next one raises. `seen`: what each
    was made of."""

    def __init__(self, images: FakeImages) -> None:
        self._images = images
        self.fails: DSecError | None = None
        self.seen: list[Changed] = []

    def check(self, request: CommitRequest) -> None:
        """Refuses the name "full"."""
        if request.name == "full":
            raise Busy("planted")

    async def commit(self, request: CommitRequest, changed: Changed) -> CommitReport:
        """Names the layers of the sandbox and one more."""
        self.seen.append(changed)
        failure, self.fails = self.fails, None
        if failure is not None:
            raise failure
        self._images.configs[request.name] = request.config or changed.composition.config
        self._images.owners[request.name] = changed.project
        layers = (*changed.composition.layers, request.name)
        return CommitReport(name=request.name, digest=request.name, layers=layers, entries=1, bytes=0, whiteouts=0)
