"""Neighbours: commands in one sandbox while another, held to half a core, does one kind of harm after another."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median

import dsec
from bench.arena import IMAGE, arena
from bench.figures import Figure, Report, machine, summary
from bench.peers.oci import Oci
from dsec.testing.node import Node

__all__ = ["STORMS", "run"]

CORES = 0.5
MEMORY_MB, DISK_MB, PIDS = 256, 256, 256
RISE_SECONDS = 2.0
SOURCE = Path(__file__).resolve().parents[1] / "tests/security/storm.c"
# What each storm runs, over and over. Loops in a shell, so that one that is killed by its own limit begins anew.
STORMS = {
    "forks": "storm forks 100000 hold",
    "threads": "storm threads 100000 hold",
    "files": "storm files 1000000 hold",
    "watches": "storm watches 100000 hold",
    "sockets": "storm sockets 10000 hold",
    "memory": "dd if=/dev/zero of=/dev/null bs=1024M count=1",
    "disk": "storm disk 3500; rm -f /tmp/full",
    "names": "storm names 1000000; rm -rf /tmp/n*",
    "grep": "grep -r nowhere /proc /sys /bin /etc",
    "sync": "echo x > /tmp/s; sync",
    "yes": "yes",
}
ROUNDS, QUICK_ROUNDS = 3, 1
SAMPLES = {"dsec": (600, 150), "crun": (120, 40)}

Sample = Callable[[], Awaitable[float]]


def shell(storm: str) -> list[str]:
    """The storm's command line; output only where that is the storm."""
    silence = "" if storm == "yes" else " >/dev/null 2>&1"
    return ["sh", "-c", f"while :; do {STORMS[storm]}; done{silence}"]


def add_program(root: Path) -> None:
    """Puts the storms' program, static, into a root file system, and the applets they need."""
    subprocess.run(["gcc", "-O1", "-static", "-pthread", "-o", root / "bin/storm", SOURCE], check=True)
    for applet in ("dd", "grep", "sync", "yes"):
        (root / "bin" / applet).symlink_to("busybox")


@asynccontextmanager
async def _ours(client: dsec.DSecClient, node: Node, storm: str) -> AsyncIterator[None]:
    """The storm in a sandbox of ours. Its output is read as fast as the server gives it, by a process of its own: what
    that costs the reader is not the measuring client's, as it would not be another tenant's."""
    args = dsec.DSecContainerRunArgs(
        container_image=IMAGE, cpu_cores_limit=CORES, memory_limit_mb=MEMORY_MB, disk_limit_mb=DISK_MB, pids_limit=PIDS
    )
    box = await client.run_container(args)
    reader = None
    try:
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dsec", "exec", box.id, "--", *shell(storm),
            env={**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.api_key}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        yield
    finally:
        if reader is not None:
            reader.kill()
            await reader.wait()
        await box.stop()


@asynccontextmanager
async def _theirs(peer: Oci, storm: str) -> AsyncIterator[None]:
    """The same in a container of the peer; its output goes to nobody."""
    await peer.attack(shell(storm), CORES, MEMORY_MB, PIDS)
    try:
        yield
    finally:
        await peer.relent()


async def _take(sample: Sample, count: int) -> list[float]:
    return [await sample() for _ in range(count)]


async def _round(
    attack: AbstractAsyncContextManager[None], sample: Sample, count: int
) -> tuple[list[float], list[float], float]:
    """Milliseconds of commands without the storm (half before it, half after), within it, and how long its end took."""
    calm = await _take(sample, count // 2)
    async with attack:
        await asyncio.sleep(RISE_SECONDS)  # the storm's time to rise, not a wait
        wild = await _take(sample, count)
        ended = time.perf_counter()
    took = time.perf_counter() - ended
    return calm + await _take(sample, count // 2), wild, took


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, index = machine(), int(quick)
    raw: dict[str, dict[str, list[dict[str, float]]]] = {}
    if shutil.which("gcc") is None:
        raise FileNotFoundError("gcc: apt-get install gcc")
    async with arena(quick, add_program) as ring:
        everyone = [ring.ours, *(peer for peer in ring.peers if peer.name == "crun")]
        missing = {name: why for name, why in ring.missing.items() if name == "crun"}
        for contender in everyone:
            await contender.open(1)
        async with dsec.DSecClient(url=ring.node.url, api_key=ring.node.api_key) as client:
            for _ in range(QUICK_ROUNDS if quick else ROUNDS):
                for storm in STORMS:
                    for contender in everyone:
                        attack = (
                            _theirs(contender, storm) if isinstance(contender, Oci) else _ours(client, ring.node, storm)
                        )
                        calm, wild, end = await _round(attack, contender.exec, SAMPLES[contender.name][index])
                        said = {
                            "calm_p99": summary(calm)["p99"],
                            "p99": summary(wild)["p99"],
                            "p50": summary(wild)["p50"],
                        }
                        said |= {"calm_p50": summary(calm)["p50"], "end_s": end, "load": os.getloadavg()[0]}
                        raw.setdefault(contender.name, {}).setdefault(storm, []).append(said)
    return Report(
        name="neighbours", machine=facts, figures=figures(raw), raw={**raw, "missing": missing}, quick=quick
    ), missing


def figures(raw: dict[str, dict[str, list[dict[str, float]]]]) -> list[Figure]:
    """Each storm's ratio, the median of its rounds, and the worst of them."""
    ratios = {
        name: {storm: median(r["p99"] / r["calm_p99"] for r in rounds) for storm, rounds in storms.items()}
        for name, storms in raw.items()
    }
    worst = {name: max(found.values()) for name, found in ratios.items()}
    stops = {name: max(r["end_s"] for rounds in storms.values() for r in rounds) for name, storms in raw.items()}
    each = [_figure(f"exec_p99_ratio_{storm}", {n: found[storm] for n, found in ratios.items()}) for storm in STORMS]
    return [_figure("worst_ratio", worst, goal=2), *each, _figure("slowest_stop_s", stops, unit="s", goal=2)]


def _figure(name: str, values: dict[str, float], unit: str = "x", goal: float | None = None) -> Figure:
    peers = {peer: value for peer, value in values.items() if peer != "dsec"}
    chief = next(iter(peers), None)
    return Figure(
        name=name, value=values["dsec"], unit=unit, goal=goal, peer=chief, peer_value=peers[chief] if chief else None, peers=peers
    )  # fmt: skip
