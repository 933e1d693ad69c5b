"""Commits on a real node: what a sandbox was is what the next one finds, whoever else writes meanwhile."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from conformance.boxes import Boxes
from conformance.conftest import import_images
from conformance.site import OwnNode
from dsec.images.collect import collect
from dsec.images.verify import verify
from imagekit import Shelf

pytestmark = pytest.mark.root


@pytest.fixture
def shelf(node: OwnNode) -> Iterator[Shelf]:
    """The node's own store; what a test named is gone at its end, and nothing is frozen."""
    found = Shelf(node.state)
    before = {record.name for record in found.names.all()}
    yield found
    for record in found.names.all():
        if record.name not in before:
            found.names.remove(record.name)
    collect(node.state, found.layers, found.names)
    assert os.listdir(node.state / "pool/frozen") == []
    assert list((node.state / "tmp").glob("import-*")) == []


STATE = r"""
set -e
mkdir -p /w/deep && echo one > /w/deep/a && ln /w/deep/a /w/b && ln -s deep/a /w/l && mkfifo /w/p
chown 1000:65535 /w/deep && chmod 2750 /w/deep && chmod 4755 /w/b && touch -d @1600000000 /w/deep/a
rm /not-executable && rm -rf /var && mkdir /var && touch /var/new && mv /etc/group /etc/moved
echo more >> /etc/passwd && mkdir /.wh.x && setfattr -n user.k -v v /w/l 2>/dev/null || true
"""
SHOW = r"find / -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune -o ! -path / -exec stat -c '%n %F %f %u:%g %s %h %Y' {} + | sort"


def listed(text: str) -> list[str]:
    """Without what the platform puts there itself, and without the sizes of folders, which each file system has its own of."""
    lines = [line for line in text.splitlines() if not line.startswith(("/etc/host", "/etc/resolv", "/etc d"))]
    return [" ".join(w for n, w in enumerate(line.split()) if n != 5 or " directory " not in line) for line in lines]


async def test_the_next_sandbox_finds_what_this_one_left(boxes: Boxes, shelf: Shelf) -> None:
    box = await boxes.make()
    await box.run_shell(STATE, check=True)
    was = listed((await box.run_shell(SHOW, check=True)).text)
    report = await box.commit("left:1")
    assert report.whiteouts == 2
    again = await boxes.make("left:1")
    now = listed((await again.run_shell(SHOW, check=True)).text)
    strip = [" ".join(line.split()[:-2]) for line in was]  # numbers of links and times of folders are the file system's
    assert [" ".join(line.split()[:-2]) for line in now] == strip
    assert (
        await again.run_shell("cat /w/b; stat -c %Y /w/deep/a; ls /var; ls /not-executable /etc/group")
    ).text == "one\n1600000000\nnew\n"
    assert verify(shelf.layers, report.digest, _Quiet()).ok


class _Quiet:
    def step(self, what: str, total: int | None) -> None:
        pass

    def add(self, count: int) -> None:
        pass


async def test_commits_lie_on_each_other(boxes: Boxes, shelf: Shelf) -> None:
    image = "box:1"
    for number in range(4):
        box = await boxes.make(image)
        await box.run_shell(f"echo {number} > /num{number}; rm -f /num{number - 2}", check=True)
        image = f"chain:{number}"
        report = await box.commit(image)
        assert len(report.layers) == number + 2
    last = await boxes.make(image)
    assert (await last.run_shell("cat /num*", check=True)).text == "2\n3\n"
    assert {"chain:3"} <= {record.name for record in shelf.names.all()}


async def test_a_sandbox_that_writes_on_is_committed_as_of_one_moment(boxes: Boxes, shelf: Shelf) -> None:
    box = await boxes.make()
    # Each round writes its number to both files, first the one, then the other: of one moment they are at most one apart.
    loop = "i=0; while :; do i=$((i+1)); echo $i > /a.new && mv /a.new /a; echo $i > /b.new && mv /b.new /b; done"
    process = await box.start(["/bin/sh", "-c", loop])
    for number in range(5):
        await box.commit(f"moment:{number}")
    await process.stop()
    for number in range(5):
        made = await boxes.make(f"moment:{number}")
        values = (await made.run_shell("cat /a /b 2>/dev/null")).text.split()
        assert not values or int(values[0]) - int(values[-1]) in (0, 1)


async def test_a_commit_that_is_cancelled_leaves_nothing(boxes: Boxes, shelf: Shelf, node: OwnNode) -> None:
    box = await boxes.make(memory_limit_mb=512)
    await box.run_shell("dd if=/dev/urandom of=/big bs=1M count=60 2>/dev/null", check=True)
    task = asyncio.get_running_loop().create_task(box.commit("cancelled:1"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):
        while os.listdir(node.state / "pool/frozen"):
            await asyncio.sleep(0.02)
    assert (await box.run_shell("wc -c < /big")).text.strip() == str(60 << 20)


async def test_what_a_tenant_may_not_is_refused(boxes: Boxes, shelf: Shelf, node: OwnNode) -> None:
    rights = ("sandbox.create", "sandbox.use", "sandbox.read", "image.read", "image.write")
    keys = []
    for name in ("maker", "other"):
        node.dsec("project", "create", f"root/{name}")
        node.dsec(
            "key", "principal", name, "--project", f"root/{name}", *[w for r in rights for w in ("--permission", r)]
        )
        keys.append(node.dsec("key", "create", "--principal", name).strip())
    async with dsec.DSecClient(node.url, keys[0]) as maker, dsec.DSecClient(node.url, keys[1]) as other:
        args = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64, disk_limit_mb=64)
        async with await maker.run_container(args) as box:
            with pytest.raises(dsec.PermissionDenied):
                await box.commit("box:1")
            with pytest.raises(dsec.PermissionDenied):
                await box.commit("other/x")
            report = await box.commit("maker/own:1")
            assert report.name == "maker/own:1"
            await box.run_shell("truncate -s 8796093022208 /huge", check=True)
            with pytest.raises(dsec.InvalidArgument, match="bytes"):
                await box.commit("maker/huge:1")
        mine = dsec.DSecContainerRunArgs(container_image="maker/own:1", memory_limit_mb=64)
        await (await maker.run_container(mine)).stop()
        with pytest.raises(dsec.NotFound):
            await other.run_container(mine)
        assert "maker/own:1" in {image.name for image in await maker.images()}
        assert "maker/own:1" not in {image.name for image in await other.images()}
    for name in ("maker", "other"):
        node.dsec("key", "remove-principal", name)
        node.dsec("project", "remove", f"root/{name}")


@pytest.mark.slow
async def test_a_frozen_copy_of_a_server_that_died_is_gone_after_the_next_start(tmp_path: Path) -> None:
    with OwnNode(tmp_path / "s") as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(node.url, node.api_key) as client:
            box = await client.run_container(dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=512))
            await box.run_shell("dd if=/dev/urandom of=/big bs=1M count=80 2>/dev/null", check=True)
            task = asyncio.get_running_loop().create_task(box.commit("died:1", timeout=5))
            async with asyncio.timeout(20):
                while not os.listdir(node.state / "pool/frozen"):
                    await asyncio.sleep(0.001)
            node.kill()
            with pytest.raises(dsec.DSecError):
                await task
        await asyncio.to_thread(node.start)
        assert os.listdir(node.state / "pool/frozen") == []
        assert not node.has("died:1")
        async with dsec.DSecClient(node.url, node.api_key) as client:
            alive = await client.get(box.id)
            assert (await alive.commit("lived:1")).bytes == 80 << 20
            await alive.stop()
