"""`python -m dsec.testing.chaos --kills N`: a node under load is killed at random moments, and held to what it said. Needs root.

Load: sandboxes are created, used, renewed, stopped and left to end by their time, several at once. After each kill `dsec up`
comes back and `Witness.verify` looks. What is random comes from the seed, which is printed; the moments of the kills
themselves are the machine's too, so a seed brings back the kind of a run and not each of its instants.
"""

import argparse
import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import dsec
from dsec.kernel.clock import SystemClock
from dsec.model.errors import DSecError, SandboxLost, Unavailable
from dsec.testing.node import Node
from dsec.testing.witness import Subject, Witness

__all__ = ["SETTINGS", "kill_often", "load", "until_death"]

_log = logging.getLogger("dsec.testing")

SETTINGS = {
    "DSEC_CONTAINER_POOL_BYTES": str(1 << 30),
    "DSEC_CONTAINER_AHEAD_LOW": "2",
    "DSEC_CONTAINER_AHEAD_HIGH": "4",
    "DSEC_EDGE_COMPACT_INTERVAL": "0.5",
    "DSEC_LIFECYCLE_MEMORY_RESERVE_MB": "64",
}
_WORKERS = 4
_LIVING = 6


async def until_death(node: Node, work: Coroutine[Any, Any, None]) -> bool:
    """Does `work` until it is over or the node's server has died; True if it died. Raises what the work raised otherwise."""
    loop = asyncio.get_running_loop()
    process = os.pidfd_open(node.pid)
    dead = asyncio.Event()
    loop.add_reader(process, dead.set)
    try:
        doing, dying = loop.create_task(work), loop.create_task(dead.wait())
        await asyncio.wait((doing, dying), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            dying.cancel()
            if _raised_by_death(doing.exception()) is None:
                return False
            async with asyncio.timeout(10):  # an answer breaks a little before the process is gone
                await dead.wait()
            return True
        doing.cancel()
        try:
            await doing
        except asyncio.CancelledError:
            return True
        except (DSecError, ExceptionGroup) as error:
            _raised_by_death(error)
        return True
    finally:
        loop.remove_reader(process)
        os.close(process)


def _raised_by_death(error: BaseException | None) -> BaseException | None:
    """The error, if all of it is what a client sees of a server that dies; raised otherwise."""
    if error is None or isinstance(error, Unavailable):
        return error
    if isinstance(error, ExceptionGroup) and error.split(Unavailable)[1] is None:
        return error
    raise error


async def load(witness: Witness, client: dsec.DSecClient) -> None:
    """Works on the node until it is cancelled or the node breaks."""
    async with asyncio.TaskGroup() as group:
        for subject in list(witness.subjects.values()):
            if subject.whole and subject.ends is None:
                group.create_task(_read(witness, subject))
        for _ in range(_WORKERS):
            group.create_task(_work(witness, client))


async def _read(witness: Witness, subject: Subject) -> None:
    try:
        await witness.read(subject)
    except SandboxLost:
        if not subject.stopping:
            raise


async def _work(witness: Witness, client: dsec.DSecClient) -> None:
    while True:
        await _one(witness, client)


async def _one(witness: Witness, client: dsec.DSecClient) -> None:
    draw = witness.random
    # One worker a sandbox, so that it is known in which order its files were written.
    usable = [s for s in witness.subjects.values() if s.whole and s.ends is None and not s.busy]
    if len(witness.subjects) < _LIVING and draw.random() < 0.5:
        more = {"ttl_absolute": draw.uniform(1.0, 4.0)} if draw.random() < 0.25 else {}
        await witness.create(client, **more)
        return
    if not usable:
        await asyncio.sleep(0)
        return
    subject = draw.choice(usable)
    subject.busy = True
    try:
        await _use(witness, subject, stop=len(witness.subjects) >= _LIVING - 1 and draw.random() < 0.15)
    except DSecError as error:
        error.add_note(f"in {subject.key}")
        raise
    subject.busy = False


async def _use(witness: Witness, subject: Subject, *, stop: bool) -> None:
    if stop:
        await witness.stop(subject)
        return
    deeds: list[Callable[[], Awaitable[object]]] = [
        lambda: witness.run(subject),
        lambda: witness.run(subject),
        lambda: witness.write(subject),
        lambda: witness.box(subject).renew(300.0),
        lambda: _process(witness, subject),
    ]
    await witness.random.choice(deeds)()


async def _process(witness: Witness, subject: Subject) -> None:
    running = [key for key in subject.pids if key != subject.counter and key not in subject.ended]
    if len(running) < 2:
        await witness.start(subject, "sleep 1000", witness.name("process"))
    else:
        await witness.end(subject, running[0])


async def kill_often(node: Node, witness: Witness, kills: int, told: Callable[[int], None]) -> None:
    """Kills the running node `kills` times under load, and verifies after each. `told` gets the number of each. Raises Faults."""
    client = dsec.DSecClient(node.url, node.api_key)
    await client.open()
    try:
        for number in range(kills):
            moment = witness.random.choice((0.02, 0.1, 0.3, 0.6)) * (0.5 + witness.random.random())
            asyncio.get_running_loop().call_later(moment, node.kill_only)
            await until_death(node, load(witness, client))
            await client.close()
            await asyncio.to_thread(node.restart)
            client = dsec.DSecClient(node.url, node.api_key)
            await client.open()
            await witness.verify(client)
            told(number + 1)
    finally:
        await client.close()


def _rootfs(root: Path) -> Path:
    busybox = shutil.which("busybox")
    if busybox is None:
        sys.exit("busybox is missing: apt-get install busybox-static")
    for name in ("bin", "proc", "sys", "dev", "tmp", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for applet in ("sh", "sleep", "cat"):
        (root / "bin" / applet).symlink_to("busybox")
    return root


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dsec.testing.chaos")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    chosen = parser.parse_args()
    clock = SystemClock()
    seed = chosen.seed if chosen.seed is not None else int.from_bytes(clock.random(4), "big")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = Path(tempfile.mkdtemp(prefix="dsec-chaos-"))
    _log.info("seed %d in %s", seed, folder)
    node = Node(folder / "state", **SETTINGS)
    began = time.monotonic()
    with node:
        node.dsec("image", "import", "--state", str(node.state), "box", str(_rootfs(folder / "root")))
        witness = Witness(node.state, "box", seed, clock.now)
        asyncio.run(
            kill_often(node, witness, chosen.kills, lambda n: _log.info("%d kills", n) if n % 10 == 0 else None)
        )
    left = {place: ids for place, ids in witness.traces().items() if ids}
    _log.info("%d kills in %.0f s; left: %s", chosen.kills, time.monotonic() - began, left or "nothing")
    shutil.rmtree(folder)
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
