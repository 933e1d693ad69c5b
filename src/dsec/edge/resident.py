"""One sandbox of this node, as the edge holds it in memory; all that must survive is in the journal."""

import asyncio
from collections import deque

from dsec.edge.flight import Flight
from dsec.edge.journal import Row
from dsec.model.errors import DSecError, SandboxLost
from dsec.model.outcome import SandboxEnd, is_infra_end
from dsec.model.plan import Handle, Mount
from dsec.model.views import SandboxState, SandboxView
from dsec.ports.agent import Agent
from dsec.ports.backend import Backend
from dsec.rules import lifecycle as table
from dsec.rules import ttl
from dsec.rules.environ import Surroundings, surroundings
from dsec.rules.verdict import Counters

__all__ = ["Resident", "lost_error", "view_of_row"]

_STATES = {
    table.State.NEW: SandboxState.STARTING,
    table.State.STARTING: SandboxState.STARTING,
    table.State.RUNNING: SandboxState.RUNNING,
    table.State.STOPPING: SandboxState.STOPPING,
    table.State.GONE: SandboxState.GONE,
}


def _end_of(life: table.SandboxLife) -> SandboxEnd | None:
    if life.end is None or life.ended_at is None:
        return None
    return SandboxEnd(end=life.end, reason=life.reason, at=life.ended_at, incident=life.incident or None)


def view_of_row(row: Row, life: table.SandboxLife) -> SandboxView:
    """The view of a sandbox that only the journal knows any more."""
    return SandboxView(
        id=row.id,
        state=_STATES[life.state],
        spec=row.spec,
        project=row.project,
        created=row.created,
        absolute_deadline=life.deadlines.absolute,
        phases=row.phases,
        end=_end_of(life),
    )


def lost_error(life: table.SandboxLife, sandbox_id: str, detail: str = "") -> SandboxLost:
    """The error of a call to a sandbox that has ended or does not answer."""
    fields: dict[str, str | bool] = {"sandbox_id": sandbox_id}
    if life.end is not None:
        fields |= {"end": str(life.end), "infra": is_infra_end(life.end)}
    if life.incident:
        fields["incident"] = life.incident
    told = f"the sandbox is {life.state}" if life.end is None else f"the sandbox has ended: {life.end}"
    return SandboxLost(detail or life.reason or told, **fields)


class Resident:
    """`ready` ends with None once it runs, or with the error that it will not. `gone` is set when nothing is left of it.

    `claimed`: a creation has answered with it. `busy`: calls and attached commands in it now. `last_active`: Unix seconds of the last one's end, None since a renewal.
    `began_at`: the sandbox's counts when each kept process began. `doubted`: a connection to its aether broke and no new one was
    answered; `misses`: looks in a row at which it did not answer. `image_errors`: failed reads of its layers, as last asked.
    """

    __slots__ = (
        "aborting", "acting", "agent", "armed", "backend", "began", "began_at", "busy", "claimed", "doubted", "ending", "failure", "gone", "handle", "image_errors",
        "last_active", "layers", "life", "misses", "oom_kills", "phases", "pids_refused", "ready", "row", "running", "sequence", "session_locks", "surroundings",
        "todo", "waiting", "watcher", "work",
    )  # fmt: skip

    def __init__(self, row: Row, life: table.SandboxLife, backend: Backend, began: float) -> None:
        self.row = row
        self.life = life
        self.backend = backend
        self.began = began
        self.handle: Handle | None = row.handle
        self.agent: Agent | None = None
        self.layers: tuple[list[Mount], list[Mount]] = ([], [])
        self.phases: dict[str, float] = dict(row.phases)
        self.surroundings: Surroundings = surroundings(row.composition.config, row.spec)
        self.ready: asyncio.Future[DSecError | None] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.failure: DSecError | None = None
        self.busy = 0
        self.waiting = 0
        self.claimed = False
        self.last_active: float | None = row.active
        self.armed: float | None = None
        self.todo: deque[table.Action] = deque()
        self.work: asyncio.Task[None] | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.aborting = False
        self.acting = False
        self.sequence = 0
        self.running: dict[str, Flight] = {}
        self.session_locks: dict[str, asyncio.Lock] = {}
        self.ending = asyncio.Event()
        self.oom_kills = 0
        self.image_errors = 0
        self.pids_refused = 0
        self.began_at: dict[str, Counters] = {}
        self.doubted = False
        self.misses = 0

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.row.id

    def deadlines(self) -> ttl.Deadlines:
        """Its ends by time, with the activity since the last renewal."""
        known = self.life.deadlines
        return known if self.last_active is None else ttl.active(known, self.last_active)

    def view(self) -> SandboxView:
        """It as callers see it."""
        deadlines = self.deadlines()
        return SandboxView(
            id=self.row.id,
            state=_STATES[self.life.state],
            spec=self.row.spec,
            project=self.row.project,
            created=self.row.created,
            idle_deadline=deadlines.idle,
            absolute_deadline=deadlines.absolute,
            phases=self.phases,
            end=_end_of(self.life),
        )

    def lost(self, detail: str = "") -> SandboxLost:
        """The error of a call to it now that it has ended or does not answer."""
        return lost_error(self.life, self.row.id, detail)

    def live_agent(self) -> Agent:
        """Its aether. Raises SandboxLost unless it runs."""
        if self.agent is None or self.life.state is not table.State.RUNNING:
            raise self.lost()
        return self.agent
