"""The host reboots: of a node with living sandboxes nothing stays but what is on its disk."""

import hashlib
import os
import select
import signal
import sqlite3
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest

import dsec
from conformance.conftest import import_images
from dsec.testing.leaks import CGROUPS
from dsec.testing.node import Node

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


def trees(node: Node) -> list[Path]:
    name = "dsec-" + hashlib.sha256(str(node.state).encode()).hexdigest()[:8]
    return [*CGROUPS.glob(name), *CGROUPS.glob(f"*/{name}")]


def mounts(node: Node) -> list[str]:
    places = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place.startswith(f"{node.state}/")]


def power_cut(node: Node) -> None:
    """Takes all that a reboot takes of this node: processes, groups, mounts, and with them the pool's loop device."""
    node.kill()
    pids = {int(pid) for tree in trees(node) for file in tree.rglob("cgroup.procs") for pid in file.read_text().split()}
    watched = [os.pidfd_open(pid) for pid in pids]
    for pidfd in watched:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for pidfd in watched:
        assert select.select([pidfd], [], [], 20)[0], "it does not end"
        os.close(pidfd)
    for claim in Path("/run/dsec/ids").iterdir():
        if str(node.state) in claim.read_text():
            claim.unlink()
    for tree in trees(node):
        for folder in sorted((path for path in tree.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        tree.rmdir()
    for place in reversed(mounts(node)):
        subprocess.run(["umount", place], check=True)
    assert not mounts(node) and not trees(node)
    with closing(sqlite3.connect(node.state / "journal.db")) as db:  # used last in a boot that was not this one
        db.execute("UPDATE boot SET id = 'the-boot-before'")
        db.commit()


async def test_after_a_reboot(tmp_path: Path) -> None:
    with Node(tmp_path / "s", DSEC_CONTAINER_POOL_BYTES=str(512 << 20)) as node:
        import_images(node, tmp_path)
        images = node.images()
        node.dsec("volume", "create", "kept")
        args = dsec.DSecContainerRunArgs(
            container_image="box:1", memory_limit_mb=64, mounts=[dsec.MountSpec(target="/kept", volume="kept")]
        )
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            before = [await client.run_container(args) for _ in range(3)]
            await before[0].files.write("/kept/f", b"still there")
            await before[1].start(["sleep", "1000"])
        power_cut(node)
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            for box in before:
                with pytest.raises(dsec.SandboxLost) as caught:
                    await (await client.get(box.id)).exec(["true"])
                assert caught.value.fields["end"] == "node_lost"
            assert os.listdir(node.state / "pool" / "cells") == []
            assert node.images() == images
            after = await client.run_container(args)
            assert after.id not in {box.id for box in before}
            assert await after.files.read("/kept/f") == b"still there"
            assert (await after.exec(["echo", "up"])).text == "up\n"
            assert os.listdir(node.state / "pool" / "cells") == [after.id]
            await after.stop()
