"""A store with an image in it, and nodes that never saw that image."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec.images.stores.opening import open_store
from dsec.testing.node import Node
from imagekit import Shelf
from loading.library import SIZE, Library
from storekit import content, options, push_all

BUSYBOX = shutil.which("busybox")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The store; tests that change it take a copy (`Library.copy`)."""
    if BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    place = tmp_path_factory.mktemp("library")
    root = place / "root"
    (root / "bin").mkdir(parents=True)
    (root / "data").mkdir()
    shutil.copy2(BUSYBOX, root / "bin/busybox")
    for word in ("sh", "cat", "sha256sum", "sleep", "true", "false", "dd", "env", "mkdir"):
        (root / "bin" / word).symlink_to("busybox")
    big = content(7, SIZE)
    (root / "data/big").write_bytes(big)
    (root / "data/late").write_bytes(content(8, SIZE // 4))
    (root / "data/hello").write_bytes(b"hello\n")
    shelf = Shelf(place / "maker")
    digest = shelf.import_image("box", root).digest

    async def push() -> None:
        store = open_store(options(f"file://{place}/store"), create=True)
        await push_all(shelf, store, ["box"], plain=True)
        await store.close()

    asyncio.run(push())
    return Library(place / "store", digest, hashlib.sha256(big).hexdigest(), shelf.state)


def ended(node: Node) -> None:
    """`dsec down`, also where a test left the server dead."""
    node.stop()
    node.dsec("down", "--state", str(node.state))


@pytest.fixture
def start(tmp_path: Path, library: Library) -> Iterator[Callable[..., Node]]:
    """Starts a node on an empty state directory with settings of images (`load="whole"`), ended with the test."""
    with ExitStack() as stack:

        def started(**settings: object) -> Node:
            wanted = {"store": f"file://{library.store}", "wait_seconds": 2, **settings}
            named = {f"DSEC_IMAGES_{name.upper()}": str(value) for name, value in wanted.items()}
            state = tmp_path / f"n{len(list(tmp_path.iterdir()))}"
            node = Node(state, DSEC_CONTAINER_POOL_BYTES=str(1 << 30), **named)
            stack.callback(ended, node)
            node.start()
            return node

        yield started
