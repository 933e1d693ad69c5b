"""Deadlines: a heap and one task that sleeps until the first of them."""

import asyncio
import heapq
import logging
from collections.abc import Callable

from dsec.ports.clock import Clock

__all__ = ["Timers"]

_log = logging.getLogger("dsec.edge")


class Timers:
    """Calls functions when the Unix time of the clock comes. An entry is not taken back: its function looks whether it still
    has something to do. `poke` makes the task look at the clock again (a virtual clock's `advance` calls it)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._changed = asyncio.Event()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call` at `when` (Unix seconds), at once if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call))
        if self._heap[0][1] == self._count:
            self._changed.set()

    def poke(self) -> None:
        """Looks at the clock again."""
        self._changed.set()

    async def run(self) -> None:
        """The task; until it is cancelled."""
        while True:
            self._changed.clear()
            self._fire()
            wait = self._heap[0][0] - self._clock.now() if self._heap else None
            if wait is not None and wait <= 0:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(None if wait is None else min(wait, 3600.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _fire(self) -> None:
        now = self._clock.now()
        while self._heap and self._heap[0][0] <= now:
            call = heapq.heappop(self._heap)[2]
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the other deadlines must still be kept
                _log.error("incident %s in a deadline", self._clock.random(8).hex(), exc_info=error)
