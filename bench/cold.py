"""Cold: the first output of a program from an image that a node has never seen, its store on loopback."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dsec
from bench.figures import Figure, Report, machine, summary
from bench.lazy import JSON, first_output, fresh_node, layer_bytes, stocked
from bench.peers.dockerd import Dockerd, dockerd, missing_programs
from bench.peers.dockerimage import gzipped, push
from bench.realimages import RealImage, named, root_of
from bench.resident import resident_bytes
from dsec.images.mounts import mounted_below

__all__ = ["run"]

IMAGE, QUICK_IMAGE = "python-science", "python-bookworm"
ROUNDS, QUICK_ROUNDS, DOCKER_ROUNDS = 7, 3, 3


async def _round(cache: Path, store: Path, image: RealImage) -> dict[str, Any]:
    """One node that has never seen the image."""
    name = image.known_as
    with fresh_node(cache, store) as node:
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            await client.open()
            async with first_output(client, name) as (cold, box):
                touched = sum(resident_bytes(mount) for mount in mounted_below(node.state.resolve() / "mnt"))
                held, phases = layer_bytes(node), box.phases
            async with first_output(client, name) as (warm, _):
                pass
    return {"cold_s": cold, "warm_s": warm, "touched": touched, **held, "phases": phases}


def _docker_round(daemon: Dockerd, reference: str) -> tuple[float, int]:
    before, begin = daemon.bytes_on_disk(), time.perf_counter()
    daemon.pull(reference)
    name = daemon.start(reference, JSON)
    daemon.first_output(name)
    seconds = time.perf_counter() - begin
    written = daemon.bytes_on_disk() - before
    daemon.remove(name)
    daemon.forget(reference)
    return seconds, written


def docker_pulls(cache: Path, image: RealImage, rounds: int) -> list[tuple[float, int]]:
    """Seconds until docker's first output of an image that it has to pull, and the bytes that it then holds; each round anew."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as folder, dockerd(Path(folder, "docker")) as daemon:
        reference = push(daemon, image.name, gzipped(root_of(image, cache), cache / "gzip"))
        return [_docker_round(daemon, reference) for _ in range(rounds)]


def _middle(rounds: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(one[name] for one in rounds))


async def run(quick: bool, cache: Path) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, image = machine(), named(QUICK_IMAGE if quick else IMAGE)
    store = await asyncio.to_thread(stocked, [image], cache)
    files = [await _round(cache, store, image) for _ in range(QUICK_ROUNDS if quick else ROUNDS)]
    reason = missing_programs()
    pulls = [] if reason else await asyncio.to_thread(docker_pulls, cache, image, 1 if quick else DOCKER_ROUNDS)
    docker = {"docker": statistics.median(one[0] for one in pulls)} if pulls else {}
    docker_mb = {"docker": statistics.median(one[1] for one in pulls) / 1e6} if pulls else {}
    touched, data, rest = _middle(files, "touched"), _middle(files, "data"), _middle(files, "rest")
    figures = [
        Figure(name="cold_first_output_s", value=_middle(files, "cold_s"), unit="s", goal=0.3, peers=docker),
        Figure(name="warm_first_output_s", value=_middle(files, "warm_s"), unit="s"),
        Figure(name="bytes_written_per_byte_touched", value=data / touched, unit="", goal=1.1),
        Figure(name="written_with_metadata_mb", value=(data + rest) / 1e6, unit="MB", peers=docker_mb),
        Figure(name="share_of_image_read", value=data / _middle(files, "size"), unit=""),
    ]  # fmt: skip
    raw = {
        "image": image.name,
        "files": files,
        "docker": pulls,
        "cold": summary([one["cold_s"] for one in files]),
    }
    return Report(name="cold", machine=facts, figures=figures, raw=raw, quick=quick), {
        "docker": reason
    } if reason else {}
