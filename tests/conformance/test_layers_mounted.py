"""Layers as the kernel shows them: every attribute and byte, through the real mount (design rows IM1, IM3, IM4, IM5, IM6, IM9)."""

import asyncio
import hashlib
import os
import random
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.images.importing import BuildArgs, Quiet
from dsec.images.inputs import ImportConfig
from dsec.images.making import DATA, INDEX, META
from dsec.images.mounts import NodeImages, mounted_below
from dsec.images.settings import ImagesSettings
from dsec.images.verify import verify
from dsec.kernel.mounts import mount, mount_erofs, umount
from dsec.model.errors import Conflict, ImageUnavailable, InvalidArgument, NotFound
from dsec.model.layers import LayerKind
from dsec.model.spec import MountSpec
from imagekit import CLOCK, Shelf, file, folder, image, layout_files, link, other, symlink, tar, write_layout

pytestmark = pytest.mark.root

# VFS_CAP_REVISION_2 with the effective bit; cap_net_raw (13) permitted.
NET_RAW = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


@contextmanager
def mounted(shelf: Shelf, digest: str, place: Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    source = shelf.layers.directory(digest)
    mount_erofs(str(source / META), str(source / DATA), str(place))
    try:
        yield place
    finally:
        umount(str(place))


def checked(shelf: Shelf, digest: str) -> None:
    report = verify(shelf.layers, digest, Quiet())
    assert report.ok, report.damages[:5]
    fsck = shutil.which("fsck.erofs")
    if fsck is not None:
        source = shelf.layers.directory(digest)
        subprocess.run([fsck, f"--device={source / DATA}", source / META], check=True, capture_output=True)


def archive(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    (tmp_path / "root.tar").write_bytes(tar(members))
    return tmp_path / "root.tar"


def test_attributes_of_every_kind(shelf: Shelf, tmp_path: Path) -> None:
    capability = NET_RAW.decode("utf-8", "surrogateescape")
    members = [
        folder("d", mode=0o2770, uid=5, gid=6),
        file("cap", b"x", pax_headers={"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.n": "v" * 60_000}),
        *(file(f"many{i}", b"y", pax_headers={f"SCHILY.xattr.user.k{j}": f"{i}-{j}" for j in range(i)}) for i in (1, 30, 200)),
        file("suid", b"z", mode=0o6755), file("owner", uid=4294967294, gid=4294967294),
        file("past", pax_headers={"mtime": "-2177452800.999999999"}), file("future", pax_headers={"mtime": "8583148800.000000007"}),
        other("null", tarfile.CHRTYPE, devmajor=1, devminor=3), other("disk", tarfile.BLKTYPE, devmajor=259, devminor=1048575),
        other("pipe", tarfile.FIFOTYPE, mode=0o600), symlink("long", "t" * 3000), symlink("longest", "t" * 4095), file("n" * 250),
        symlink("honest", "/usr/bin/env"),
    ]  # fmt: skip
    record = shelf.import_image("a", archive(tmp_path, members))
    checked(shelf, record.digest)
    with mounted(shelf, record.digest, tmp_path / "m") as m:
        assert os.getxattr(m / "cap", "security.capability") == NET_RAW
        assert len(os.getxattr(m / "cap", "user.n")) == 60_000
        assert len(os.listxattr(m / "many200")) == 200 and os.getxattr(m / "many200", "user.k199") == b"200-199"
        found = os.lstat(m / "suid")
        assert stat.S_IMODE(found.st_mode) == 0o6755
        assert (os.lstat(m / "owner").st_uid, os.lstat(m / "owner").st_gid) == (4294967294, 4294967294)
        assert os.lstat(m / "past").st_mtime_ns == -2177452800_999999999
        assert os.lstat(m / "future").st_mtime_ns == 8583148800_000000007
        disk, null = os.lstat(m / "disk"), os.lstat(m / "null")
        assert stat.S_ISBLK(disk.st_mode) and (os.major(disk.st_rdev), os.minor(disk.st_rdev)) == (259, 1048575)
        assert stat.S_ISCHR(null.st_mode) and null.st_rdev == os.makedev(1, 3)
        assert stat.S_ISFIFO(os.lstat(m / "pipe").st_mode)
        assert os.readlink(m / "longest") == "t" * 4095 and os.readlink(m / "honest") == "/usr/bin/env"
        assert (m / ("n" * 250)).exists()
        getcap = shutil.which("getcap") or "/sbin/getcap"
        if Path(getcap).exists():
            assert b"cap_net_raw=ep" in subprocess.run([getcap, m / "cap"], check=True, capture_output=True).stdout


def test_links_long_paths_and_a_thousand_names(shelf: Shelf, tmp_path: Path) -> None:
    deep = "/".join(["p" * 199] * 20)[:3990]
    first = [
        file("A", b"old"),
        link("B", "A"),
        *(link(f"links/{i}", "A") for i in range(998)),
        link("early", "late"),
        file("late", b"l"),
    ]
    layers = [tar(first), tar([file("A", b"new"), file(deep, b"deep")])]
    record = shelf.import_image("a", write_layout(tmp_path / "l", layout_files(image(layers))))
    checked(shelf, record.digest)
    assert shelf.layers.manifest(record.digest).data.size <= 5 * 4096
    with mounted(shelf, record.digest, tmp_path / "m") as m:
        assert (m / "A").read_bytes() == b"new" and (m / "B").read_bytes() == b"old"
        assert os.lstat(m / "A").st_nlink == 1 and os.lstat(m / "B").st_nlink == 999
        assert os.lstat(m / "B").st_ino == os.lstat(m / "links/997").st_ino
        assert os.lstat(m / "early").st_ino == os.lstat(m / "late").st_ino
        fd = os.open(m, os.O_RDONLY)
        for name in deep.split("/")[:-1]:
            below = os.open(name, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        assert os.listdir(fd) == [deep.rpartition("/")[2]]
        os.close(fd)


def test_deletions_show_through_overlayfs(shelf: Shelf, tmp_path: Path) -> None:
    base = shelf.import_image(
        "base", archive(tmp_path, [folder("d"), file("d/a", b"1"), file("d/b"), folder("o"), file("o/x"), file("f")])
    )
    (tmp_path / "w.tar").write_bytes(
        tar([file("d/.wh.a"), folder("d"), file("o/.wh..wh..opq"), file("o/new", b"2"), folder("o")])
    )
    work = shelf.build(BuildArgs(LayerKind.WORKSPACE, "w", tmp_path / "w.tar", whiteouts=(b"f", b"nothing")))
    checked(shelf, work.digest)
    over = tmp_path / "over"
    over.mkdir()
    with mounted(shelf, base.digest, tmp_path / "b") as lower, mounted(shelf, work.digest, tmp_path / "w") as upper:
        found = os.lstat(upper / "d/a")
        assert stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
        assert os.getxattr(upper / "o", "trusted.overlay.opaque") == b"y"
        mount("dsec-test", str(over), "overlay", 1, f"lowerdir={upper}:{lower}")
        try:
            shown = sorted(str(p.relative_to(over)) for p in over.rglob("*"))
            assert shown == ["d", "d/b", "o", "o/new"]
        finally:
            umount(str(over))


def test_damage_is_found_and_named(shelf: Shelf, tmp_path: Path) -> None:
    digest = shelf.import_image("a", archive(tmp_path, [file("one", b"1" * 5000), file("two", b"2" * 5000)])).digest
    place = shelf.layers.directory(digest)
    raw = (place / DATA).read_bytes()
    with (place / DATA).open("r+b") as data:
        data.seek(raw.index(b"2" * 100) + 4500)
        data.write(b"!")
    report = verify(shelf.layers, digest, Quiet())
    assert {(d.path, d.what) for d in report.damages} == {("data", "chunk 1 has other bytes"), ("two", "other bytes")}
    (place / DATA).write_bytes(raw)
    assert verify(shelf.layers, digest, Quiet()).ok
    meta = bytearray((place / META).read_bytes())
    for at in range(1200, len(meta), 37):
        changed = meta.copy()
        changed[at] ^= 0x15
        (place / META).write_bytes(changed)
        assert not verify(shelf.layers, digest, Quiet()).ok
    (place / META).write_bytes(meta)
    for name in (META, DATA, INDEX, "files.zst"):
        kept = (place / name).read_bytes()
        (place / name).write_bytes(kept[:-1])
        assert not verify(shelf.layers, digest, Quiet()).ok
        (place / name).unlink()
        assert not verify(shelf.layers, digest, Quiet()).ok
        (place / name).write_bytes(kept)
    assert verify(shelf.layers, digest, Quiet()).ok


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_read_back(shelf: Shelf, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    members, folders = [], [""]
    for number in range(400):
        name = f"{dice.choice(folders)}{'n' * dice.choice([0, 0, 5, 100, 240])}{number}"
        kind = dice.random()
        if kind < 0.2:
            members.append(folder(name, mode=dice.randrange(0o10000)))
            folders.append(name + "/")
        elif kind < 0.3:
            members.append(symlink(name, "t" * dice.randrange(1, 4096)))
        else:
            size = dice.choice([0, 1, 100, 4095, 4096, 4097, 8192, 70_000])
            extra = {f"SCHILY.xattr.user.{i}": "v" * dice.randrange(300) for i in range(dice.choice([0, 0, 0, 1, 20]))}
            members.append(file(name, dice.randbytes(size), uid=dice.randrange(2**32 - 1), pax_headers=extra))
    record = shelf.import_image("a", archive(tmp_path, members))
    checked(shelf, record.digest)
    wanted = {info.name: hashlib.sha256(data).digest() for info, data in members if info.isreg()}
    with mounted(shelf, record.digest, tmp_path / "m") as m:
        found = {}
        for place, _, names in os.walk(m):
            for name in names:
                path = Path(place) / name
                if not path.is_symlink() and path.is_file():
                    found[str(path.relative_to(m))] = hashlib.sha256(path.read_bytes()).digest()
    assert found == wanted


@pytest.mark.slow
def test_past_two_and_four_gibibytes(shelf: Shelf, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"before")
    with (root / "big").open("wb") as big:
        for at in (0, (2 << 30) - 1, 2 << 30, (4 << 30) + 5, (5 << 30) - 3):
            big.seek(at)
            big.write(b"mark")
    (root / "z").write_bytes(b"after")
    record = shelf.import_image("big", root)
    assert shelf.layers.directory(record.digest).joinpath(DATA).stat().st_blocks * 512 < 32 << 20
    checked(shelf, record.digest)


@pytest.mark.slow
def test_three_hundred_thousand_files(shelf: Shelf, tmp_path: Path) -> None:
    members = [folder(f"d{n}") for n in range(300)]
    members += [file(f"d{n % 300}/f{n}", b"%d" % n) for n in range(300_000)]
    record = shelf.import_image("many", archive(tmp_path, members))
    checked(shelf, record.digest)


async def images(shelf: Shelf, **config: float) -> NodeImages:
    node = NodeImages(shelf.state, shelf.layers, shelf.names, CLOCK, config=ImagesSettings(**config))  # type: ignore[arg-type]
    await node.open()
    return node


async def test_a_layer_given_up_while_it_was_being_mounted_is_nobodys_mount(shelf: Shelf, tmp_path: Path) -> None:
    shelf.import_image("base", archive(tmp_path, [file("f", b"base")]))
    node = await images(shelf, idle_mounts=0)
    composition = node.compose("base", None, [])
    for turns in range(4):
        holding = asyncio.ensure_future(node.mounts(composition, "s"))
        for _ in range(turns):
            await asyncio.sleep(0)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        await node.release("s")
        assert mounted_below(shelf.state / "mnt") == []
    assert len(await node.mounts(composition, "s")) == 1
    await node.release("s")
    assert mounted_below(shelf.state / "mnt") == []


async def test_layers_are_mounted_once_held_and_let_go(shelf: Shelf, tmp_path: Path) -> None:
    shelf.import_image("base", archive(tmp_path, [file("f", b"base" * 3000)]))
    shelf.build(BuildArgs(LayerKind.TOOLKIT, "t@1", archive(tmp_path, [file("opt/t", b"tool")])))
    shelf.build(BuildArgs(LayerKind.DATA, "set@1", archive(tmp_path, [file("rows", b"data")])))
    node = await images(shelf, idle_mounts=0)
    composition = node.compose("base", None, ["t@1"])
    one = await node.mounts(composition, "s1")
    # An image's set-uid files are out of reach of the host's other users.
    assert stat.S_IMODE((shelf.state / "mnt").stat().st_mode) == 0o700
    two = await node.mounts(composition, "s2")
    assert one == two and len(mounted_below(shelf.state / "mnt")) == 2
    assert (Path(one[0].source) / "f").read_bytes() == b"base" * 3000
    assert node.bytes_read(composition.layers[0]) == 12288
    (data,) = await node.extra([MountSpec(target="/data", data="set@1")], "s1")
    assert (data.target, data.read_only, (Path(data.source) / "rows").read_bytes()) == ("/data", True, b"data")
    await node.release("s1")
    assert len(mounted_below(shelf.state / "mnt")) == 2
    # A second process of this node, as after a crash, takes the mounts over.
    after = await images(shelf, idle_mounts=10)
    assert len(mounted_below(shelf.state / "mnt")) == 2
    assert await after.mounts(composition, "s2") == two
    await after.release("s2")
    # Somebody else has unmounted one: that is nothing to fail for.
    umount(two[0].source)
    await after.release("s2")
    assert len(mounted_below(shelf.state / "mnt")) == 1
    await after.close()
    assert mounted_below(shelf.state / "mnt") == []


async def test_what_a_killed_verify_left_is_removed(shelf: Shelf, tmp_path: Path) -> None:
    digest = shelf.import_image("base", archive(tmp_path, [file("f", b"1")])).digest
    left = shelf.state / "tmp/import-dead"
    (left / "mnt").mkdir(parents=True)
    source = shelf.layers.directory(digest)
    mount_erofs(str(source / META), str(source / DATA), str(left / "mnt"))
    await (await images(shelf)).close()
    assert not left.exists()


async def test_what_cannot_be_composed_or_mounted(shelf: Shelf, tmp_path: Path) -> None:
    record = shelf.import_image("base", archive(tmp_path, [file("f", b"1")]))
    node = await images(shelf)
    for call, error in (
        (lambda: node.compose("missing", None, []), NotFound),
        (lambda: node.compose("base", "base", []), Conflict),
    ):
        with pytest.raises(error):
            call()
    with pytest.raises(NotFound):
        await node.extra([MountSpec(target="/v", volume="v")], "s")
    with pytest.raises(InvalidArgument):
        await node.extra([MountSpec(target="/v")], "s")
    composition = node.compose("base", None, [])
    data = shelf.layers.directory(record.digest) / DATA
    data.write_bytes(data.read_bytes() + b"\0")
    with pytest.raises(ImageUnavailable, match="manifest says"):
        await node.mounts(composition, "s")
    data.unlink()
    with pytest.raises(ImageUnavailable):
        await node.mounts(composition, "s")
    assert node.held() == frozenset() and mounted_below(shelf.state / "mnt") == []


async def test_a_state_directory_with_a_long_path(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / ("s" * 100) / ("t" * 100))
    shelf.import_image("base", archive(tmp_path, [file("f", b"1")]))
    node = await images(shelf)
    (layer,) = await node.mounts(node.compose("base", None, []), "s")
    assert (Path(layer.source) / "f").read_bytes() == b"1"
    await node.release("s")
    await node.close()
    with pytest.raises(ImageUnavailable, match="comma"):
        await images(Shelf(tmp_path / "with,comma"))


def packages() -> list[str]:
    """Thirty installed Debian packages of many kinds: by name, every n-th of those that hold more than folders."""
    if shutil.which("dpkg-query") is None:
        return []
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Installed-Size}\n"], check=True, capture_output=True, text=True
    )
    rows = (line.split() for line in listed.stdout.splitlines())
    names = sorted(row[0] for row in rows if len(row) == 2 and 100 < int(row[1]) < 20_000)
    return names[:: max(1, len(names) // 30)][:30]


@pytest.mark.slow
@pytest.mark.skipif(len(packages()) < 30, reason="needs 30 Debian packages")
def test_thirty_images_of_real_packages(shelf: Shelf, tmp_path: Path) -> None:
    for package in packages():
        listed = subprocess.run(["dpkg-query", "-L", package], check=True, capture_output=True, text=True).stdout
        paths = [line for line in listed.splitlines() if os.path.lexists(line) and line != "/."]
        (tmp_path / "list").write_text("\n".join(path.lstrip("/") for path in paths))
        tarball = tmp_path / "package.tar"
        command = [
            "tar",
            "-C",
            "/",
            "--no-recursion",
            "--xattrs",
            "--format=posix",
            "-T",
            tmp_path / "list",
            "-cf",
            tarball,
        ]
        subprocess.run(command, check=True, capture_output=True)
        record = shelf.import_image(package, tarball)
        checked(shelf, record.digest)
        with mounted(shelf, record.digest, tmp_path / "m") as m:
            for path in paths:
                there = m / path.lstrip("/")
                if os.path.isfile(path) and not os.path.islink(path):
                    assert there.read_bytes() == Path(path).read_bytes(), path
                    assert os.lstat(there).st_mtime_ns == os.lstat(path).st_mtime_ns
        shelf.names.remove(package)


def shown(root: Path) -> dict[str, tuple[object, ...]]:
    """All that a process sees below `root`: attributes, bytes, targets, and which names are one inode."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for path in sorted([root, *root.rglob("*")]):
        name, at = str(path.relative_to(root)), path.lstat()
        inode = first.setdefault(at.st_ino, name) if not stat.S_ISDIR(at.st_mode) else name
        held: object = path.read_bytes() if stat.S_ISREG(at.st_mode) else b""
        held = os.readlink(path) if stat.S_ISLNK(at.st_mode) else held
        links = 0 if stat.S_ISDIR(at.st_mode) else at.st_nlink
        found[name] = (at.st_mode, at.st_uid, at.st_mtime_ns, links, inode, held)
    return found


async def test_an_image_of_several_layers_shows_what_one_layer_shows(shelf: Shelf, tmp_path: Path) -> None:
    layers = [
        tar([folder("d", mode=0o750, uid=7), file("d/a", b"a" * 9000), file("d/b", b"b"), link("d/link", "d/a"), folder("gone"),
             file("gone/x"), symlink("s", "d"), folder("opaque"), file("opaque/old"), file("kind", b"file")]),
        tar([file("s/through", b"1"), file(".wh.gone"), file("d/a", b"new"), file("opaque/.wh..wh..opq"), file("opaque/new", b"2")]),
        tar([folder("kind"), file("kind/inside", b"3"), file("d/.wh.b"), link("d/more", "d/link"), folder("gone", mode=0o700)]),
        tar([file("kind/.wh.inside"), file("d/c", b"4", mode=0o600)]),
    ]  # fmt: skip
    write_layout(tmp_path / "layout", layout_files(image(layers)))
    whole = shelf.import_image("whole", tmp_path / "layout").digest
    parts = shelf.import_image("parts", tmp_path / "layout", config=ImportConfig(merge_bytes=0)).digest
    node = NodeImages(shelf.state, shelf.layers, shelf.names, CLOCK)
    await node.open()
    try:
        composition = node.compose("parts", None, [])
        assert composition.layers == (*shelf.layers.manifest(parts).below, parts) and len(composition.layers) > 2
        mounts = await node.mounts(composition, "me")
        over = tmp_path / "over"
        over.mkdir()
        mount("dsec-test", str(over), "overlay", 1, "lowerdir=" + ":".join(m.source for m in reversed(mounts)))
        try:
            with mounted(shelf, whole, tmp_path / "one") as one:
                assert shown(over) == shown(one)
        finally:
            umount(str(over))
        await node.release("me")
    finally:
        await node.close()
    for digest in composition.layers:
        checked(shelf, digest)
