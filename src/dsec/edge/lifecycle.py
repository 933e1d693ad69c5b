"""The shell around rules.lifecycle.step: journal what happened, carry out what follows, feed back what came of it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from dsec.edge.backlog import Backlog
from dsec.edge.expiry import Expiry
from dsec.edge.journal import Journal, Row
from dsec.edge.network.networks import Networks
from dsec.edge.operations import fingerprint_of
from dsec.edge.planning import check_user, end_of, error_of, layers_named, plan_of
from dsec.edge.resident import Resident, lost_error, view_of_row
from dsec.edge.tasks import TaskSet
from dsec.edge.timers import Timers
from dsec.model.errors import Conflict, DSecError, NotFound, Unavailable
from dsec.model.network import Link
from dsec.model.outcome import End
from dsec.model.plan import Aftermath, Capabilities, Handle, Plan
from dsec.model.settings import check_positive, setting
from dsec.model.spec import SandboxSpec
from dsec.model.views import SandboxView
from dsec.ports.backend import Backend, BackendFailure, Started
from dsec.ports.clock import Clock
from dsec.ports.images import Images
from dsec.rules import lifecycle as table
from dsec.rules.admit import MIB, Committed, Room, admit, check, memory_of

__all__ = ["Lifecycle", "LifecycleSettings", "Parts"]
from dsec.web import failure as unforeseen

_log = logging.getLogger("dsec.edge")


@dataclass(frozen=True)
class LifecycleSettings:
    """Settings of an edge's lifecycle."""

    starts_at_once: int = setting(16, "sandboxes being started at any moment; more of them wait (phase `queue`)")
    create_grace: float = setting(
        10.0, "seconds that a create with an idempotency key goes on after its caller went away"
    )
    stop_patience: float = setting(30.0, "seconds that a stop waits for the end before it answers with state stopping")
    memory_overcommit: float = setting(
        32.0, "memory limits of all sandboxes together may be this many times the host's memory"
    )
    memory_reserve_mb: int = setting(256, "MiB of memory that must really be available for a create to be admitted")
    sandboxes: int = setting(3200, "most sandboxes on the node")
    busy_retry_after: float = setting(1.0, "seconds after which a client that was turned away is told to try again")

    def __post_init__(self) -> None:
        check_positive(self, "starts_at_once", "stop_patience", "memory_overcommit", "sandboxes", "busy_retry_after")


class Parts(Struct, frozen=True):
    """What the lifecycle stands on. `memory`: bytes of the host in total and available now. `on_end`: told once of each
    sandbox of which nothing is left."""

    journal: Journal
    images: Images
    backends: Mapping[str, Backend]
    networks: Networks
    clock: Clock
    timers: Timers
    tasks: TaskSet
    memory: Callable[[], tuple[int, int]]
    on_end: Callable[[str], Coroutine[object, object, None]] | None = None


class Lifecycle:
    """All sandboxes of this node that are not gone, by id, and what moves them along."""

    def __init__(self, parts: Parts, settings: LifecycleSettings) -> None:
        self._on = self.parts = parts
        self._settings = settings
        self._starts = asyncio.Semaphore(settings.starts_at_once)
        self._asked: dict[tuple[str, str], Resident] = {}
        self._closed = False
        self.residents: dict[str, Resident] = {}
        self.expiry = Expiry(parts.journal, parts.timers, parts.clock, self.feed)
        self._backlog = Backlog(parts.timers, parts.clock)
        self.memory_committed = 0
        self.cpu_committed = 0.0
        parts.images.on_lost = self._lost_image
        self.offers: dict[str, Capabilities] = {kind: backend.offers for kind, backend in parts.backends.items()}

    def room(self) -> Room:
        """What the node has for sandboxes."""
        return Room(
            memory_bytes=self._on.memory()[0],
            memory_overcommit=self._settings.memory_overcommit,
            memory_reserve_bytes=self._settings.memory_reserve_mb * MIB,
            sandboxes=self._settings.sandboxes,
            retry_after=self._settings.busy_retry_after,
        )

    # -- create ------------------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, *, sandbox_id: str, project: str, request_id: str | None) -> SandboxView:
        """Starts a sandbox and answers when it runs. Cancelling it undoes the sandbox, with `request_id` after a grace time in
        which the same request may come again. Nothing is left of one that raises."""
        began = self._on.clock.monotonic()
        check(spec)
        fingerprint = fingerprint_of(spec)
        known = self._known(project, request_id, fingerprint)
        if known is None and (lacking := self._on.images.lacks(layers_named(spec))):
            self._admit(spec)
            await self._on.images.bring(lacking)
            known = self._known(project, request_id, fingerprint)
        if isinstance(known, SandboxView):
            return known
        resident = known or self._ask(spec, fingerprint, sandbox_id, project, request_id, began)
        resident.waiting += 1
        try:
            error = await asyncio.shield(resident.ready)
            if error is not None:
                await self._settled(resident)
                raise error
            resident.claimed = True
            return resident.view()
        finally:
            resident.waiting -= 1
            if not resident.claimed and resident.waiting == 0:
                self._caller_gone(resident)

    def _known(self, project: str, request_id: str | None, fingerprint: bytes) -> Resident | SandboxView | None:
        """What an earlier request of the same id made; one that never ran is as if it had not been asked for."""
        if request_id is None:
            return None
        resident = self._asked.get((project, request_id))
        row = resident.row if resident else self._on.journal.asked(project, request_id)
        if row is None:
            return None
        if row.fingerprint != fingerprint:
            raise Conflict("this request_id belongs to another request", request_id=request_id)
        if resident is not None:
            return resident if resident.life.state is table.State.STARTING else self._ran(resident)
        return self.gone_view(row) if row.phases else None

    @staticmethod
    def _ran(resident: Resident) -> SandboxView | None:
        if resident.agent is None:
            return None
        resident.claimed = True
        return resident.view()

    def _caller_gone(self, resident: Resident) -> None:
        if resident.row.request_id is None:
            self.feed(resident, table.StopAsked(End.STOPPED, "its creation was cancelled"))
            return
        until = self._on.clock.now() + self._settings.create_grace
        self._on.timers.at(until, partial(self._abandon, resident))

    def _abandon(self, resident: Resident) -> None:
        if resident.waiting == 0 and not resident.claimed:
            self.feed(resident, table.StopAsked(End.STOPPED, "its caller went away and did not come back"))

    async def give_up(self, project: str, request_id: str) -> None:
        """Nobody comes back for the creation `request_id`: ends its sandbox now, without the grace time."""
        resident = self._asked.get((project, request_id))
        if resident is not None:
            await self.stop(resident, table.StopAsked(End.STOPPED, "its creation was cancelled"))

    def _ask(
        self, spec: SandboxSpec, fingerprint: bytes, sandbox_id: str, project: str, request_id: str | None, began: float
    ) -> Resident:
        self._admit(spec)
        composition = self._on.images.compose(spec.container_image, spec.workspace, spec.toolkits)
        now = round(self._on.clock.now(), 6)  # as exact as a cursor of the list
        row = Row(
            id=sandbox_id,
            project=project,
            created=now,
            request_id=request_id,
            fingerprint=fingerprint,
            spec=spec,
            composition=composition,
        )
        resident = Resident(row, table.SandboxLife(), self._on.backends[spec.backend], began)
        resident.phases["compose"] = self._on.clock.monotonic() - began
        event = table.Requested(spec.ttl_running_stop, spec.ttl_absolute)
        resident.life, actions = table.step(resident.life, event, now)
        self._on.journal.ask(row, event, now)
        self.keep(resident)
        self._after(resident, actions)
        self.expiry.arm(resident)
        return resident

    def _admit(self, spec: SandboxSpec) -> None:
        total, free = self._on.memory()
        committed = Committed(sandboxes=len(self.residents), memory_bytes=self.memory_committed, memory_available=free)
        admit(spec, self.offers, replace(self.room(), memory_bytes=total), committed)
        self._on.networks.check(spec)

    def keep(self, resident: Resident) -> None:
        """Counts a sandbox as one of this node."""
        self.residents[resident.id] = resident
        if resident.row.request_id is not None:
            self._asked[resident.row.project, resident.row.request_id] = resident
        self.memory_committed += memory_of(resident.row.spec)
        self.cpu_committed += resident.row.spec.cpu_cores_limit

    # -- look, renew, stop -------------------------------------------------------------------------------------------

    def find(self, sandbox_id: str) -> Resident:
        """A sandbox that is not gone. Raises SandboxLost for one that is, NotFound for one never seen or forgotten."""
        resident = self.residents.get(sandbox_id)
        if resident is not None:
            return resident
        row = self._on.journal.row(sandbox_id)
        if row is None:
            raise NotFound("no such sandbox", what="sandbox")
        raise lost_error(self._replayed(row), sandbox_id)

    def view(self, sandbox_id: str) -> SandboxView:
        """A sandbox, gone or not. Raises NotFound."""
        resident = self.residents.get(sandbox_id)
        if resident is not None:
            return resident.view()
        row = self._on.journal.row(sandbox_id)
        if row is None:
            raise NotFound("no such sandbox", what="sandbox")
        return self.gone_view(row)

    def gone_view(self, row: Row) -> SandboxView:
        """The view of a sandbox that only the journal knows."""
        return view_of_row(row, self._replayed(row))

    def _replayed(self, row: Row) -> table.SandboxLife:
        life = table.SandboxLife()
        for event, at in [*self._on.journal.events(row.id), *self._backlog.events(row.id)]:
            life, _ = table.step(life, event, at)
        return life

    def renew(self, resident: Resident, ttl_seconds: float | None) -> SandboxView:
        """Moves the idle end. Raises SandboxLost when it is ending or gone."""
        if resident.life.state is not table.State.RUNNING:
            raise resident.lost()
        self.feed(resident, table.Renewed(ttl_seconds))
        resident.last_active = None
        self.expiry.arm(resident)
        return resident.view()

    async def stop(self, resident: Resident, event: table.Event) -> SandboxView:
        """Ends a sandbox and answers when nothing is left, or with state stopping when that takes longer than stop_patience."""
        self.feed(resident, event)
        await self._settled(resident)
        return resident.view()

    async def _settled(self, resident: Resident) -> None:
        if self._closed:
            return
        try:
            async with asyncio.timeout(self._settings.stop_patience):
                await resident.gone.wait()
        except TimeoutError:
            _log.warning("sandbox %s is still stopping after %.0f s", resident.id, self._settings.stop_patience)

    def close(self) -> None:
        """The edge ends, its sandboxes do not: nothing moves any more, who waits for a start is told, activity is recorded."""
        self._closed = True
        for resident in self.residents.values():
            if not resident.ready.done():
                resident.ready.set_result(Unavailable("the edge is shutting down"))
        self._backlog.flush()
        self.expiry.flush()

    # -- the machine -------------------------------------------------------------------------------------------------

    def feed(self, resident: Resident, event: table.Event, at: float | None = None) -> None:
        """Journals `event` (of `at`, Unix seconds; None: now), steps, and sets going what follows. An event that does nothing is
        not recorded."""
        if self._closed:
            return
        now = self._on.clock.now() if at is None else at
        if table.of_platform(event):
            event = replace(event, incident=self._on.clock.random(8).hex())
        life, actions = table.step(resident.life, event, now)
        if life is resident.life and not actions and not isinstance(event, table.Observed):
            return
        if life.incident and not resident.life.incident:
            _log.error("incident %s: sandbox %s ends as %s: %s", life.incident, resident.id, life.end, life.reason)
        write = partial(self._record, resident, event, life, now)
        try:
            if resident.id in self._backlog:
                self._backlog.add(resident.id, event, now, write)
            else:
                write()
        except DSecError as error:
            if actions and isinstance(event, table.Mounted):
                resident.failure = error
                self.feed(resident, table.Failed(resident.life.incarnation, True, End.CAPACITY, error.detail))
                return
            # Going on towards an end frees what the journal lacks; after a crash the kernel tells what the journal could not.
            _log.error("sandbox %s: %s is not in the journal yet: %s", resident.id, type(event).__name__, error.detail)
            self._backlog.add(resident.id, event, now, write)
        before, resident.life = resident.life.state, life
        self._moved(resident, before)
        self._after(resident, actions)

    def _record(self, resident: Resident, event: table.Event, life: table.SandboxLife, now: float) -> None:
        if life.state is table.State.GONE:
            self._on.journal.ended(resident.id, event, now)
        elif isinstance(event, table.Started) and life.state is table.State.RUNNING:
            resident.phases.setdefault("total", self._on.clock.monotonic() - resident.began)
            self._on.journal.started(resident.id, event, now, resident.phases)
        else:
            self._on.journal.event(resident.id, event, now)

    def _moved(self, resident: Resident, before: table.State) -> None:
        """What a change of state means for those who wait for it."""
        state = resident.life.state
        if state is before:
            return
        if state is table.State.RUNNING:
            self.running(resident)
        elif before is table.State.RUNNING and resident.watcher is not None:
            resident.watcher.cancel()
        if state is not table.State.STARTING and not resident.ready.done():
            failed = None if state is table.State.RUNNING else (resident.failure or resident.lost())
            resident.ready.set_result(failed)
        if state in (table.State.STOPPING, table.State.GONE):
            resident.ending.set()
        if state is table.State.GONE:
            self._gone(resident)

    def killed(self, resident: Resident, total: int, at: float | None = None, how: str = "") -> None:
        """`total` processes of it were killed for want of memory since its start, the last ones at `at` (monotonic seconds; None:
        now): those not yet told become an event."""
        count = total - resident.oom_kills
        if count > 0:
            resident.oom_kills = total
            clock = self._on.clock
            when = None if at is None else clock.now() - (clock.monotonic() - at)
            self.feed(
                resident, table.Observed("out_of_memory", f"{count} processes at the memory limit{how}", count), when
            )

    def _lost_image(self, sandbox_id: str, why: str) -> None:
        """What it reads can no longer be trusted: it ends."""
        resident = self.residents.get(sandbox_id)
        if resident is not None:
            self.feed(resident, table.Died(resident.life.incarnation, End.IMAGE, why))

    def running(self, resident: Resident) -> None:
        """It runs: its aether can be spoken to, its death is watched for, its idle time counts."""
        if resident.handle is None:
            raise RuntimeError("a running sandbox has a handle")
        resident.agent = resident.backend.agent(resident.handle)
        resident.backend.tell_kills(resident.handle, partial(self.killed, resident))
        resident.watcher = self._on.tasks.spawn(self._watch(resident), f"watch {resident.id}")
        self.expiry.arm(resident)

    def _gone(self, resident: Resident) -> None:
        del self.residents[resident.id]
        self.expiry.forget(resident)
        key = (resident.row.project, resident.row.request_id or "")
        if self._asked.get(key) is resident:
            del self._asked[key]
        self.memory_committed -= memory_of(resident.row.spec)
        self.cpu_committed -= resident.row.spec.cpu_cores_limit
        resident.gone.set()
        if self._on.on_end is not None:
            self._on.tasks.spawn(self._on.on_end(resident.id), f"end of {resident.id}")

    async def _watch(self, resident: Resident) -> None:
        incarnation = resident.life.incarnation
        if resident.handle is None:
            return
        try:
            end, reason = await resident.backend.wait_end(resident.handle)
        except BackendFailure as failure:
            end, reason = failure.end, failure.detail
        self.feed(resident, table.Died(incarnation, end, reason))

    def _after(self, resident: Resident, actions: tuple[table.Action, ...]) -> None:
        retry = resident.life.retry_at
        if retry is not None:
            wake = table.Woken(resident.life.incarnation)
            self._on.timers.at(retry, partial(self.feed, resident, wake))
        for action in actions:
            if isinstance(action, table.Abort):
                resident.aborting = True
                if resident.work is not None and resident.acting:
                    resident.work.cancel()
            else:
                resident.todo.append(action)
        if resident.todo and resident.work is None:
            resident.work = self._on.tasks.spawn(self._carry(resident), f"work on {resident.id}")

    async def _carry(self, resident: Resident) -> None:
        """Carries out a sandbox's actions one after another; an abort cancels the one under way and is answered by Failed."""
        task = asyncio.current_task()
        while resident.todo:
            action = resident.todo.popleft()
            event: table.Event = table.Failed(
                action.incarnation, False, resident.life.end or End.STOPPED, "it was given up"
            )
            try:
                if not resident.aborting:
                    resident.acting = True
                    event = await self._done(resident, action)
            except asyncio.CancelledError:
                if not resident.aborting or task is None:
                    raise
                task.uncancel()
                event = table.Failed(action.incarnation, True, resident.life.end or End.STOPPED, "it was given up")
            finally:
                resident.acting = False
            resident.aborting = False
            self.feed(resident, event)
        resident.work = None

    async def _done(self, resident: Resident, action: table.Action) -> table.Event:
        n = action.incarnation
        acquiring, incident = isinstance(action, table.Mount | table.Start), ""
        try:
            match action:
                case table.Mount():
                    return await self._mount(resident, n)
                case table.Start():
                    return await self._start(resident, n)
                case table.Kill():
                    await self._on.networks.leave(resident.id)
                    if resident.handle is not None:
                        await resident.backend.stop(resident.handle)
                    return table.Killed(n)
                case _:
                    await self._on.images.release(resident.id)
                    return table.Unmounted(n)
        except BackendFailure as failure:
            resident.failure = error_of(failure)
            left, end, reason = failure.aftermath is Aftermath.BROKEN, failure.end, failure.detail
        except DSecError as error:
            resident.failure = error
            left, end, reason = True, end_of(error, mounting=isinstance(action, table.Mount)), error.detail
        except Exception as error:  # noqa: BLE001 - whatever it is, what was begun must still be undone
            known = unforeseen(error, self._on.clock, f"{type(action).__name__} of {resident.id}")
            incident = str(known.fields.get("incident", ""))
            resident.failure = known
            left, end, reason = True, End.INTERNAL if incident else End.CAPACITY, known.detail
        return table.Failed(n, left, end, reason, incident) if acquiring else table.Stuck(n, reason)

    async def _mount(self, resident: Resident, n: int) -> table.Event:
        began = self._on.clock.monotonic()
        images, spec = self._on.images, resident.row.spec
        layers = await images.mounts(resident.row.composition, resident.id)
        extra = await images.extra(spec.mounts, resident.id) if spec.mounts else []
        resident.layers = (layers, extra)
        resident.image_errors = await images.read_errors(resident.row.composition.layers)
        resident.phases["mounts"] = self._on.clock.monotonic() - began
        return table.Mounted(n)

    async def _start(self, resident: Resident, n: int) -> table.Event:
        waited = self._on.clock.monotonic()
        async with self._starts:
            resident.phases["queue"] = self._on.clock.monotonic() - waited
            link = self._on.networks.link_of(resident)
            plan = plan_of(resident, link)
            handle = resident.backend.reserve(plan)
            self._on.journal.owe(resident.id, handle)
            resident.handle = handle
            if link is None:
                started = await resident.backend.start(plan, handle)
            else:
                started = await self._start_linked(resident, plan, handle, link)
        await check_user(resident, resident.backend.agent(handle))
        resident.phases.update(started.phases)
        return table.Started(n)

    async def _start_linked(self, resident: Resident, plan: Plan, handle: Handle, link: Link) -> Started:
        """The gate learns of it while the kernel makes it: it answers nothing for whom it does not know, and both are done before
        the sandbox is anybody's."""

        async def join() -> None:
            begun = self._on.clock.monotonic()
            await self._on.networks.join(resident, resident.backend.slot(handle), link)
            resident.phases["policy"] = self._on.clock.monotonic() - begun

        failure: Exception
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(join())
                start = both.create_task(resident.backend.start(plan, handle))
        except* BackendFailure as failed:
            await self._on.networks.leave(resident.id)
            failure = failed.exceptions[0]
        except* DSecError as refused:
            failure = refused.exceptions[0]
        else:
            return start.result()
        raise failure
