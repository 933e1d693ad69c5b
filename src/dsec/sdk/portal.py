"""An event loop in a thread of its own, on which the blocking client runs the asynchronous one."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from dsec.model.errors import InvalidArgument

__all__ = ["Portal"]

T = TypeVar("T")
_CANCEL_TIME = 5.0


class Portal:
    """One thread, one event loop. Calls may come from any thread of the process that started it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    def start(self) -> None:
        """Start the loop; does nothing where it runs."""
        if self._loop is not None:
            return
        loop = asyncio.new_event_loop()
        # a daemon: a client that nobody closed must not keep its interpreter alive
        thread = threading.Thread(target=loop.run_forever, name="dsec-client", daemon=True)
        thread.start()
        self._loop, self._thread, self._process = loop, thread, os.getpid()

    def stop(self) -> None:
        """Stop the loop and end the thread; may be called again. Nothing may be running on it."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None or self._process != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result(_CANCEL_TIME)
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(_CANCEL_TIME)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    @property
    def running(self) -> bool:
        """True where calls can be made from this process."""
        return self._loop is not None and self._process == os.getpid()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run one call and wait for its result. Interrupting the wait (KeyboardInterrupt) cancels the call and waits until
        it has let go, at most 5 s. Raises InvalidArgument where the client is not open or was opened before a fork."""
        loop = self._loop
        if loop is None or self._process != os.getpid():
            call.close()
            reason = (
                "opened in another process: make a client after the fork"
                if loop
                else "not open: call open(), or use `with`"
            )
            raise InvalidArgument(f"the client is {reason}", field="client")
        ended = threading.Event()

        async def marked() -> T:
            try:
                return await call
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(marked(), loop)
        try:
            return future.result()
        finally:
            if not future.done():
                future.cancel()
                ended.wait(_CANCEL_TIME)

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator, one call each; leaving the loop early closes it."""

        async def step() -> T:
            return await anext(source)

        async def close() -> None:
            if isinstance(source, AsyncGenerator):
                await source.aclose()

        try:
            while True:
                try:
                    item = self.run(step())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._loop is not None:
                self.run(close())

    async def feed(self, items: Iterable[T]) -> AsyncIterator[T]:
        """The items of an ordinary iterable, each taken in a worker thread."""
        source = iter(items)
        end = object()
        while True:
            item: Any = await asyncio.to_thread(next, source, end)
            if item is end:
                return
            yield item
