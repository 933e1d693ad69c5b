"""Ends by time: activity moves a sandbox's idle end, and what is due is told to the machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from dsec.edge.journal import Journal
from dsec.edge.resident import Resident
from dsec.edge.timers import Timers
from dsec.ports.clock import Clock
from dsec.rules import lifecycle as table
from dsec.rules import ttl

__all__ = ["Expiry"]


class Expiry:
    """Sees to it that every sandbox's ends by time are kept. `feed`: takes a sandbox's event."""

    def __init__(
        self, journal: Journal, timers: Timers, clock: Clock, feed: Callable[[Resident, table.Event], None]
    ) -> None:
        self._journal = journal
        self._timers = timers
        self._clock = clock
        self._feed = feed
        self._dirty: dict[str, tuple[Resident, float]] = {}

    @contextmanager
    def active(self, resident: Resident) -> Iterator[None]:
        """A call or attached command is in the sandbox: its idle end waits, and moves when the last one leaves."""
        resident.busy += 1
        self._touch(resident)
        try:
            yield
        finally:
            resident.busy -= 1
            resident.last_active = self._touch(resident)
            if resident.busy == 0 and resident.armed is None:
                self.arm(resident)

    def _touch(self, resident: Resident) -> float:
        now = self._clock.now()
        if not self._dirty:
            self._timers.at(now + ttl.FLUSH_SECONDS, self.flush)
        self._dirty[resident.id] = (resident, now)
        return now

    def flush(self) -> None:
        """Records the activity not yet in the journal; of those in use, that they are."""
        times = [(ttl.ATTACHED if each.busy else at, each.id) for each, at in self._dirty.values()]
        self._dirty.clear()
        if times:
            self._journal.activity(times)

    def forget(self, resident: Resident) -> None:
        """It is gone."""
        self._dirty.pop(resident.id, None)

    def arm(self, resident: Resident) -> None:
        """Sees to it that the sandbox's next end by time is kept."""
        due = ttl.due(resident.deadlines(), self._is_busy(resident))
        if due is not None and (resident.armed is None or due < resident.armed):
            resident.armed = due
            self._timers.at(due, partial(self._due, resident, due))

    def _due(self, resident: Resident, when: float) -> None:
        if resident.armed != when:
            return
        resident.armed = None
        if resident.life.state not in (table.State.STARTING, table.State.RUNNING):
            return
        end = ttl.verdict(resident.deadlines(), self._is_busy(resident), self._clock.now())
        if end is not None:
            self._feed(resident, table.Expired(end))
        else:
            self.arm(resident)

    @staticmethod
    def _is_busy(resident: Resident) -> bool:
        return resident.busy > 0 or resident.life.state is table.State.STARTING
