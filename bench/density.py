"""Density: many idle sandboxes alive at once, what each costs, how commands and creation fare among them, and the end of all."""

import asyncio
import itertools
import os
import random
import time
from hashlib import sha256

from msgspec import Struct

import dsec
from bench.arena import IMAGE, arena
from bench.figures import Figure, Report, machine, summary
from bench.footprint import Footprint, cpu_seconds, left_of

__all__ = ["run"]

AT_ONCE = 16
JOB = "density"
COUNT, QUICK_COUNT = 3200, 400
PEER_COUNT, PEER_QUICK = 100, 25
EXECS, QUICK_EXECS = 1000, 400
PARTS = 10
STILL_SECONDS = 3.0
STILL_BYTES = 4 << 20


class Ramp(Struct):
    """The sandboxes, when each was ready (seconds from the start) and what its creation took by phase."""

    boxes: list[dsec.Sandbox]
    ready: list[float]
    failed: int

    def rates(self) -> list[float]:
        """Creations a second in each tenth of the ramp."""
        size = max(1, len(self.ready) // PARTS)
        edges = [0.0, *self.ready[size - 1 :: size]]
        return [size / (after - before) for before, after in itertools.pairwise(edges)]

    def phases(self) -> list[dict[str, float]]:
        """Median milliseconds of each phase, for the first and the last tenth."""
        size = max(1, len(self.boxes) // PARTS)
        return [
            {key: summary([box.phases.get(key, 0.0) * 1000 for box in part])["p50"] for key in part[0].phases}
            for part in (self.boxes[:size], self.boxes[-size:])
        ]


async def _ramp(client: dsec.DSecClient, count: int) -> Ramp:
    args = dsec.DSecContainerRunArgs(
        container_image=IMAGE, memory_limit_mb=64, disk_limit_mb=64, pids_limit=64, ttl_running_stop=None, job=JOB
    )
    ramp = Ramp([], [], 0)
    begin = time.perf_counter()
    async for box in client.run_containers(args, count, window=AT_ONCE):
        if isinstance(box, dsec.Sandbox):
            ramp.boxes.append(box)
            ramp.ready.append(time.perf_counter() - begin)
        else:
            ramp.failed += 1
    return ramp


async def _exec_ms(boxes: list[dsec.Sandbox], count: int) -> list[float]:
    """One command at a time, each in some other sandbox."""
    chosen = random.Random(1).choices(boxes, k=count)
    took = []
    for box in chosen:
        begin = time.perf_counter()
        await box.exec(["true"], check=True)
        took.append((time.perf_counter() - begin) * 1000)
    return took


async def _idle_cpu(pid: int) -> float:
    """Percent of one core that the server takes while nobody asks anything of it."""
    before = cpu_seconds(pid)
    await asyncio.sleep(STILL_SECONDS)  # a time to measure over, not a wait
    return (cpu_seconds(pid) - before) / STILL_SECONDS * 100


async def _peers(quick: bool) -> dict[str, dict[str, float]]:
    """The same for the others, with fewer: memory and creations a second. They are gone before ours begin."""
    found, count = {}, PEER_QUICK if quick else PEER_COUNT
    async with arena(quick) as ring:
        for peer in ring.peers:
            before, begin = Footprint.now(ring.node.pid), time.perf_counter()
            await peer.open(count)
            rate = count / (time.perf_counter() - begin)
            grown = Footprint.now(ring.node.pid).grown(before) / 2**20 / count
            found[peer.name] = {"create_per_s": rate, "idle_mib_each": grown, "count": count}
    await _settled()
    return found


async def _settled() -> None:
    """Returns when the kernel has freed what others left, as far as that shows in ten seconds."""
    free = 0
    for _ in range(10):
        before, free = free, Footprint.now(os.getpid()).available
        if free - before < STILL_BYTES:
            return
        await asyncio.sleep(1.0)  # the kernel announces no such moment


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    count, execs = (QUICK_COUNT, QUICK_EXECS) if quick else (COUNT, EXECS)
    facts, peers = machine(), await _peers(quick)
    async with arena(quick) as ring:
        node, missing = ring.node, ring.missing
        groups = "dsec-" + sha256(str(node.state).encode()).hexdigest()[:8]
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            await (await client.run_container(dsec.DSecContainerRunArgs(container_image=IMAGE))).stop()
            resting, files = left_of(node, groups), len(os.listdir(f"/proc/{node.pid}/fd"))
            before = Footprint.now(node.pid)
            ramp = await _ramp(client, count)
            idle_cpu = await _idle_cpu(node.pid)
            dense = Footprint.now(node.pid)
            took = await _exec_ms(ramp.boxes, execs)
            alive = len(await client.sandboxes(job=JOB, state="running"))
            dense_files = len(os.listdir(f"/proc/{node.pid}/fd"))
            begin = time.perf_counter()
            await client.stop_many(job=JOB)
            stop_seconds = time.perf_counter() - begin
            left = left_of(node, groups)
    rates = ramp.rates()
    figures = [
        Figure(name="alive", value=alive, unit="sandboxes", goal=count, better="higher"),
        _with_peers("idle_mib_each", dense.grown(before) / 2**20 / max(alive, 1), "MiB", 1.5, peers),
        Figure(name="exec_p99_ms_at_density", value=summary(took)["p99"], unit="ms", goal=25),
        Figure(name="lost", value=len(ramp.boxes) + ramp.failed - alive, unit="sandboxes", goal=0),
        Figure(name="stop_all_s", value=stop_seconds, unit="s", goal=30),
        Figure(name="left_behind", value=sum(left[kind] - resting[kind] for kind in left), unit="objects", goal=0),
        _with_peers("create_per_s_last_tenth", rates[-1], "1/s", rates[0] / 2, peers, "create_per_s", "higher"),
        Figure(name="create_per_s_first_tenth", value=rates[0], unit="1/s", better="higher"),
        Figure(name="idle_cpu_percent", value=idle_cpu, unit="% of a core"),
    ]
    raw = {
        "create_per_s_by_tenth": rates, "phases_ms_first_last": ramp.phases(), "exec_ms": summary(took), "left": left,
        "kib_each": dense.by_part(before, max(alive, 1)), "server_files": [files, dense_files], "peers": peers,
        "ramp_s": ramp.ready[-1], "failed": ramp.failed, "missing": missing,
    }  # fmt: skip
    return Report(name="density", machine=facts, figures=figures, raw=raw, quick=quick), missing


def _with_peers(
    name: str,
    value: float,
    unit: str,
    goal: float,
    peers: dict[str, dict[str, float]],
    key: str | None = None,
    better: str = "lower",
) -> Figure:
    theirs = {peer: said[key or name] for peer, said in peers.items()}
    chief = "docker-api" if "docker-api" in theirs else next(iter(theirs), None)
    return Figure(
        name=name, value=value, unit=unit, goal=goal, better=better,
        peer=chief, peer_value=theirs[chief] if chief else None, peers=theirs,
    )  # fmt: skip
