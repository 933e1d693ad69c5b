"""Disks fill: the pool, the disk under the pool's file, the journal's disk. Small real file systems, real sandboxes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import pytest

import dsec
from conformance.boxes import eventually
from conformance.conftest import import_images
from dsec.testing.node import Node

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

MIB = 1 << 20


def args(**more: object) -> dsec.DSecContainerRunArgs:
    given = {
        "container_image": "box:1",
        "memory_limit_mb": 128,
        "disk_limit_mb": 2048,
        "ttl_running_stop": None,
        **more,
    }
    return dsec.DSecContainerRunArgs(**given)  # type: ignore[arg-type]


def gauges(node: Node) -> dict[str, float]:
    text = subprocess.run(
        ["curl", "-sf", "-H", f"Authorization: Bearer {node.api_key}", f"{node.url}/metrics"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


@pytest.mark.slow
async def test_a_full_pool(tmp_path: Path) -> None:
    """Creates are Busy, what runs gets ENOSPC and is served, and room comes back with a stop."""
    with Node(tmp_path / "s", DSEC_CONTAINER_POOL_BYTES=str(512 * MIB)) as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box, other = await client.run_container(args()), await client.run_container(args())
            found = await box.run_shell("dd if=/dev/zero of=/fill bs=1M count=2000; sync", timeout=100)
            assert found.exit_code != 0 or b"No space" in found.stderr
            with pytest.raises(dsec.Busy) as caught:
                await client.run_container(args(), timeout=3.0)
            assert "pool" in str(caught.value) and caught.value.fields["retry_after"] == 1.0
            assert gauges(node)["dsec_pool_free_bytes"] < 64 * MIB
            for each in (box, other):
                assert (await each.exec(["echo", "served"])).text == "served\n"
                assert len(await each.files.read("/bin/busybox")) > 1000
            with pytest.raises(dsec.LimitReached):
                for n in range(20):
                    await other.files.write(f"/more{n}", bytes(8 * MIB))
            await box.stop()

            async def room() -> bool:
                return gauges(node)["dsec_pool_free_bytes"] > 64 * MIB

            await eventually(room, 40.0)
            await (await client.run_container(args())).stop()
            await other.files.write("/more", bytes(8 * MIB))
            await other.stop()


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of its own, of `size` bytes."""
    place, image = folder / "disk", folder / "disk.img"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path, 900 * MIB) as place:
        yield place


@pytest.mark.slow
async def test_the_disk_under_the_pool_is_nearly_full(tmp_path: Path, small_disk: Path) -> None:
    """Creates are refused before the disk is full, which the pool would not survive; what runs goes on."""
    ballast = small_disk / "ballast"
    settings = {"DSEC_CONTAINER_POOL_BYTES": str(600 * MIB), "DSEC_CONTAINER_RESERVE_MB": "64"}
    with Node(small_disk / "s", **settings) as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.run_container(args())
            with ballast.open("wb") as file:
                file.write(bytes(int(gauges(node)["dsec_pool_host_free_bytes"]) - 48 * MIB))
            with pytest.raises(dsec.Busy) as caught:
                await client.run_container(args(), timeout=3.0)
            assert "disk under the pool" in str(caught.value)
            assert (await box.run_shell("dd if=/dev/zero of=/f bs=1M count=2 && sync", timeout=60)).exit_code == 0
            assert gauges(node)["dsec_pool_writable"] == 1.0
            ballast.unlink()
            await (await client.run_container(args(), timeout=20)).stop()
            await box.stop()


async def break_pool(node: Node, client: dsec.DSecClient, place: Path) -> dsec.Sandbox:
    """A sandbox that writes on while something else fills the disk under the pool, until the kernel gives the pool up."""
    box = await client.run_container(args())
    await box.start(["/bin/sh", "-c", "n=0; while :; do dd if=/dev/zero of=/f$n bs=1M count=8; sync; n=$((n+1)); done"])
    fill(place)
    return box


def read_only(node: Node) -> bool:
    return bool(os.statvfs(node.state / "pool").f_flag & os.ST_RDONLY)


@pytest.mark.slow
async def test_a_pool_that_broke_is_mounted_anew(tmp_path: Path, small_disk: Path) -> None:
    """Its sandboxes end as `capacity`, by themselves; the pool can be written again though the disk is still full, and creates
    go on with room on it. Volumes and images are whole."""
    with Node(small_disk / "s", DSEC_CONTAINER_POOL_BYTES=str(600 * MIB)) as node:
        import_images(node, tmp_path)
        node.dsec("volume", "create", "kept")
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await break_pool(node, client, small_disk)

            async def ended() -> bool:
                return (await box.info()).state == "gone"

            await eventually(ended, 90.0)
            end = (await box.info()).end
            assert end is not None and end.end == "capacity" and "pool" in end.reason
            with pytest.raises(dsec.Busy):
                await client.run_container(args(), timeout=3.0)
            (small_disk / "ballast").unlink()
            await (await client.run_container(args(), timeout=60.0)).stop()
            assert gauges(node)["dsec_pool_writable"] == 1.0
        assert node.dsec("volume", "list").split() == ["kept"]


@pytest.mark.slow
@pytest.mark.parametrize("after", ["down", "up"])
async def test_a_server_that_died_with_its_pool(tmp_path: Path, small_disk: Path, after: str) -> None:
    """`dsec down` ends everything and `dsec up` begins anew, on a disk that is still full."""
    with Node(small_disk / "s", DSEC_CONTAINER_POOL_BYTES=str(600 * MIB)) as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await break_pool(node, client, small_disk)
            node.kill()

            async def broken() -> bool:
                return read_only(node)

            await eventually(broken, 90.0)
        if after == "down":
            node.dsec("down", "--state", str(node.state))
            assert not (node.state / "pool").is_mount()
        node.start()
        assert not read_only(node)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            view = (await client.get(box.id)).view
            assert view.state == "gone" and view.end is not None and view.end.end in ("runtime", "stopped")
            (small_disk / "ballast").unlink()
            await (await client.run_container(args(), timeout=60.0)).stop()


@pytest.mark.slow
async def test_a_reserved_pool_does_not_break(tmp_path: Path, small_disk: Path) -> None:
    """`container.pool_reserve`: something else fills the disk to its end, and sandboxes write on."""
    settings = {"DSEC_CONTAINER_POOL_BYTES": str(400 * MIB), "DSEC_CONTAINER_POOL_RESERVE": "true"}
    with Node(small_disk / "s", **settings) as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            with (small_disk / "room").open("wb") as file:  # for the journal, which is on the same disk here
                os.posix_fallocate(file.fileno(), 0, 8 * MIB)
            fill(small_disk)
            (small_disk / "room").unlink()
            box = await client.run_container(args())
            for _ in range(3):  # what was deleted is still reserved
                done = await box.run_shell("dd if=/dev/zero of=/f bs=1M count=150 && sync && rm /f && sync", timeout=60)
                assert done.exit_code == 0
            assert not read_only(node)
            await box.stop()


@pytest.fixture
def journal_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path, 16 * MIB) as place:
        yield place


def fill(place: Path) -> None:
    with (place / "ballast").open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == ENOSPC


@pytest.mark.slow
async def test_the_disk_of_the_journal_is_full(tmp_path: Path, journal_disk: Path) -> None:
    """No sandbox is made that could not be recorded; what lives is served, ends by call and by time, and is taken over."""
    state = tmp_path / "s"
    state.mkdir(mode=0o700)
    (journal_disk / "journal.db").touch()
    (state / "journal.db").symlink_to(journal_disk / "journal.db")
    with Node(state, DSEC_CONTAINER_POOL_BYTES=str(1024 * MIB)) as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            stopped, kept = await client.run_container(args()), await client.run_container(args())
            timed = await client.run_container(args(ttl_absolute=4.0))
            fill(journal_disk)
            with pytest.raises(dsec.Busy) as caught:
                for _ in range(40):  # what the log has room for already is still recorded
                    await (await client.run_container(args(), timeout=3.0)).stop()
            assert caught.value.fields["limit"] == "journal" and caught.value.fields["retry_after"] > 0
            with pytest.raises(dsec.Busy):  # it could not be recorded either
                await kept.exec(["true"])
            assert len(await kept.files.read("/bin/busybox")) > 1000
            assert (await stopped.stop()).state == "gone"

            async def over() -> bool:
                return (await timed.info()).state == "gone"

            await eventually(over, 10.0)
            assert (await timed.info()).end.end == "expired"  # type: ignore[union-attr]
        node.kill()
        node.start()  # in the room set aside
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            assert (await client.get(kept.id)).view.state == "running"
            for each in (stopped, timed):
                assert (await client.get(each.id)).view.state == "gone"
        node.kill()
        (journal_disk / "ballast").unlink()
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            assert (await (await client.get(kept.id)).exec(["echo", "back"])).text == "back\n"
            for each in (stopped, timed):
                assert (await client.get(each.id)).view.state == "gone"
            await (await client.run_container(args())).stop()
            await (await client.get(kept.id)).stop()
