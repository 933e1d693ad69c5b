"""A sandbox's changes as of one moment: a read-only copy of its writable layer, for as long as it is looked at."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.edge.backends.handle import failure_of
from dsec.kernel.errors import KernelError
from dsec.kernel.pool import Pool
from dsec.model.plan import Aftermath

__all__ = ["frozen_changes"]


@asynccontextmanager
async def frozen_changes(pool: Pool, name: str, copy: str, workers: ThreadPoolExecutor) -> AsyncIterator[str]:
    """The directory of the copy `copy` of the writable layer `name`: no process is stopped for it, and none can change what is read.

    Who is cancelled, even while it is being made, leaves nothing behind. Raises BackendFailure.
    """
    taking = workers.submit(pool.freeze, name, copy)
    try:
        try:
            # Shielded: once asked for, it is made, and what is made is undone below.
            directory = await asyncio.shield(asyncio.wrap_future(taking))
        except KernelError as error:
            raise failure_of(error, Aftermath.UNDONE) from error
        yield str(directory)
    finally:
        await asyncio.shield(asyncio.wrap_future(workers.submit(_undo, taking, pool, copy)))


def _undo(taking: Future[Path], pool: Pool, copy: str) -> None:
    wait([taking])
    pool.thaw(copy)
