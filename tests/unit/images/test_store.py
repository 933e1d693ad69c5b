"""The store: equal input, equal digests; a killed import leaves nothing; names; what is collected."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dsec.images import blob
from dsec.images.collect import collect
from dsec.images.importing import BuildArgs
from dsec.images.inputs import ImportConfig
from dsec.images.making import DATA, FILES, INDEX, META
from dsec.images.records import read_records
from dsec.model.errors import Conflict, ImageUnavailable, InvalidArgument, NotFound
from dsec.model.layers import LayerKind
from dsec.model.tree import EntryKind
from imagekit import Shelf, file, folder, image, layout_files, link, symlink, tar, write_layout

BIG = os.urandom(3 << 20)
MEMBERS = [
    folder("d"), file("d/a", b"alpha"), file("d/copy", b"alpha"), link("d/link", "d/a"), file("empty"), symlink("s", "d/a"),
    file("big", BIG), file("big-copy", BIG), file("big-other", BIG[::-1]), file("zeros", bytes(5 << 20)),
]  # fmt: skip


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


def archive(folder: Path, members: object = None, name: str = "root.tar") -> Path:
    path = folder / name
    path.write_bytes(tar(members or MEMBERS))  # type: ignore[arg-type]
    return path


def test_equal_input_equal_digests_and_contents_once(shelf: Shelf, tmp_path: Path) -> None:
    first = shelf.import_image("a", archive(tmp_path))
    again = Shelf(tmp_path / "other").import_image("b", archive(tmp_path, name="renamed.tar"))
    assert first.digest == again.digest
    manifest = shelf.layers.manifest(first.digest)
    assert manifest.content_bytes == 5 * 3 + 3 * len(BIG) + (5 << 20)
    assert manifest.data.size == 4096 + 2 * len(BIG) + (5 << 20)
    place = shelf.layers.directory(first.digest)
    assert {entry.name for entry in place.iterdir()} == {DATA, META, FILES, INDEX, "manifest.json"}
    # The zeros are a hole.
    assert (place / DATA).stat().st_blocks * 512 < 3 * len(BIG)
    found = {r.path: r for r in read_records(place / FILES)}
    assert found[b"d/a"].offset == found[b"d/copy"].offset == found[b"d/link"].offset
    assert found[b"d/a"].group == found[b"d/link"].group != found[b"d/copy"].group
    assert found[b"big"].offset == found[b"big-copy"].offset != found[b"big-other"].offset
    assert not list((shelf.state / "tmp").glob("import-*"))
    changed = shelf.import_image("a", archive(tmp_path, [*MEMBERS[:1], file("d/a", b"Alpha")]))
    assert changed.digest != first.digest


def test_a_failed_import_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    bad = archive(tmp_path, [file("ok", b"1" * 100_000), file("../escape", b"2")])
    with pytest.raises(InvalidArgument, match="escape"):
        shelf.import_image("x", bad)
    small = Shelf(tmp_path / "small", ImportConfig(content_bytes=1000))
    with pytest.raises(InvalidArgument):
        small.import_image("x", archive(tmp_path))
    for each in (shelf, small):
        assert each.layers.digests() == [] and each.names.all() == []
        assert not list((each.state / "tmp").glob("import-*"))
    assert not (tmp_path.parent / "escape").exists()


KILLED = """
import os, sys
sys.path.insert(0, "tests")
from pathlib import Path
from imagekit import Shelf, Quiet
import dsec.images.importing as importing
when = int(sys.argv[3])
class Killing(Quiet):
    steps = 0
    def step(self, what, total):
        Killing.steps += 1
        if Killing.steps == when:
            os.kill(os.getpid(), 9)
    def add(self, count):
        Killing.steps += 1
        if Killing.steps == when:
            os.kill(os.getpid(), 9)
importing.Quiet = Killing
import imagekit
imagekit.Quiet = Killing
Shelf(Path(sys.argv[1])).import_image("x", Path(sys.argv[2]))
"""


def test_a_killed_import_publishes_nothing_and_is_cleaned_up(shelf: Shelf, tmp_path: Path) -> None:
    source, killed = archive(tmp_path), 0
    for when in range(1, 40, 3):
        command = [sys.executable, "-c", KILLED, str(shelf.state), str(source), str(when)]
        code = subprocess.run(command, check=False, cwd=Path(__file__).parents[3]).returncode
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        assert shelf.layers.digests() == [] and shelf.names.all() == []
    assert killed >= 3
    shelf.import_image("x", source)
    assert len(shelf.layers.digests()) == 1
    assert not list((shelf.state / "tmp").glob("import-*"))


def test_a_living_imports_folder_is_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    other = Shelf(shelf.state)
    with shelf.layers.scratch() as mine:
        (mine / "f").write_bytes(b"")
        with other.layers.scratch() as theirs:
            assert mine != theirs and (mine / "f").exists()
        assert (mine / "f").exists()


def test_names(shelf: Shelf, tmp_path: Path) -> None:
    record = shelf.import_image("registry.example/python:3.11", archive(tmp_path))
    shelf.names.tag("registry.example/python:3.11", "py@1")
    shelf.names.tag(record.digest, "by-digest")
    assert [r.name for r in shelf.names.all()] == ["by-digest", "py@1", "registry.example/python:3.11"]
    # Another process sees a changed name at once, and so does one that has looked before.
    reader = Shelf(shelf.state)
    assert reader.names.record("py@1").digest == record.digest
    shelf.import_image("py@1", archive(tmp_path, [file("x")]))
    assert reader.names.record("py@1").digest != record.digest
    assert reader.names.resolve("by-digest", LayerKind.BASE)[0] == record.digest
    with pytest.raises(Conflict):
        reader.names.resolve("by-digest", LayerKind.TOOLKIT)
    shelf.names.remove("by-digest")
    for missing in ("by-digest", "sha256:" + "0" * 64):
        with pytest.raises(NotFound):
            reader.names.record(missing)
    with pytest.raises(NotFound):
        shelf.names.remove("by-digest")
    assert {view.layer.kind for view in reader.names.views()} == {"base"}
    for bad in ("", "a/../b", "/abs", "a b", "ü", "-a", "a" * 129, "sha256:x", ".hidden", "a\n", "a//b"):
        with pytest.raises(InvalidArgument):
            shelf.import_image(bad, archive(tmp_path))


def test_collecting_keeps_what_has_a_name(shelf: Shelf, tmp_path: Path) -> None:
    kept = shelf.import_image("kept", archive(tmp_path)).digest
    gone = shelf.import_image("gone", archive(tmp_path, [file("x", b"1")])).digest
    shelf.names.remove("gone")
    assert collect(shelf.state, shelf.layers, shelf.names, dry_run=True).removed == (gone,)
    assert shelf.layers.digests() == sorted([kept, gone])
    done = collect(shelf.state, shelf.layers, shelf.names)
    assert done.removed == (gone,) and done.freed_bytes > 0
    assert shelf.layers.digests() == [kept]
    with pytest.raises(NotFound):
        shelf.layers.manifest(gone)


def test_a_damaged_manifest_is_noticed(shelf: Shelf, tmp_path: Path) -> None:
    digest = shelf.import_image("x", archive(tmp_path)).digest
    path = shelf.layers.directory(digest) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"base", b"data"))
    with pytest.raises(ImageUnavailable):
        Shelf(shelf.state).layers.manifest(digest)
    shutil.rmtree(path.parent)
    with pytest.raises(ImageUnavailable):
        Shelf(shelf.state).names.resolve("x", LayerKind.BASE)


def test_building_a_workspace(shelf: Shelf, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/f").write_bytes(b"1")
    os.link(tree / "sub/f", tree / "sub/g")
    (tree / ".wh.old").write_bytes(b"")
    record = shelf.build(BuildArgs(LayerKind.WORKSPACE, "w@1", tree, b"/opt/app/", (1000, 1001), (b"etc/motd",)))
    records = read_records(shelf.layers.directory(record.digest) / FILES)
    found = {r.path.decode(): r for r in records}
    assert set(found) == {
        "",
        "etc",
        "etc/motd",
        "opt",
        "opt/app",
        "opt/app/old",
        "opt/app/sub",
        "opt/app/sub/f",
        "opt/app/sub/g",
    }
    assert found["opt/app/sub/f"].group == found["opt/app/sub/g"].group != 0
    assert (found["opt/app/sub"].uid, found["opt/app/sub"].gid, found["opt"].uid) == (1000, 1001, 0)
    assert found["etc/motd"].kind == found["opt/app/old"].kind == EntryKind.CHAR
    same = shelf.build(
        BuildArgs(LayerKind.TOOLKIT, "t@1", archive(tmp_path, [folder("./", mode=0o700), file("bin/x")]))
    )
    records = read_records(shelf.layers.directory(same.digest) / FILES)
    assert next(records).mode == 0o755
    for args in (
        BuildArgs(LayerKind.BASE, "b", tree), BuildArgs(LayerKind.DATA, "d", tree, b"opt"),
        BuildArgs(LayerKind.WORKSPACE, "w", tree, b"../x"), BuildArgs(LayerKind.WORKSPACE, "w", tree, whiteouts=(b"../x",)),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            shelf.build(args)
    with pytest.raises(NotFound):
        shelf.build(BuildArgs(LayerKind.DATA, "d", tmp_path / "missing"))


def test_a_manifest_says_nothing_of_when_and_where(shelf: Shelf, tmp_path: Path) -> None:
    record = shelf.import_image("x", archive(tmp_path))
    raw = msgspec.json.encode(shelf.layers.manifest(record.digest))
    assert b"root.tar" not in raw and b"created" not in raw
    assert record.origin.endswith("root.tar") and record.created > 0


def layered(count: int) -> list[bytes]:
    """Layers of an image, each with a file of 2 MiB of its own, and changes of the ones below."""
    dice = random.Random(1)
    layers = [tar([folder("d"), *(file(f"d/{n}", dice.randbytes(2 << 20)) for n in range(2)), link("d/also", "d/0")])]
    for n in range(1, count):
        layers.append(tar([file(f"l{n}", dice.randbytes(2 << 20)), file(f"d/.wh.{n}"), file("d/0", b"%d" % n)]))
    return layers


def test_large_images_become_several_layers(shelf: Shelf, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", layout_files(image(layered(3), run={"Env": ["A=b"]})))
    whole = shelf.import_image("whole", tmp_path / "layout", config=ImportConfig(merge_bytes=100 << 20))
    assert shelf.layers.manifest(whole.digest).below == ()
    parts = shelf.import_image("parts", tmp_path / "layout", config=ImportConfig(merge_bytes=6 << 20))
    again = Shelf(tmp_path / "other").import_image("x", tmp_path / "layout", config=ImportConfig(merge_bytes=6 << 20))
    top = shelf.layers.manifest(parts.digest)
    assert again.digest == parts.digest and len(top.below) == 1 and top.config.env == ("A=b",)
    lower = shelf.layers.manifest(top.below[0])
    assert lower.below == () and lower.config.env == ()
    found = {r.path: r for r in read_records(shelf.layers.directory(parts.digest) / FILES)}
    # The names of an inode whose names changed come up together, what is gone is a whiteout, and nothing else is there.
    assert set(found) == {b"", b"d", b"d/0", b"d/also", b"d/1", b"l1", b"l2"} and found[b"d/1"].kind == EntryKind.CHAR
    views = {view.name: view.layer for view in shelf.names.views()}
    assert views["parts"].content_bytes >= views["whole"].content_bytes
    # An image is kept whole, or goes whole.
    shelf.names.remove("whole")
    assert collect(shelf.state, shelf.layers, shelf.names).removed == (whole.digest,)
    assert set(shelf.layers.digests()) == {parts.digest, *top.below}
    shelf.names.remove("parts")
    assert set(collect(shelf.state, shelf.layers, shelf.names).removed) == {parts.digest, *top.below}


def test_neither_compression_nor_the_way_of_working_is_in_a_digest(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = layered(3)
    found = set()
    for number, packing in enumerate(("", "+gzip", "+zstd", "")):
        write_layout(tmp_path / str(number), layout_files(image(layers, packing)))
        if number == 3:
            monkeypatch.setattr(blob, "_WORKERS", 1)
            monkeypatch.setattr(blob, "_PIECE", 50_000)
            monkeypatch.setattr(blob, "_SMALL", 3000)
        record = shelf.import_image(f"n{number}", tmp_path / str(number), config=ImportConfig(merge_bytes=6 << 20))
        found.add(record.digest)
    assert len(found) == 1
