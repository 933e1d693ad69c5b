"""Sandboxes of a test that knows the SDK alone, stopped at its end."""

import asyncio
from typing import Any

import dsec
from dsec.testing.suite.boxes import eventually

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
