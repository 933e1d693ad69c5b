"""A real node for the whole session, its images, and a client; through the HTTP API and the SDK, as users come in."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsec
import imagekit
from bench.rootfs import make_rootfs
from conformance.boxes import Boxes
from dsec.testing.node import Node

FULL_CONFIG = {
    "Env": ["PATH=/opt/x:/usr/bin:/bin", "A=b c"],
    "WorkingDir": "/w",
    "User": "1234:5678",
    "Entrypoint": ["/bin/false"],
    "Cmd": ["x"],
}


def make_busybox(root: Path) -> Path:
    """Every applet, a world-writable /tmp, and nothing else."""
    make_rootfs(root)
    listed = subprocess.run([root / "bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in listed:
        path = root / "bin" / applet
        if not path.is_symlink() and applet != "busybox":
            path.symlink_to("busybox")
    (root / "tmp").chmod(0o1777)
    (root / "not-executable").write_text("text")
    (root / "not-executable").chmod(0o644)
    return root


def import_images(node: Node, work: Path) -> None:
    root = make_busybox(work / "rootfs")
    node.dsec("image", "import", "box:1", str(root))
    tar = work / "layer.tar"
    subprocess.run(["tar", "-C", root, "-cf", tar, "."], check=True)
    image = imagekit.image([tar.read_bytes()], run=FULL_CONFIG)
    layout = imagekit.write_layout(work / "layout", imagekit.layout_files(image))
    node.dsec("image", "import", "full:1", str(layout))
    tar.unlink()
    shutil.rmtree(layout)


async def _warm(node: Node) -> None:
    """What the node makes once, at first use of an image, is the session's and not a test's."""
    async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
        for image in ("box:1", "full:1"):
            await (await client.run_container(dsec.DSecContainerRunArgs(container_image=image))).stop()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    work = tmp_path_factory.mktemp("c")
    with Node(work / "s") as found:
        import_images(found, work)
        asyncio.run(_warm(found))
        yield found


@pytest.fixture
async def client(node: Node) -> AsyncIterator[dsec.DSecClient]:
    async with dsec.DSecClient(url=node.url, api_key=node.api_key) as found:
        yield found


@pytest.fixture
async def boxes(client: dsec.DSecClient) -> AsyncIterator[Boxes]:
    found = Boxes(client)
    yield found
    await found.close()


@pytest.fixture
async def box(boxes: Boxes) -> Any:
    return await boxes.make()
