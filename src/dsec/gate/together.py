"""Tasks that live and end together, with one error out of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dsec.gate.refusal import Refused

__all__ = ["together"]


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the error of one task as it is: a Refused before others, else the first."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        leaves = _leaves(errors)
        raise next((error for error in leaves if isinstance(error, Refused)), leaves[0]) from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
