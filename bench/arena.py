"""Sets up ours and the peers for one benchmark and removes them all."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct

from bench.ours import Ours
from bench.peers.docker import Docker, why_not
from bench.peers.oci import Oci
from bench.peers.port import Peer
from bench.rootfs import make_rootfs
from dsec.testing.node import Node

__all__ = ["Arena", "arena"]

IMAGE = "bench-busybox:1"


class Arena(Struct):
    """Those who take part. `missing`: peers that cannot, and why."""

    node: Node
    ours: Ours
    peers: list[Peer]
    missing: dict[str, str]

    @property
    def everyone(self) -> list[Peer]:
        """Ours first."""
        return [self.ours, *self.peers]


def candidates(rootfs: Path, quick: bool) -> tuple[dict[str, Callable[[], Peer]], dict[str, str]]:
    """Peers that can take part here, and why the others cannot."""
    makers: dict[str, Callable[[], Peer]] = {}
    missing: dict[str, str] = {}
    reason = "left to the full run" if quick else why_not()
    if reason is None:
        makers["docker-api"] = lambda: Docker(rootfs)
    else:
        missing["docker-api"] = reason
    for program in ("crun", "runc"):
        if shutil.which(program) is None:
            missing[program] = f"apt-get install {program}"
        else:
            makers[program] = lambda program=program: Oci(program, rootfs)  # type: ignore[misc]
    return makers, missing


@asynccontextmanager
async def arena(quick: bool, add: Callable[[Path], None] | None = None) -> AsyncIterator[Arena]:
    """A node of its own with the benchmark's image, and the peers, all on one root file system; `add` puts more into it."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        rootfs = make_rootfs(folder / "rootfs")
        if add is not None:
            add(rootfs)
        node = stack.enter_context(Node(folder / "state"))
        node.dsec("image", "import", IMAGE, str(rootfs))
        makers, missing = candidates(rootfs, quick)
        contenders: list[Peer] = []
        ours = Ours(node, IMAGE)
        stack.push_async_callback(ours.close)
        for maker in makers.values():
            contenders.append(maker())
            stack.push_async_callback(contenders[-1].close)
        yield Arena(node, ours, contenders, missing)
