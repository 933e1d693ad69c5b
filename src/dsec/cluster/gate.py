"""The bounded queue of creations: so many under way, so many waiting, and a typed Busy for the rest. Never a hang."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dsec.model.errors import Busy

__all__ = ["CreationGate"]


class CreationGate:
    """At most `running` inside, at most `waiting` before it, each for at most `patience` seconds."""

    def __init__(self, running: int, waiting: int, patience: float, retry_after: float) -> None:
        self._free = asyncio.Semaphore(running)
        self._most = waiting
        self._patience = patience
        self._retry_after = retry_after
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """A place inside, for the length of the context. Raises Busy, with `retry_after`, when the queue is full or too slow."""
        if self._free.locked():
            await self._wait()
        else:
            await self._free.acquire()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()

    async def _wait(self) -> None:
        if self.waiting >= self._most:
            raise Busy("too many creations are waiting", retry_after=self._retry_after)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError as error:
            raise Busy("the creation waited too long for its turn", retry_after=self._retry_after) from error
        finally:
            self.waiting -= 1
