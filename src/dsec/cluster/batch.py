"""Many creations of one spec, a bounded number at any moment, each told as soon as it is known."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from dsec.model.spec import Batch
from dsec.model.views import BatchItem

__all__ = ["run_batch"]


async def run_batch(
    batch: Batch, create: Callable[[int], Awaitable[BatchItem]], undo: Callable[[BatchItem], Awaitable[None]]
) -> AsyncIterator[BatchItem]:
    """The items of `batch` as they become ready, `batch.window` creations under way at most.

    `create` never raises but when it is cancelled. Closing the iterator cancels what is under way and passes what was made
    but not yielded to `undo`.
    """
    ready: asyncio.Queue[BatchItem] = asyncio.Queue(batch.window)
    indices = iter(range(batch.count))
    unsent: list[BatchItem] = []

    async def work() -> None:
        for index in indices:
            item = await create(index)
            unsent.append(item)
            await ready.put(item)
            unsent.remove(item)

    try:
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(min(batch.window, batch.count))]
            try:
                for _ in range(batch.count):
                    yield await ready.get()
            except (GeneratorExit, asyncio.CancelledError):
                for worker in workers:
                    worker.cancel()
                raise
    except* GeneratorExit:
        pass
    finally:
        while not ready.empty():
            unsent.append(ready.get_nowait())
        for item in unsent:
            await undo(item)
