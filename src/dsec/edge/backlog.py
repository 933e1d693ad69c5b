"""Events that the journal had no room for: told from memory, and recorded as soon as it has room again."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dsec.edge.timers import Timers
from dsec.model.errors import DSecError
from dsec.ports.clock import Clock
from dsec.rules import lifecycle as table

__all__ = ["Backlog"]

_log = logging.getLogger("dsec.edge")

_AGAIN = 1.0


@dataclass(frozen=True)
class _Waiting:
    event: table.Event
    at: float
    write: Callable[[], None]


class Backlog:
    """Of each sandbox in their order. Bounded by the sandboxes there are: while the journal is full, none is made."""

    def __init__(self, timers: Timers, clock: Clock) -> None:
        self._timers = timers
        self._clock = clock
        self._waiting: dict[str, list[_Waiting]] = {}

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._waiting

    def add(self, sandbox_id: str, event: table.Event, at: float, write: Callable[[], None]) -> None:
        """Keeps an event of `at`; `write` records it."""
        if not self._waiting:
            self._timers.at(self._clock.now() + _AGAIN, self.flush)
        self._waiting.setdefault(sandbox_id, []).append(_Waiting(event, at, write))

    def events(self, sandbox_id: str) -> list[tuple[table.Event, float]]:
        """A sandbox's events that are not in the journal."""
        return [(each.event, each.at) for each in self._waiting.get(sandbox_id, ())]

    def flush(self) -> None:
        """Records what now can be."""
        try:
            for sandbox_id in tuple(self._waiting):
                waiting = self._waiting[sandbox_id]
                while waiting:
                    waiting[0].write()
                    del waiting[0]
                del self._waiting[sandbox_id]
        except DSecError as error:
            _log.error("%d sandboxes have events that are not in the journal: %s", len(self._waiting), error.detail)
            self._timers.at(self._clock.now() + _AGAIN, self.flush)
