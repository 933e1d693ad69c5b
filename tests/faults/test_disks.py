"""Disks fill: the pool, the disk under the pool's file, the journal's disk. Small real file systems, real sandboxes."""

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
