"""A push or pull that is killed at any moment: nothing half is shown, and the next one goes on."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsec.images.stores.layout import Folder
from dsec.images.stores.opening import open_store
from imagekit import Shelf
from storekit import content, import_tree, options, pull_all, push_all, same_layer

TREE = {f"f{n}": content(n, 700_000) for n in range(30)}


def start(verb: str, state: Path, store: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "dsec", "image", verb, "--state", str(state), "--store", f"file://{store}", "big"]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_after(process: subprocess.Popen[bytes], done: "Path", least: int) -> bool:
    """Kills the process once there are so many files below `done`; whether it still ran."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if sum(path.is_file() for path in done.rglob("*")) >= least:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


async def whole_or_nothing(store: Path, at: Path) -> None:
    if not store.is_dir():
        return
    opened = open_store(options(f"file://{store}"))
    if [name async for name in opened.list(Folder.NAMES)]:
        await pull_all(Shelf(at), opened, ["big"])


@pytest.mark.slow
def test_a_push_that_is_killed(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "state")
    digest = import_tree(shelf, "big", TREE, tmp_path)
    store = tmp_path / "store"
    killed = 0
    for number, least in enumerate((0, 1, 2, 5, 10, 18, 19, 20, 21, 22)):
        killed += kill_after(start("push", shelf.state, store), store, least)
        asyncio.run(whole_or_nothing(store, tmp_path / f"pull{number}"))
    assert killed >= 4
    opened = open_store(options(f"file://{store}"), create=True)
    asyncio.run(push_all(shelf, opened, ["big"]))
    other = Shelf(tmp_path / "other")
    asyncio.run(pull_all(other, opened, ["big"]))
    assert same_layer(shelf, other, digest)


@pytest.mark.slow
def test_a_pull_that_is_killed(tmp_path: Path) -> None:
    shelf, other = Shelf(tmp_path / "state"), Shelf(tmp_path / "other")
    digest = import_tree(shelf, "big", TREE, tmp_path)
    store = tmp_path / "store"
    asyncio.run(push_all(shelf, open_store(options(f"file://{store}"), create=True), ["big"]))
    killed = 0
    for least in (1, 3, 5, 7):
        (other.state / "tmp").mkdir(parents=True, exist_ok=True)
        killed += kill_after(start("pull", other.state, store), other.state / "tmp", least)
        for found in other.layers.digests():
            assert same_layer(shelf, other, found)
        assert all(other.layers.exists(record.digest) for record in other.names.all())
    assert killed >= 2
    asyncio.run(pull_all(other, open_store(options(f"file://{store}")), ["big"]))
    assert same_layer(shelf, other, digest)
    assert not list((other.state / "tmp").glob("import-*"))
