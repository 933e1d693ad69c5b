"""Watcher: polls every edge and keeps what they said last (paper, layer 4). No durable state."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from dsec.model.settings import check_positive, setting
from dsec.ports.clock import Clock
from dsec.ports.cluster import Edge, EdgeStatus

__all__ = ["PollingWatcher", "WatcherSettings"]

_log = logging.getLogger("dsec.watcher")


@dataclass(frozen=True)
class WatcherSettings:
    """Settings of the watcher."""

    interval: float = setting(1.0, "seconds between two polls of every edge")
    deadline: float = setting(5.0, "seconds after which an edge that does not answer counts as unhealthy")

    def __post_init__(self) -> None:
        check_positive(self, "interval", "deadline")


class PollingWatcher:
    """The Watcher port. `run` polls until it is cancelled; an edge that fails keeps its last report, marked unhealthy."""

    def __init__(self, edges: Sequence[Edge], clock: Clock, settings: WatcherSettings) -> None:
        self._edges = tuple(edges)
        self._clock = clock
        self._settings = settings
        self._seen: dict[int, EdgeStatus] = {}
        self._asked: dict[int, float] = {}
        self._polling: asyncio.Lock = asyncio.Lock()
        self._rounds = 0

    def view(self) -> tuple[EdgeStatus, ...]:
        """The last report of each edge that has given one."""
        return tuple(self._seen.values())

    def asked(self, edge: int) -> float:
        """Monotonic seconds when the report in the view was asked for; 0.0 for an edge without one."""
        return self._asked.get(edge, 0.0)

    async def refresh(self) -> None:
        """Poll every edge once. A call that comes while a poll waits its turn shares that poll's answer."""
        wanted = self._rounds + 1 + self._polling.locked()
        async with self._polling:
            if self._rounds >= wanted:
                return
            async with asyncio.TaskGroup() as group:
                for edge in self._edges:
                    group.create_task(self._poll(edge))
            self._rounds += 1

    async def _poll(self, edge: Edge) -> None:
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._settings.deadline):
                status = await edge.status()
        except Exception as error:  # noqa: BLE001 - whatever an edge does, the others are still watched
            _log.warning("edge %d does not answer: %r", edge.number, error)
            last = self._seen.get(edge.number)
            if last is not None:
                self._seen[edge.number] = structs.replace(last, healthy=False)
            return
        self._asked[edge.number] = began
        self._seen[edge.number] = status

    async def run(self) -> None:
        """Poll for ever, at the interval."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._settings.interval)
