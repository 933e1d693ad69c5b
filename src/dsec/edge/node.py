"""The edge of one node: implements ports.cluster.Edge."""

import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from dsec.edge.api import application
from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Lifecycle, LifecycleSettings, Parts
from dsec.edge.listing import Listing
from dsec.edge.network.networks import NetworkParts, Networks
from dsec.edge.network.settings import NetworkSettings
from dsec.edge.operations import Operations, OperationSettings
from dsec.edge.previews import PreviewKey
from dsec.edge.pulse import Pulse, PulseSettings
from dsec.edge.recovery import recover
from dsec.edge.steady import SteadyClock
from dsec.edge.tasks import TaskSet
from dsec.edge.timers import Timers
from dsec.kernel.boot import boot_id
from dsec.kernel.memory import host_memory
from dsec.model.ids import RANDOM_BYTES, SandboxAddress, encode_sandbox_id
from dsec.model.outcome import End
from dsec.model.plan import Capabilities
from dsec.model.settings import check_positive, setting
from dsec.model.spec import SandboxSpec
from dsec.model.views import ListQuery, Page, SandboxState, SandboxView
from dsec.ports.backend import Backend
from dsec.ports.clock import Clock
from dsec.ports.cluster import Asgi, EdgeStatus, Principal
from dsec.ports.images import Commits, Images
from dsec.rules import lifecycle as table

__all__ = ["Foundation", "Host", "Node", "NodeSettings"]

_log = logging.getLogger("dsec.edge")
_MEMORY_FRESH = 0.5


@dataclass(frozen=True)
class NodeSettings:
    """Settings of an edge."""

    number: int = setting(1, "number of this edge, 0 to 65535, which its sandboxes' ids carry")
    gone_kept_seconds: float = setting(3600.0, "seconds that a sandbox which has ended can still be looked at")
    compact_interval: float = setting(
        30.0, "seconds between two rounds of forgetting what is old and of trimming the journal"
    )
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
    operations: OperationSettings = field(default_factory=OperationSettings)
    pulse: PulseSettings = field(default_factory=PulseSettings)

    def __post_init__(self) -> None:
        check_positive(self, "gone_kept_seconds", "compact_interval")


@dataclass(frozen=True)
class Host:
    """What the host has: `cpu_cores`, and bytes of `memory` in total and available now."""

    cpu_cores: float
    memory: Callable[[], tuple[int, int]] = host_memory


@dataclass(frozen=True)
class Foundation:
    """What an edge stands on. `directory`: its own, for the journal. `id_key`: 16 to 32 secret bytes that seal ids.
    `on_end`: told of each sandbox of which nothing is left."""

    directory: Path
    images: Images
    commits: Commits
    backends: Mapping[str, Backend]
    clock: Clock
    id_key: bytes
    host: Host
    on_end: Callable[[str], Coroutine[object, object, None]] | None = None


class _FreshMemory:
    """The host's memory, read again only after a moment: a burst of creates asks hundreds of times a second."""

    def __init__(self, read: Callable[[], tuple[int, int]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._at = float("-inf")
        self._found = (0, 0)

    def __call__(self) -> tuple[int, int]:
        now = self._clock.monotonic()
        if now - self._at > _MEMORY_FRESH:
            self._found, self._at = self._read(), now
        return self._found


class Node:
    """Enter it: it opens its backends, rebuilds itself from its journal, and serves until it is left. Leaving stops the edge,
    not its sandboxes, which the next start takes over; `stop_all` ends them. `network`: what its sandboxes' networks stand on. `boot`: the id of
    this boot of the host, None: as the kernel says."""

    def __init__(
        self,
        foundation: Foundation,
        settings: NodeSettings,
        network: NetworkParts | None = None,
        boot: str | None = None,
    ) -> None:
        self._on = foundation
        self._settings = settings
        self._journal = Journal(foundation.directory / "journal.db")
        self._boot = boot_id() if boot is None else boot
        last = self._journal.boot()
        self._rebooted = last is not None and last[0] != self._boot
        # While sandboxes of this boot live, their ends go on being counted in the time that they were promised in.
        kept = None if last is None or self._rebooted or not self._journal.has_living() else last[1]
        self.clock = clock = SteadyClock(foundation.clock, kept)
        self._tasks = TaskSet(clock)
        self.timers = Timers(clock)
        self._epoch = self._journal.next_epoch()
        parts = network or NetworkParts(fabric=None, gate=None, services={}, settings=NetworkSettings())
        self.networks = Networks(parts, self._journal, clock, self._tasks)
        self.lifecycle = Lifecycle(
            Parts(
                journal=self._journal,
                images=foundation.images,
                backends=foundation.backends,
                networks=self.networks,
                clock=clock,
                timers=self.timers,
                tasks=self._tasks,
                memory=_FreshMemory(foundation.host.memory, clock),
                on_end=foundation.on_end,
            ),
            settings.lifecycle,
        )
        self._operations = operations = Operations(self._journal, self._tasks, clock, settings.operations)
        self._retention = operations.retention
        links = PreviewKey(settings.number, self._epoch, foundation.id_key, clock)
        self._api = application(self.lifecycle, operations, foundation.images, foundation.commits, clock, links)
        self._listing = Listing(self.lifecycle, self._journal)
        self.pulse = Pulse(lambda: list(self.lifecycle.residents.values()), self.lifecycle.feed, settings.pulse)
        self._healthy = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        await self.networks.open()
        for backend in self._on.backends.values():
            await backend.open()
        self.lifecycle.offers = {kind: self._offered(backend) for kind, backend in self._on.backends.items()}
        self._tasks.spawn(self.timers.run(), "deadlines")
        taken, undone = await recover(self.lifecycle, self.lifecycle.parts, rebooted=self._rebooted)
        await self.networks.settle()
        self._journal.keep_boot(self._boot, self.clock.offset)
        if taken or undone:
            _log.info("epoch %d: took over %d sandboxes, undoing %d", self._epoch, taken, undone)
        self._tasks.spawn(self.pulse.run(), "pulse")
        self._compact_later()
        self._healthy = True
        return self

    def _offered(self, backend: Backend) -> Capabilities:
        """What a backend offers here: rules of networks only where the node's network is open too."""
        offers = backend.offers
        if not self.networks.why_not:
            return offers
        return replace(offers, network=False, why_not={**offers.why_not, "network": self.networks.why_not})

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._healthy = False
        self.lifecycle.close()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._operations.flush()
            for backend in self._on.backends.values():
                await backend.close()
            await self.networks.close()  # after the backends, which hold links made ahead
            self._journal.close()

    def _compact_later(self) -> None:
        when = self.clock.now() + self._settings.compact_interval
        self.timers.at(when, self._begin_compaction)

    def _begin_compaction(self) -> None:
        self._tasks.spawn(self._compact(), "compaction")

    async def _compact(self) -> None:
        try:
            now = self.clock.now()
            forget = partial(
                self._journal.compact,
                gone_before=now - self._settings.gone_kept_seconds,
                results_before=now - self._retention.seconds,
            )
            for _ in range(100):
                if not forget():
                    break
            await self._journal.checkpoint()
        finally:
            self._compact_later()

    # -- ports.cluster.Edge ------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The edge's number."""
        return self._settings.number

    @property
    def api(self) -> Asgi:
        """The application below /v1/sandboxes/{id}."""
        return self._api

    async def status(self) -> EdgeStatus:
        """What the edge says of itself."""
        room = self.lifecycle.room()
        return EdgeStatus(
            edge=self.number,
            epoch=self._epoch,
            healthy=self._healthy,
            sandboxes=len(self.lifecycle.residents),
            sandbox_capacity=room.sandboxes,
            memory_bytes=int(room.memory_bytes * room.memory_overcommit),
            memory_committed=self.lifecycle.memory_committed,
            cpu_cores=self._on.host.cpu_cores,
            cpu_committed=self.lifecycle.cpu_committed,
            backends=tuple(self.lifecycle.offers.values()),
        )

    def new_id(self) -> str:
        """A fresh sandbox id of this edge."""
        address = SandboxAddress(self.number, self._epoch & 0xFFFFFF, self._on.clock.random(RANDOM_BYTES))
        return encode_sandbox_id(address, self._on.id_key)

    async def create(
        self, spec: SandboxSpec, *, sandbox_id: str, principal: Principal, project: str, request_id: str | None
    ) -> SandboxView:
        """Starts a sandbox; see ports.cluster.Edge."""
        return await self.lifecycle.create(spec, sandbox_id=sandbox_id, project=project, request_id=request_id)

    async def cancel_creation(self, project: str, request_id: str) -> None:
        """Ends the sandbox of that request, in any state; does nothing for one that it does not know."""
        await self.lifecycle.give_up(project, request_id)

    async def list(self, query: ListQuery) -> Page:
        """A page of sandboxes, newest first."""
        return self._listing.page(query)

    async def stop_many(self, query: ListQuery) -> tuple[str, ...]:
        """Ends the living sandboxes that `query` names (its limit and cursor do not count); the ids of those that it ended."""
        event = table.StopAsked(End.STOPPED, f"stopped with others of {query.job or 'its labels'}")
        return await self._listing.stop(query, event)

    async def stop_all(self) -> tuple[str, ...]:
        """Ends every sandbox of the node, for `dsec down`."""
        states = (SandboxState.STARTING, SandboxState.RUNNING, SandboxState.STOPPING)
        query = ListQuery(project="root", states=states)
        return await self._listing.stop(query, table.StopAsked(End.STOPPED, "the node was shut down"))

    async def stop(self, sandbox_id: str) -> None:
        """Ends a sandbox in any state; does nothing for one that it does not know."""
        resident = self.lifecycle.residents.get(sandbox_id)
        if resident is not None:
            await self.lifecycle.stop(resident, table.StopAsked(End.STOPPED, "stopped by the platform"))

    async def live(self) -> frozenset[str]:
        """Ids of all sandboxes of which something is left."""
        return frozenset(self.lifecycle.residents)
