"""Commits: a sandbox with changed files, until one made of it answers; 50 MB and 1,000 MB in 200 files each. Peer: docker commit."""

import asyncio
import contextlib
import io
import statistics
import tarfile
import tempfile
import time
from pathlib import Path

from msgspec import Struct

import dsec
from bench.figures import Figure, Report, machine
from bench.peers.dockerd import Dockerd, dockerd, missing_programs
from bench.rootfs import make_rootfs
from dsec.testing.node import Node

__all__ = ["run"]

FILES = 200
ROUNDS, QUICK_ROUNDS = 5, 3
IMAGE = "bench-commit"


class Took(Struct, frozen=True):
    """Seconds of one commit, and until what was made of it answered; parts of it where they are told."""

    commit: float
    answered: float
    phases: dict[str, float] = {}


def change(megabytes: int) -> str:
    """A shell's text that writes so many MB (10^6 bytes) of what does not compress, in FILES files."""
    return f"for i in $(seq {FILES}); do dd if=/dev/urandom of=/w$i bs={megabytes * 1_000_000 // FILES} count=1 2>/dev/null || exit 1; done"


def rootfs(folder: Path) -> Path:
    """The benchmarks' root with what `change` needs."""
    root = make_rootfs(folder)
    for applet in ("dd", "seq"):
        (root / "bin" / applet).symlink_to("busybox")
    return root


async def ours(client: dsec.DSecClient, megabytes: int, number: int) -> Took:
    """One round of ours, through the SDK."""
    name = f"{IMAGE}-{megabytes}:{number}"
    args = dsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=4096)
    async with await client.run_container(args) as box:
        await box.run_shell(change(megabytes), check=True)
        begin = time.perf_counter()
        report = await box.commit(name)
        committed = time.perf_counter()
        async with await client.run_container(
            dsec.DSecContainerRunArgs(container_image=name, memory_limit_mb=256)
        ) as made:
            await made.exec(["true"], check=True)
            answered = time.perf_counter()
            if len([name for name in (await made.run_shell("ls /")).text.split() if name.startswith("w")]) != FILES:
                raise RuntimeError("the image does not hold what was changed")
    if report.bytes < megabytes * 1_000_000:
        raise RuntimeError(f"{report.bytes} bytes were kept of {megabytes} MB")
    return Took(committed - begin, answered - begin, report.phases)


def docker(daemon: Dockerd, megabytes: int, number: int) -> Took:
    """One round of docker, over its API."""
    tag = f"m{megabytes}-{number}"
    box = daemon.start(f"{IMAGE}:base", ["/bin/sleep", "86400"])
    try:
        daemon.exec(box, ["/bin/sh", "-c", change(megabytes)])
        begin = time.perf_counter()
        daemon.call("POST", f"/commit?container={box}&repo={IMAGE}&tag={tag}")
        committed = time.perf_counter()
        made = daemon.start(f"{IMAGE}:{tag}", ["/bin/sh", "-c", "echo ok"])
        daemon.first_output(made)
        answered = time.perf_counter()
        daemon.remove(made)
    finally:
        daemon.remove(box)
    daemon.forget(f"{IMAGE}:{tag}")
    return Took(committed - begin, answered - begin)


def packed(root: Path) -> bytes:
    """The root as a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(root, arcname=".")
    return out.getvalue()


async def rounds(quick: bool, reason: str | None) -> dict[str, list[Took]]:
    """All rounds, ours and docker's in turns, by "WHO-MEGABYTES"."""
    found: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        root = rootfs(folder / "rootfs")
        node = stack.enter_context(Node(folder / "state"))
        node.dsec("image", "import", IMAGE, str(root))
        daemon = stack.enter_context(dockerd(folder / "docker")) if reason is None else None
        if daemon is not None:
            daemon.take(IMAGE, "base", packed(root))
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            for megabytes, count in ((50, QUICK_ROUNDS if quick else ROUNDS), (1000, 1 if quick else 2)):
                for number in range(count):
                    found.setdefault(f"dsec-{megabytes}", []).append(await ours(client, megabytes, number))
                    if daemon is not None:
                        took = await asyncio.to_thread(docker, daemon, megabytes, number)
                        found.setdefault(f"docker-{megabytes}", []).append(took)
    return found


def middle(found: dict[str, list[Took]], who: str, megabytes: int) -> float | None:
    """The median until it answered, in seconds."""
    rounds = found.get(f"{who}-{megabytes}")
    return statistics.median(took.answered for took in rounds) if rounds else None


def figure(name: str, found: dict[str, list[Took]], megabytes: int, *, unit: str, goal: float) -> Figure:
    """One figure with its peer."""
    scale = 1000.0 if unit == "ms" else 1.0
    peer = middle(found, "docker", megabytes)
    peers = {} if peer is None else {"docker": peer * scale}
    return Figure(name=name, value=(middle(found, "dsec", megabytes) or 0.0) * scale, unit=unit, goal=goal, peers=peers)


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, reason = machine(), "left to the full run" if quick else missing_programs()
    found = await rounds(quick, reason)
    figures = [
        figure("commit_50mb_ms", found, 50, unit="ms", goal=300),
        figure("commit_1000mb_s", found, 1000, unit="s", goal=8),
    ]
    report = Report(name="commit", machine=facts, figures=figures, raw={"rounds": found, "files": FILES}, quick=quick)
    return report, {} if reason is None else {"docker": reason}
