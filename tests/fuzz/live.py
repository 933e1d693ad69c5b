"""python -m fuzz.live TARGET: seeded bytes at a real sandbox and a real node, which have to answer on in bounded memory. Needs root."""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from dsec.testing.node import Node
from e2e.site_of_one import make_rootfs
from fuzz.draw import Draw
from fuzz.strangers import Requests, raw_bytes
from fuzz.tenant import Sandbox, hostile_frames

CHECK_EVERY = 50
GROWTH_MIB = 160
DESCRIPTORS = 400

One = Callable[[Draw], Awaitable[None]]


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


class Watch:
    """One process that has to live through all of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.first = self.most = memory_mib(pid)

    def look(self) -> None:
        """Still there, its memory and descriptors within their bounds."""
        now = memory_mib(self.pid)
        self.most = max(self.most, now)
        assert now < self.first + GROWTH_MIB, f"memory grew from {self.first:.0f} to {now:.0f} MiB"
        held = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        assert held < DESCRIPTORS, f"{held} descriptors are open"


async def throw(one: One, check: Callable[[], Awaitable[None]], watch: Watch, given: argparse.Namespace) -> None:
    """Inputs until the time or the count is over; a look at the target between them."""
    chance, count, end = random.Random(given.seed), 0, time.monotonic() + given.seconds
    while count < given.runs if given.runs else time.monotonic() < end:
        data = chance.randbytes(chance.choice((20, 100, 400, 2000)))
        async with asyncio.timeout(30):
            try:
                await one(Draw(data))
            except Exception:
                print(f"input {count} of seed {given.seed}: {data.hex()}")
                raise
        count += 1
        if count % CHECK_EVERY == 0:
            await check()
            watch.look()
    await check()
    watch.look()
    print(f"stat::number_of_executed_units: {count}\nstat::peak_rss_mb: {watch.most:.0f}")


async def aether(given: argparse.Namespace, folder: Path) -> None:
    """Frames of any form at the socket of a sandbox's aether."""
    async with Sandbox.running(folder) as box:
        await throw(lambda draw: hostile_frames(box, draw), box.check, Watch(box.pid), given)


@contextmanager
def own_node(folder: Path) -> Iterator[Node]:
    node = Node(folder / "state", DSEC_CONTAINER_POOL_BYTES=str(1 << 30))
    node.dsec("image", "import", "--state", str(node.state), "busybox", str(make_rootfs(folder / "rootfs")))
    with node:
        yield node


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Node, Requests]]:
    with own_node(folder) as node:
        async with Requests.to(node.url, node.api_key) as requests:
            yield node, requests


async def node(given: argparse.Namespace, folder: Path) -> None:
    """Requests out of the document that a real node serves."""
    async with served(folder) as (own, requests):
        await throw(requests.one, requests.check, Watch(own.pid), given)


async def wire(given: argparse.Namespace, folder: Path) -> None:
    """Bytes at the port of a real node: HTTP and WebSocket, nearly right."""
    async with served(folder) as (own, requests):
        await throw(lambda draw: raw_bytes(requests, draw), requests.check, Watch(own.pid), given)


TARGETS = {"aether": aether, "node": node, "bytes": wire}


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz.live")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsec-fuzz-") as folder:
        asyncio.run(TARGETS[given.target](given, Path(folder)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
        sys.exit(0)
    sys.exit(130)
