"""The edge's long-lived tasks: one task group, in which a failure is an incident in the log and not the end of the others."""

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from dsec.ports.clock import Clock

__all__ = ["TaskSet"]

_log = logging.getLogger("dsec.edge")


class TaskSet:
    """Enter it before spawning; leaving it cancels what still runs and waits for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await self._group.__aexit__(None, None, None)  # an error of the body goes on as it is, not wrapped in a group

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work`; cancel the task returned to give it up."""
        task = self._group.create_task(self._guarded(work, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the others go on; the failure is told by its incident
            _log.error("incident %s in %s", self._clock.random(8).hex(), name, exc_info=error)
