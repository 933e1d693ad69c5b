"""A writable layer as a layer: what overlayfs left there is translated, what a tenant left there is bounded. As root: devices are made."""

import os
import socket
from pathlib import Path

import pytest

from dsec.images.inputs import ImportConfig, Notes
from dsec.images.upper import UpperInput
from dsec.model.errors import InvalidArgument
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR
from dsec.rules.scrub import Scrub

pytestmark = pytest.mark.root
K = EntryKind


class Read:
    """What was read of an upper directory."""

    def __init__(self, path: Path, config: ImportConfig | None = None, scrub: Scrub | None = None) -> None:
        self.notes = Notes()
        source = UpperInput(
            path, number=0, config=config or ImportConfig(), notes=self.notes, scrub=scrub or Scrub([], [])
        )
        try:
            self.entries: list[TreeEntry] = list(source.entries())
            self.content = {e.path: b"".join(source.read(e.content)) for e in self.entries if e.content is not None}
            self.kept, self.scrubbed, self.whiteouts = source.kept, source.scrubbed, source.whiteouts
        finally:
            source.close()

    @property
    def paths(self) -> list[str]:
        return [os.fsdecode(e.path) for e in self.entries]

    def __getitem__(self, path: str) -> TreeEntry:
        return next(e for e in self.entries if e.path == os.fsencode(path))


def made(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_and_attributes_are_as_the_sandbox_sees_them(tmp_path: Path) -> None:
    file = made(tmp_path / "w/d/f", "hello")
    os.chown(file, 1000, 65535)
    os.chmod(file, 0o4711)  # after it: a change of owner takes set-uid away
    os.utime(file, ns=(0, 1_600_000_000_123_456_789))
    os.setxattr(file, "user.note", b"v")
    (tmp_path / "w/l").symlink_to("../gone")
    os.mkfifo(tmp_path / "w/p")
    read = Read(tmp_path)
    entry = read["w/d/f"]
    assert (entry.mode, entry.uid, entry.gid, entry.mtime, entry.mtime_ns) == (
        0o4711,
        1000,
        65535,
        1_600_000_000,
        123_456_789,
    )
    assert entry.xattrs == ((b"user.note", b"v"),)
    assert read.content[b"w/d/f"] == b"hello"
    assert (read["w/l"].kind, read["w/l"].target, read["w/p"].kind) == (K.SYMLINK, b"../gone", K.FIFO)


def test_entries_are_in_the_order_of_a_layer(tmp_path: Path) -> None:
    for name in ("a/z", "a.b", "a/c/d", "a-b/x", "B"):
        made(tmp_path / name)
    assert Read(tmp_path).paths == ["", "B", "a", "a/c", "a/c/d", "a/z", "a-b", "a-b/x", "a.b"]


def test_deletions_and_folders_that_hide_stay_in_overlayfss_form(tmp_path: Path) -> None:
    os.mknod(tmp_path / "gone", 0o600 | 0o020000, os.makedev(0, 0))
    os.link(tmp_path / "gone", tmp_path / "gone-too")  # overlayfs shares one inode between them
    made(tmp_path / "over/f")
    os.setxattr(tmp_path / "over", "trusted.overlay.opaque", b"y")
    os.setxattr(tmp_path / "over", "trusted.overlay.origin", b"o")
    os.setxattr(tmp_path / "over/f", "user.overlay.redirect", b"/etc")
    read = Read(tmp_path)
    for name in ("gone", "gone-too"):
        assert (read[name].kind, read[name].rdev, read[name].group) == (K.CHAR, (0, 0), 0)
    assert read["over"].xattrs == (OPAQUE_XATTR,)
    assert read["over/f"].xattrs == ()
    assert read.whiteouts == 2
    assert "user.overlay." in read.notes.all()[0]


def test_names_of_whiteout_form_are_names(tmp_path: Path) -> None:
    made(tmp_path / ".wh.x")
    assert Read(tmp_path).paths == ["", ".wh.x"]


def test_hard_links_are_one_inode_though_some_are_scrubbed(tmp_path: Path) -> None:
    made(tmp_path / "a")
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "tmp").mkdir()
    os.link(tmp_path / "a", tmp_path / "tmp/c")
    read = Read(tmp_path)
    assert read.paths == ["", "a", "b", "tmp"]
    assert read["a"].group == read["b"].group != 0


def test_what_is_scrubbed_is_counted_and_what_is_kept_comes_with_its_folders(tmp_path: Path) -> None:
    made(tmp_path / "etc/hosts", "platform")
    made(tmp_path / "tmp/junk/deep", "12345")
    made(tmp_path / "tmp/keep/this/file", "123")
    made(tmp_path / "tmp/keep/this/other", "1")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.fspath(tmp_path / "s"))
    server.close()
    read = Read(tmp_path, scrub=Scrub([], ["/tmp/keep/*/file", "/s"]))
    assert read.paths == ["", "etc", "tmp", "tmp/keep", "tmp/keep/this", "tmp/keep/this/file"]
    assert read.content == {b"tmp/keep/this/file": b"123"}
    counted = {name: (each.entries, each.bytes) for name, each in read.scrubbed.items()}
    assert counted == {"/etc/hosts": (1, 8), "/tmp/**": (5, 6), "sockets": (1, 0)}
    assert (read.kept["/tmp/keep"].entries, read.kept["/tmp/keep"].bytes) == (1, 3)


def test_a_scrubbed_deletion_shows_again_what_is_beneath(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    os.mknod(tmp_path / "tmp/gone", 0o600 | 0o020000, os.makedev(0, 0))
    read = Read(tmp_path)
    assert (read.paths, read.whiteouts) == (["", "tmp"], 0)


@pytest.mark.parametrize("major", [1, 7])
def test_devices_are_refused(tmp_path: Path, major: int) -> None:
    os.mknod(tmp_path / "d", 0o600 | (0o020000 if major == 1 else 0o060000), os.makedev(major, 3))
    with pytest.raises(InvalidArgument, match="device"):
        Read(tmp_path)


@pytest.mark.parametrize("name", ["redirect", "metacopy"])
def test_what_only_other_mounts_make_is_refused(tmp_path: Path, name: str) -> None:
    os.setxattr(made(tmp_path / "f"), f"trusted.overlay.{name}", b"/x")
    with pytest.raises(InvalidArgument, match=name):
        Read(tmp_path)


def test_bounds_are_typed_errors(tmp_path: Path) -> None:
    for number in range(20):
        made(tmp_path / f"d/{number}", "x" * 10)
    with pytest.raises(InvalidArgument, match="more than 10 changed"):
        Read(tmp_path, ImportConfig(entries=10))
    with pytest.raises(InvalidArgument, match="100 bytes"):
        Read(tmp_path, ImportConfig(content_bytes=100))
    with made(tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 42)  # it holds nothing, and would be read for hours
    with pytest.raises(InvalidArgument, match="bytes"):
        Read(tmp_path, ImportConfig(content_bytes=1 << 30))


def test_one_inode_of_many_names_counts_once(tmp_path: Path) -> None:
    made(tmp_path / "a", "x" * 60)
    for number in range(5):
        os.link(tmp_path / "a", tmp_path / f"l{number}")
    assert len(Read(tmp_path, ImportConfig(content_bytes=100)).entries) == 7


def test_a_path_too_long_for_a_layer_is_refused(tmp_path: Path) -> None:
    place, name = os.open(tmp_path, os.O_RDONLY), "n" * 200
    for _ in range(21):
        os.mkdir(name, dir_fd=place)
        inner = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    with pytest.raises(InvalidArgument, match="4,096"):
        Read(tmp_path)


def test_names_that_are_no_text_are_kept(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("x")
    assert Read(tmp_path).entries[1].path == b"caf\xe9"
