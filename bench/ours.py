"""Ours: through the SDK and the HTTP API, with the client on the same cores as the server."""

import asyncio
import time

import dsec
from dsec.model.network import NetworkRules
from dsec.testing.node import Node

__all__ = ["Ours"]


class Ours:
    """A contender on a running node; sandboxes of `image`, with network `rules` if there are any."""

    name = "dsec"

    def __init__(self, node: Node, image: str, rules: NetworkRules | None = None) -> None:
        self._client = dsec.DSecClient(url=node.url, api_key=node.api_key)
        self._args = dsec.DSecContainerRunArgs(
            container_image=image, memory_limit_mb=64, disk_limit_mb=64, pids_limit=64, network_rules=rules
        )
        self._boxes: list[dsec.Sandbox] = []
        self._phases: list[dict[str, float]] = []

    async def _first(self) -> dsec.Sandbox:
        box = await self._client.run_container(self._args, timeout=60)
        try:
            await box.exec(["true"], check=True)
        except BaseException:
            await box.stop()
            raise
        return box

    async def create(self) -> tuple[float, float]:
        begin = time.perf_counter()
        box = await self._first()
        made = time.perf_counter()
        await box.stop()
        self._phases.append(box.phases)
        return (made - begin) * 1000, (time.perf_counter() - made) * 1000

    def phases(self) -> list[dict[str, float]]:
        """Seconds of each phase of each create so far."""
        return self._phases

    async def burst(self, count: int, at_once: int) -> float:
        numbers = iter(range(count))

        async def worker() -> None:
            for _ in numbers:
                await (await self._first()).stop()

        return count / await _timed(worker, at_once)

    async def open(self, sandboxes: int) -> None:
        await self._client.open()
        for _ in range(sandboxes):
            self._boxes.append(await self._first())

    async def exec(self) -> float:
        begin = time.perf_counter()
        await self._boxes[0].exec(["true"], check=True)
        return (time.perf_counter() - begin) * 1000

    async def rate(self, count: int, at_once: int) -> float:
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await self._boxes[number % len(self._boxes)].exec(["true"], check=True)

        return count / await _timed(worker, at_once)

    async def close(self) -> None:
        for box in self._boxes:
            await box.stop()
        self._boxes = []
        await self._client.close()


async def _timed(worker: object, at_once: int) -> float:
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())  # type: ignore[operator]
    return time.perf_counter() - begin
