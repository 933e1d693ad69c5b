"""Burst: many distinct large images that a node has never seen, started at once; then the same again with everything cached."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dsec
from bench.figures import Figure, Report, machine, summary
from bench.lazy import JSON, first_output, fresh_node, layer_bytes, stocked
from bench.peers.dockerd import Dockerd, dockerd, missing_programs
from bench.peers.dockerimage import gzipped, push
from bench.realimages import RealImage, real_images, root_of
from dsec.testing.node import Node

__all__ = ["run"]

IMAGES, QUICK_IMAGES, DOCKER_IMAGES = 64, 16, 16
GIB = 2**30


def chosen(count: int) -> list[RealImage]:
    """Images with a Python in them: those of the table, then, as there are no more, the same with a layer of their own each."""
    able = [image for image in real_images() if "python3" in image.packages]
    return [able[number % len(able)].variant(number // len(able)) for number in range(count)]


async def _all(node: Node, images: Sequence[RealImage]) -> tuple[float, list[float]]:
    """Seconds until the last first output, and those of each."""
    async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
        await client.open()

        async def one(image: RealImage) -> float:
            async with first_output(client, image.known_as, memory_mb=256) as (seconds, _):
                return seconds

        begin = time.perf_counter()
        each = await asyncio.gather(*(one(image) for image in images))
        return time.perf_counter() - begin, each


async def _ours(cache: Path, images: Sequence[RealImage]) -> dict[str, Any]:
    with fresh_node(cache, cache / "store") as node:
        return await _twice(node, images)


async def _twice(node: Node, images: Sequence[RealImage]) -> dict[str, Any]:
    cold, each = await _all(node, images)
    held = await asyncio.to_thread(layer_bytes, node)
    cached = min([(await _all(node, images))[0] for _ in range(2)])
    return {"cold_s": cold, "cached_s": cached, "each": summary(each), **held}


def _docker(cache: Path, images: Sequence[RealImage]) -> dict[str, float]:
    """The same images at once by docker: seconds until the last first output, and bytes that it then holds."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as folder, dockerd(Path(folder, "docker")) as daemon:
        references = [push(daemon, image.name, gzipped(root_of(image, cache), cache / "gzip")) for image in images]
        before, begin = daemon.bytes_on_disk(), time.perf_counter()
        with ThreadPoolExecutor(len(images)) as pool:
            list(pool.map(lambda reference: _pull_and_run(daemon, reference), references))
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "bytes": daemon.bytes_on_disk() - before}


def _pull_and_run(daemon: Dockerd, reference: str) -> None:
    daemon.pull(reference)
    daemon.first_output(daemon.start(reference, JSON))


async def run(quick: bool, cache: Path) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, images = machine(), chosen(QUICK_IMAGES if quick else IMAGES)
    await asyncio.to_thread(stocked, images, cache)
    files = await _ours(cache, images)
    reason = missing_programs()
    if (
        reason is None
        and shutil.disk_usage(cache).free
        < 3 * sum(root_of(image, cache).stat().st_size for image in images[:DOCKER_IMAGES]) * 3
    ):
        reason = "not enough room on the disk for its images"
    few = images[:DOCKER_IMAGES]
    docker = {} if reason else await asyncio.to_thread(_docker, cache, few)
    ours_each = (files["data"] + files["rest"]) / len(images)
    figures = [
        Figure(name="time_over_cached", value=files["cold_s"] / files["cached_s"], unit="x", goal=4),
        Figure(name="cold_s", value=files["cold_s"], unit="s", peers={"docker": docker["seconds"]} if docker else {}),
        Figure(name="bytes_an_image_mb", value=ours_each / 1e6, unit="MB", peers={"docker": docker["bytes"] / len(few) / 1e6} if docker else {}),
    ]  # fmt: skip
    if docker:
        figures.append(
            Figure(name="bytes_over_docker", value=ours_each / (docker["bytes"] / len(few)), unit="x", goal=0.1)
        )
    raw = {"images": [image.known_as for image in images], "files": files, "docker": docker}
    return Report(name="burst", machine=facts, figures=figures, raw=raw, quick=quick), {
        "docker": reason
    } if reason else {}
