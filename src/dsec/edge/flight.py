"""An operation under way, and those who wait for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from dsec.edge.tasks import TaskSet

__all__ = ["Flight"]


class Flight:
    """An operation under way and those who wait for it; `given_up`: they want no more of it. When the last has left it may be joined again for the grace time."""

    def __init__(self, tasks: TaskSet, grace: float) -> None:
        self._tasks = tasks
        self._grace = grace
        self._waiting = 1
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.given_up = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts the work."""
        self._task = self._tasks.spawn(work, name)
        self._task.add_done_callback(lambda _: self.end())

    def end(self) -> None:
        """The work is over."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.done.done():
            self.done.set_result(None)

    def joined(self) -> None:
        """One more waits."""
        self._waiting += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def left(self) -> None:
        """One less waits."""
        self._waiting -= 1
        if self._waiting == 0 and not self.done.done() and self._task is not None:
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._abandon, self._task)

    def _abandon(self, task: asyncio.Task[None]) -> None:
        self.given_up = True
        task.cancel()

    async def give_up(self) -> None:
        """Cancels the work without its grace time; returns when it is over."""
        self.given_up = True
        if self._task is not None:
            self._task.cancel()
        await asyncio.shield(self.done)
