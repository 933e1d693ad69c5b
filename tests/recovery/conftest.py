"""A node that can be made to die at a place, with an image, a volume, and sandboxes that live through it all."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import dsec
from dsec.kernel.clock import SystemClock
from dsec.testing.chaos import SETTINGS
from dsec.testing.failpoints import FailingNode
from dsec.testing.witness import Witness
from e2e.site_of_one import BUSYBOX, make_rootfs

IMAGE = "box"


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    return make_rootfs(tmp_path_factory.mktemp("rootfs"))


@pytest.fixture
def node(tmp_path: Path, rootfs: Path) -> Iterator[FailingNode]:
    """A node that runs, with the image and a volume."""
    # No layer stays mounted that no sandbox holds: so mounting is met too.
    made = FailingNode(tmp_path / "s", **SETTINGS, DSEC_IMAGES_IDLE_MOUNTS="0")
    made.dsec("image", "import", "--state", str(made.state), IMAGE, str(rootfs))
    other = rootfs.with_name("other")
    if not other.exists():
        shutil.copytree(rootfs, other, symlinks=True)
        (other / "etc/other").write_text("another layer")
    made.dsec("image", "import", "--state", str(made.state), "other", str(other))
    made.start()
    try:
        made.dsec("volume", "create", "--state", str(made.state), "shared")
        yield made
    finally:
        made.stop()


@pytest.fixture
def witness(node: FailingNode, request: pytest.FixtureRequest) -> Witness:
    """Of that node; its seed is printed where a test fails."""
    seed = SystemClock().random(2)
    print(f"seed {int.from_bytes(seed, 'big')}")
    return Witness(node.state, IMAGE, int.from_bytes(seed, "big"), SystemClock().now)


Deed = Callable[[dsec.DSecClient], Awaitable[None]]


def with_client(node: FailingNode, deed: Deed) -> None:
    """Does it with a client of the running node."""

    async def do() -> None:
        async with dsec.DSecClient(node.url, node.api_key) as client:
            await deed(client)

    asyncio.run(do())
