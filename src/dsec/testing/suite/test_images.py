"""Images: what goes in comes out, byte by byte, as a sandbox sees it (rows IM)."""

import hashlib
import io
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from dsec.testing.suite.archives import (
    Member,
    file,
    folder,
    image,
    layout_files,
    link,
    other,
    symlink,
    tar,
    write_layout,
)
from dsec.testing.suite.boxes import Box, Boxes
from dsec.testing.suite.rootfs import busybox_layer
from dsec.testing.suite.sites import Site, needs

pytestmark = pytest.mark.asyncio

# VFS_CAP_REVISION_2 with the effective bit; cap_net_raw (13) permitted.
NET_RAW = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0).decode("utf-8", "surrogateescape")
OPAQUE = ".wh..wh..opq"
Make = Callable[..., str]


@pytest.fixture
def made(site: Site, tmp_path: Path) -> Iterator[Make]:
    """Imports images of the layers given, a busybox below them, and takes their names away at the end."""
    needs(site, "import")
    names: list[str] = []

    def make(*layers: list[Member], packing: str = "+gzip") -> str:
        raw = [busybox_layer(), *(tar(layer) for layer in layers)]
        layout = write_layout(tmp_path / f"l{len(names)}", layout_files(image(raw, packing)))
        return imported(layout)

    def imported(source: Path) -> str:
        name = f"suite-{uuid4().hex[:12]}"
        site.import_image(name, source)
        names.append(name)
        return name

    make.imported = imported  # type: ignore[attr-defined]
    yield make
    for name in names:
        site.remove_image(name)


async def hashes(box: Box, where: str) -> dict[str, str]:
    """Every file below a folder, by its SHA-256 as the sandbox reads it."""
    text = await box.said(f"cd {where} && find . -type f -print0 | xargs -0 -r sha256sum > /sums", timeout=500)
    assert text == ""
    lines = (await box.read("/sums")).decode().splitlines()
    return {line[66:].removeprefix("./"): line[:64] for line in lines}


def summed(members: list[Member], below: str = "t/") -> dict[str, str]:
    return {
        info.name.removeprefix(below): hashlib.sha256(data).hexdigest() for info, data in members if info.isreg()
    }  # fmt: skip


def varied(seed: int, count: int) -> list[Member]:
    """A tree with sizes around every boundary of blocks, long names, links and attributes."""
    dice = random.Random(seed)
    members, folders = [folder("t")], ["t/"]
    for number in range(count):
        name = f"{dice.choice(folders)}{'n' * dice.choice([0, 0, 5, 100, 240])}{number}"
        kind = dice.random()
        if kind < 0.15:
            members.append(folder(name, mode=0o755))
            folders.append(name + "/")
        elif kind < 0.25:
            members.append(symlink(name, "t" * dice.randrange(1, 4096)))
        else:
            size = dice.choice([0, 1, 100, 4095, 4096, 4097, 8192, 70_000])
            extra = {f"SCHILY.xattr.user.{i}": "v" * dice.randrange(300) for i in range(dice.choice([0, 0, 0, 1, 20]))}
            members.append(file(name, dice.randbytes(size), pax_headers=extra))
    return members


async def compared(boxes: Boxes, name: str, members: list[Member]) -> None:
    box = await boxes.make(name)
    assert await hashes(box, "/t") == summed(members)
    await box.stop()


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_thirty_varied_images_read_back(boxes: Boxes, made: Make) -> None:
    """IM1: every file of 30 images has the hash that it has in the tar (we ship one writer, which does not compress)."""
    for seed in range(30):
        members = varied(seed, 40)
        await compared(boxes, made(members, packing="+gzip" if seed % 2 else ""), members)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_thirty_large_images_read_back(boxes: Boxes, made: Make) -> None:
    """IM1, with a few thousand files each."""
    for seed in range(30):
        members = varied(1000 + seed, 3000)
        await compared(boxes, made(members), members)


def write_sparse(path: Path, size: int, marks: list[int]) -> str:
    """A file with bytes at `marks` and holes between; answers its hash."""
    with path.open("wb") as out:
        out.truncate(size)
        for at in marks:
            out.seek(at)
            out.write(b"mark%d" % at)
    return hashlib.file_digest(path.open("rb"), "sha256").hexdigest()


@contextmanager
def root_with(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    (root / "t").mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(busybox_layer())) as archive:
        archive.extractall(root, filter="tar")
    yield root


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
@pytest.mark.parametrize("mib", [2355, 5120])
async def test_files_past_two_and_four_gibibytes(boxes: Boxes, made: Make, tmp_path: Path, mib: int) -> None:
    """IM3: a small file, one of 2.3 or 5 GiB, and a small one after it."""
    with root_with(tmp_path) as root:
        size = mib << 20
        marks = [0, (2 << 30) - 3, (2 << 30) + 7, size - 20] + ([(4 << 30) + 5] if mib > 4096 else [])
        wanted = {"big": write_sparse(root / "t/big", size, marks)}
        for name in ("a", "z"):
            (root / "t" / name).write_bytes(name.encode())
            wanted[name] = hashlib.sha256(name.encode()).hexdigest()
        name = made.imported(root)  # type: ignore[attr-defined]
    assert await hashes(await boxes.make(name), "/t") == wanted


def many(count: int, folders: int) -> list[Member]:
    return [folder("t"), *(folder(f"t/{n}") for n in range(folders))] + [
        file(f"t/{n % folders}/f{n}", b"%d" % n) for n in range(count)
    ]


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_many_tiny_files(boxes: Boxes, made: Make) -> None:
    """IM3, with 3,000 tiny files."""
    members = many(3000, 30)
    await compared(boxes, made(members), members)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_three_hundred_thousand_tiny_files(boxes: Boxes, made: Make) -> None:
    """IM3: 300,000 tiny files in one layer."""
    members = many(300_000, 300)
    name = made(members)
    box = await boxes.make(name, memory_limit_mb=1024, disk_limit_mb=512)
    assert await hashes(box, "/t") == summed(members)


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_hard_links_and_long_names(boxes: Boxes, made: Make) -> None:
    """IM4: counts and inodes, B keeps its bytes when A is replaced, a link before its target, names of every length."""
    deep = "t/" + "/".join(["p" * 198] * 20)
    deep += "q" * (3998 - len(deep))  # with "/f" 4,000 bytes
    first = [
        folder("t"), file("t/A", b"old" * 2000), link("t/B", "t/A"), folder("t/links"),
        *(link(f"t/links/{i}", "t/A") for i in range(998)), link("t/early", "t/late"), file("t/late", b"l"),
        file("t/" + "n" * 250, b"long"), symlink("t/far", "t" * 3000),
    ]  # fmt: skip
    box = await boxes.make(made(first, [file("t/A", b"new"), file(deep + "/f", b"deep")]))
    assert await box.read("/t/A") == b"new" and await box.read("/t/B") == b"old" * 2000
    assert (await box.said("stat -c %h /t/A /t/B /t/early")).split() == ["1", "999", "2"]
    inodes = (await box.said("stat -c %i /t/B /t/links/997 /t/early /t/late")).split()
    assert inodes[0] == inodes[1] and inodes[2] == inodes[3]
    assert await box.read("/t/" + "n" * 250) == b"long"
    assert (await box.said("readlink /t/far")) == "t" * 3000 + "\n"
    assert (await box.said("find /t -name f -exec cat {} +")) == "deep"
    assert len(deep + "/f") == 4000 and await box.read(f"/{deep}/f") == b"deep"
    assert (await box.exec(["cat", f"/{deep}/f"])).stdout == b"deep"
    assert int((await box.said("du -sk /t/links")).split()[0]) < 1024


def applied() -> tuple[list[list[Member]], dict[str, str]]:
    """Layers that swap, delete and hide, and the tree that the rules of OCI make of them, worked out by hand."""
    layers = [
        [folder("t"), folder("t/d"), file("t/d/a", b"a"), file("t/d/b", b"b"), file("t/f", b"f"), folder("t/g"),
         file("t/g/x", b"x"), file("t/h", b"h"), folder("t/o"), file("t/o/old", b"old"), folder("t/p"),
         file("t/p/old", b"old")],
        [file("t/.wh.d")],
        [folder("t/d"), file("t/d/c", b"c")],
        [folder("t/f"), file("t/f/in", b"in"), file("t/g", b"now a file"), symlink("t/h", "d/c"),
         folder("t/o"), file(f"t/o/{OPAQUE}"), file("t/o/new", b"new"),
         folder("t/p"), file("t/p/new", b"new"), file(f"t/p/{OPAQUE}"),
         file("t/twice", b"first"), file("t/twice", b"second"), file("t/.wh.missing")],
    ]  # fmt: skip
    wanted = {"d/c": "c", "f/in": "in", "g": "now a file", "o/new": "new", "p/new": "new", "twice": "second"}
    return layers, wanted


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_layers_apply_by_the_rules(boxes: Boxes, made: Make) -> None:
    """IM5: whiteouts, opaque markers before and after their siblings, kinds that swap, entries given twice."""
    layers, wanted = applied()
    box = await boxes.make(made(*layers))
    assert await hashes(box, "/t") == {k: hashlib.sha256(v.encode()).hexdigest() for k, v in wanted.items()}
    assert (await box.said("readlink /t/h; cat /t/h")) == "d/c\nc"
    shown = (await box.said("cd /t; find . | sort")).split()
    assert shown == sorted(
        [".", "./d", "./d/c", "./f", "./f/in", "./g", "./h", "./o", "./o/new", "./p", "./p/new", "./twice"]
    )


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_attributes_come_through(boxes: Boxes, made: Make) -> None:
    """IM6: modes with set-id bits, times of other centuries to the nanosecond, and owners (what is outside the map of a
    container shows as 65534: docs/security.md)."""
    members = [
        folder("t", mode=0o2770, uid=5, gid=6), file("t/suid", b"z", mode=0o6755, uid=7, gid=8),
        file("t/owner", uid=4294967294, gid=4294967294), file("t/past", pax_headers={"mtime": "-2177452800.999999999"}),
        file("t/future", pax_headers={"mtime": "8583148800.000000007"}),
    ]  # fmt: skip
    box = await boxes.make(made(members))
    assert (await box.said("stat -c '%a %u %g' /t /t/suid /t/owner")).splitlines() == [
        "2770 5 6",
        "6755 7 8",
        "644 65534 65534",
    ]
    assert (await box.said("stat -c %Y /t/past /t/future")).split() == ["-2177452801", "8583148800"]
    nanoseconds = [line.split(".")[1][:9] for line in (await box.said("stat -c %y /t/past /t/future")).splitlines()]
    assert nanoseconds in (["000000001", "000000007"], ["000000000", "000000000"])


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_set_id_and_capabilities_work(boxes: Boxes, made: Make) -> None:
    """IM6: a user becomes root by a set-uid program, pings by a file's capability, and neither without."""
    program = busybox_bytes()
    members = [
        folder("t"), file("t/busybox-plain", program, mode=0o755), file("t/busybox-suid", program, mode=0o4755),
        file("t/busybox-cap", program, mode=0o755, pax_headers={"SCHILY.xattr.security.capability": NET_RAW}),
    ]  # fmt: skip
    name = made(members)
    box = await boxes.make(name)
    become, ping = "{} su root -c 'id -u'", "{} ping -c 1 -W 2 127.0.0.1"
    for program_name, text, works in (
        ("suid", become, True), ("plain", become, False), ("cap", ping, True), ("plain", ping, False),
    ):  # fmt: skip
        result = await box.shell(text.format(f"/t/busybox-{program_name}"), user="1000:1000", timeout=10)
        assert (result.exit_code == 0) is works, (program_name, result)
    strict = await boxes.make(name, no_new_privileges=True)
    for program_name, text in (("suid", become), ("cap", ping)):
        result = await strict.shell(text.format(f"/t/busybox-{program_name}"), user="1000:1000", timeout=10)
        assert result.exit_code != 0, program_name


def busybox_bytes() -> bytes:
    with tarfile.open(fileobj=io.BytesIO(busybox_layer())) as archive:
        content = archive.extractfile("./bin/busybox")
        assert content is not None
        return content.read()


async def test_devices_in_a_downloaded_tree_are_refused(boxes: Boxes, made: Make, tmp_path: Path) -> None:
    """FI3: an image may hold devices; a download names them and makes none."""
    kinds = {"char": tarfile.CHRTYPE, "block": tarfile.BLKTYPE}
    members = [other(f"t/{name}", kind, devmajor=1, devminor=3) for name, kind in kinds.items()]
    box = await boxes.make(made([folder("t"), *members, file("t/f", b"whole")]))
    assert {name: view.kind for name, view in (await box.names("/t")).items()} == {**{k: k for k in kinds}, "f": "file"}
    assert await box.caller.fetch_tree(box.id, "/t", tmp_path / "target") == set(kinds)
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == {"f": b"whole"}


async def stacked(boxes: Boxes, made: Make, count: int) -> None:
    layers = [[folder("t"), file("t/top", b"%d" % n), file(f"t/{n}", b"")] for n in range(1, count)]
    box = await boxes.make(made(*layers))
    if count > 1:
        assert await box.read("/t/top") == b"%d" % (count - 1)
        assert int(await box.said("ls /t | wc -l")) == count
    else:
        assert await box.said("echo up") == "up\n"


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
@pytest.mark.parametrize("count", [1, 65, 128])
async def test_images_of_many_layers(boxes: Boxes, made: Make, count: int) -> None:
    """IM9: the top layer wins, however many lie below it."""
    await stacked(boxes, made, count)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
@pytest.mark.parametrize("count", [64, 127, 200, 500])
async def test_images_of_very_many_layers(boxes: Boxes, made: Make, count: int) -> None:
    """IM9: up to 500."""
    await stacked(boxes, made, count)
