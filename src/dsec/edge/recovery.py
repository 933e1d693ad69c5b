"""After a restart: rebuild every sandbox from the journal, ask the kernel what lives, take over or undo."""

import asyncio
import logging

from msgspec.structs import replace

from dsec.edge.journal import Row
from dsec.edge.lifecycle import Lifecycle, Parts
from dsec.edge.resident import Resident
from dsec.model.errors import DSecError
from dsec.model.plan import Life, Mount
from dsec.ports.backend import BackendFailure
from dsec.rules import lifecycle as table
from dsec.rules import ttl

__all__ = ["recover"]

_AT_ONCE = 16

_log = logging.getLogger("dsec.edge")


async def recover(lifecycle: Lifecycle, parts: Parts, *, rebooted: bool) -> tuple[int, int]:
    """Takes over what lives and begins the undo of the rest; how many of each. Ends by time that passed meanwhile are kept.
    `rebooted`: the host was, so nothing lives."""
    slots = asyncio.Semaphore(_AT_ONCE)
    taken: list[bool] = []

    async def one(row: Row, events: list[tuple[table.Event, float]]) -> None:
        async with slots:
            taken.append(await _recover_one(lifecycle, parts, row, events, rebooted))

    async with asyncio.TaskGroup() as group:
        for row, events in parts.journal.living():
            group.create_task(one(row, events))
    return sum(taken), len(taken) - sum(taken)


async def _recover_one(
    lifecycle: Lifecycle, parts: Parts, row: Row, events: list[tuple[table.Event, float]], rebooted: bool
) -> bool:
    life = table.SandboxLife()
    for event, at in events:
        life, _ = table.step(life, event, at)
    backend = parts.backends.get(row.spec.backend)
    if backend is None:
        _log.error(
            "sandbox %s: this node has no %s backend any more; it stays in the journal", row.id, row.spec.backend
        )
        return False
    if life.retry_at is not None:
        life = replace(life, retry_at=None)
    resident = Resident(row, life, backend, parts.clock.monotonic())
    resident.sequence = parts.journal.last_sequence(row.id)
    if life.state is table.State.RUNNING:
        resident.life = replace(
            life, deadlines=ttl.restored(life.deadlines, _last_active(row, events), parts.clock.now())
        )
        resident.last_active = None
        resident.oom_kills = sum(
            event.count for event, _ in events if isinstance(event, table.Observed) and event.what == "out_of_memory"
        )
        resident.claimed = True
        resident.ready.set_result(None)
    lifecycle.keep(resident)
    alive = life.state is table.State.RUNNING and not rebooted and await _adopted(parts, resident)
    event_or_none = table.recover(life, alive, rebooted=rebooted)
    if event_or_none is not None:
        lifecycle.feed(resident, event_or_none)
        return False
    if resident.handle is not None:
        await parts.networks.adopt(resident, backend.slot(resident.handle))
    lifecycle.running(resident)
    await _counted(lifecycle, resident)
    return True


async def _counted(lifecycle: Lifecycle, resident: Resident) -> None:
    """What was counted while nobody looked is no command's of from now on."""
    if resident.handle is None:
        return
    try:
        usage = await resident.backend.usage(resident.handle)
    except BackendFailure as failure:
        _log.warning("sandbox %s: no usage: %s", resident.id, failure.detail)
        return
    lifecycle.killed(resident, usage.oom_kills, how=", some while the server was away")
    resident.pids_refused = usage.pids_refused


def _last_active(row: Row, events: list[tuple[table.Event, float]]) -> float | None:
    """Its recorded activity since the last renewal, which counts alone where there was none since."""
    renewed = max((at for event, at in events if isinstance(event, table.Renewed)), default=0.0)
    return None if row.active is None or row.active <= renewed else row.active


async def _adopted(parts: Parts, resident: Resident) -> bool:
    """True where the kernel says that the cell lives and its layers could be held again."""
    if resident.handle is None:
        return False
    try:
        found = await resident.backend.adopt(resident.handle)
        if found is not Life.ALIVE:
            return False
        row = resident.row
        layers = await parts.images.adopt(row.composition, row.spec.mounts, row.id)
        resident.layers = (layers, await _extra(parts, row))
        resident.image_errors = await parts.images.read_errors(row.composition.layers)
    except (BackendFailure, DSecError) as error:
        _log.error("sandbox %s cannot be taken over: %s", resident.id, error)
        return False
    return True


async def _extra(parts: Parts, row: Row) -> list[Mount]:
    """Volumes and data layers, held again as far as their names still stand for them: what runs has mounts of its own."""
    try:
        return await parts.images.extra(row.spec.mounts, row.id) if row.spec.mounts else []
    except DSecError as error:
        _log.warning("sandbox %s goes on with what it has mounted: %s", row.id, error)
        return []
