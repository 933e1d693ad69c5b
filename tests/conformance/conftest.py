"""A real node for the whole session, the suite's images on it, and a client: for the suite and for what is beside it here."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsec
from conformance.boxes import Boxes
from conformance.site import OwnNode
from dsec.testing.node import Node
from dsec.testing.suite import rootfs


def import_images(node: Node, work: Path) -> None:
    """The suite's images, by the command line."""
    rootfs.import_images(lambda name, source: node.dsec("image", "import", name, str(source)), work)


async def _warm(node: Node) -> None:
    """What the node makes once, at first use of an image, is the session's and not a test's."""
    async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
        for image in (rootfs.BOX, rootfs.FULL):
            await (await client.run_container(dsec.DSecContainerRunArgs(container_image=image))).stop()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnNode]:
    work = tmp_path_factory.mktemp("c")
    # No layer stays mounted for the next sandbox: each test is shown to leave none.
    with OwnNode(work / "s", DSEC_IMAGES_IDLE_MOUNTS="0") as found:
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
