"""Sandboxes of a test, stopped at its end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import dsec

__all__ = ["Boxes", "eventually"]


class Boxes:
    """Makes sandboxes and stops them all at the end."""

    def __init__(self, client: dsec.DSecClient) -> None:
        self.client = client
        self.made: list[dsec.Sandbox] = []

    async def make(self, image: str = "box:1", **args: Any) -> dsec.Sandbox:
        given = {"memory_limit_mb": 128, "disk_limit_mb": 256, "pids_limit": 128, **args}
        box = await self.client.run_container(dsec.DSecContainerRunArgs(container_image=image, **given))
        self.made.append(box)
        return box

    async def close(self) -> None:
        await asyncio.gather(*(box.stop() for box in self.made))


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    """Asks until the answer is yes."""
    ends = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > ends:
            raise AssertionError(f"it did not come true within {seconds} s")
        await asyncio.sleep(0.05)
