"""Warm read: the files of an image that is on the node, read in a sandbox, against the same files on ext4 and in docker's overlay2.

Every round reads them in turns: from the disk, after the page cache has been told to forget them, and then from the page cache.
"""

import asyncio
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench import resident
from bench.figures import Figure, Report, machine
from bench.peers.dockerd import Dockerd, dockerd, missing_programs
from bench.peers.dockerimage import gzipped, push
from bench.peers.groups import equal_share
from bench.realimages import RealImage, named, root_of
from dsec.testing.node import Node

__all__ = ["run"]

IMAGE, QUICK_IMAGE = "python-science", "python-trixie"
ROUNDS, QUICK_ROUNDS = 15, 7
READER = Path(__file__).with_name("reader.py")
WAYS = ("disk", "cached", "large")
Reader = Callable[[str], list[float]]


def _numbers(said: str) -> list[float]:
    return [float(word) for word in said.split()]


def on_host(root: Path, group: Path) -> Reader:
    """The reader on a folder of the host, as its root, in a CPU group."""
    enter = f'echo $$ >{group}/cgroup.procs && exec "$@"'

    def read(word: str) -> list[float]:
        words = ["sh", "-c", enter, "sh", "chroot", str(root), "python3", "-c", READER.read_text(), word]
        return _numbers(subprocess.run(words, check=True, capture_output=True, text=True, timeout=600).stdout)

    return read


def in_docker(daemon: Dockerd, name: str) -> Reader:
    """The reader in a running container."""
    return lambda word: _numbers(daemon.exec(name, ["python3", "-c", READER.read_text(), word]).decode())


def in_sandbox(node: Node, box: str, datas: list[Path]) -> Reader:
    """The reader in a running sandbox; `datas`: what its layers' contents lie in, for the page cache has those too."""

    def read(word: str) -> list[float]:
        said = _numbers(node.dsec("exec", box, "--", "python3", "-c", READER.read_text(), word))
        if word == "evict":
            for data in datas:
                resident.evict(data)
        return said

    return read


def rounds(readers: dict[str, Reader], count: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each reading, by reader and way; the readers take turns, and begin in another order each time."""
    seen: dict[str, dict[str, list[float]]] = {name: {way: [] for way in (*WAYS, "work")} for name in readers}
    order = list(readers)
    for _ in range(count):
        order = order[1:] + order[:1]
        for name in order:
            read = readers[name]
            read("evict")
            seen[name]["disk"].append(read("read")[0])
        for name in order:
            again = readers[name]("read")
            seen[name]["cached"].append(again[0])
            seen[name]["work"].append(again[2])
            seen[name]["large"].append(readers[name]("large")[0])
    return seen


def slower(seen: dict[str, dict[str, list[float]]], name: str, way: str) -> float:
    """How many times as long as on ext4: the median over the rounds of each round's ratio."""
    return statistics.median(one / other for one, other in zip(seen[name][way], seen["ext4"][way], strict=True))


def unpacked(image: RealImage, cache: Path, folder: Path) -> Path:
    """The root's files in a folder on the disk's own file system."""
    folder.mkdir()
    subprocess.run(
        ["tar", "-I", "zstd", "-xpf", str(root_of(image, cache)), "-C", str(folder)], check=True, timeout=1800
    )
    return folder


def measure(image: RealImage, cache: Path, count: int, docker: bool) -> dict[str, dict[str, list[float]]]:
    """All readings."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=cache)))
        node = stack.enter_context(Node(folder / "state"))
        node.dsec("image", "import", image.known_as, str(root_of(image, cache)), timeout=1800)
        box = node.dsec("run", "--image", image.known_as, "--ttl", "0").strip()
        datas = [path / "data" for path in (node.state / "layers").iterdir() if (path / "data").is_file()]
        group = stack.enter_context(equal_share(f"dsec-bench-ext4-{os.getpid()}"))
        readers = {
            "dsec": in_sandbox(node, box, datas),
            "ext4": on_host(unpacked(image, cache, folder / "root"), group),
        }
        if docker:
            daemon = stack.enter_context(dockerd(folder / "docker"))
            reference = push(daemon, image.name, gzipped(root_of(image, cache), cache / "gzip"))
            daemon.pull(reference)
            readers["docker"] = in_docker(daemon, daemon.start(reference, ["sleep", "86400"]))
        return rounds(readers, count)


async def run(quick: bool, cache: Path) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, reason = machine(), "left to the full run" if quick else missing_programs()
    image, count = (named(QUICK_IMAGE), QUICK_ROUNDS) if quick else (named(IMAGE), ROUNDS)
    seen = await asyncio.to_thread(measure, image, cache, count, reason is None)
    peers = [name for name in seen if name not in ("dsec", "ext4")]
    figures = [
        Figure(
            name=name, value=slower(seen, "dsec", way), unit="x", goal=goal, peers={peer: slower(seen, peer, way) for peer in peers}
        )
        for name, way, goal in (
            ("slowdown_over_ext4", "disk", 1.03), ("slowdown_over_ext4_cached", "cached", None),
            ("slowdown_over_ext4_cached_large_files", "large", 1.03), ("slowdown_over_ext4_cached_work", "work", None),
        )
    ]  # fmt: skip
    raw = {"image": image.name, "seconds": seen}
    return Report(name="warm-read", machine=facts, figures=figures, raw=raw, quick=quick), {
        "docker": reason
    } if reason else {}
