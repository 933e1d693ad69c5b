"""Does the aether of a sandbox still answer? A process that lives may be stuck, and then no call in its sandbox ever ends."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dsec.edge.resident import Resident
from dsec.model.aether import VERSION, HelloReply, HelloRequest
from dsec.model.errors import DSecError
from dsec.model.outcome import End
from dsec.model.settings import check_positive, setting
from dsec.rules import lifecycle as table

__all__ = ["Pulse", "PulseSettings", "answers"]

_log = logging.getLogger("dsec.edge")

_AT_ONCE = 16
_MISSES = 2
_CROWDED = 256
"""Calls in one sandbox from which on its aether may have no place for one more connection: then silence says nothing."""


@dataclass(frozen=True)
class PulseSettings:
    """Settings of the look at sandboxes in use."""

    interval: float = setting(15.0, "seconds between two looks whether the sandboxes in use still answer")
    patience: float = setting(10.0, "seconds that a sandbox has to answer; after two misses in a row it is ended")

    def __post_init__(self) -> None:
        check_positive(self, "interval", "patience")


async def answers(resident: Resident, patience: float) -> bool:
    """Whether its aether answers a new connection within `patience` seconds."""
    if resident.agent is None:
        return False
    try:
        async with asyncio.timeout(patience):
            return isinstance(await resident.agent.call(HelloRequest(version=VERSION)), HelloReply)
    except (DSecError, OSError, TimeoutError) as error:
        _log.info("sandbox %s: no answer: %s", resident.id, error or type(error).__name__)
        return False


class Pulse:
    """Looks at sandboxes in use, and at those on which a connection broke, and ends what does not answer.

    `living`: the sandboxes. `feed`: takes a sandbox's event."""

    def __init__(
        self,
        living: Callable[[], list[Resident]],
        feed: Callable[[Resident, table.Event], None],
        settings: PulseSettings,
    ) -> None:
        self._living = living
        self._feed = feed
        self._settings = settings

    async def run(self) -> None:
        """Looks at the interval, until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.interval)
            await self.round()

    async def round(self) -> None:
        """One look at each sandbox in use, some at once."""
        wanted = [each for each in self._living() if each.doubted or 0 < each.busy <= _CROWDED]
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(resident: Resident) -> None:
            async with slots:
                await self.look(resident)

        async with asyncio.TaskGroup() as group:
            for resident in wanted:
                group.create_task(one(resident))

    async def look(self, resident: Resident) -> None:
        """Ends the sandbox where it missed its answer twice in a row."""
        incarnation = resident.life.incarnation
        if resident.life.state is not table.State.RUNNING:
            return
        if await answers(resident, self._settings.patience):
            resident.misses, resident.doubted = 0, False
            return
        resident.misses += 1
        if resident.misses >= _MISSES:
            _log.error("sandbox %s: aether lives and does not answer; it is ended", resident.id)
            self._feed(resident, table.Died(incarnation, End.RUNTIME, "aether does not answer"))
