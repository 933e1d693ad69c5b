"""Directories read by descriptor: links, attributes, owners; nothing through a symlink."""

import os
import socket
from pathlib import Path

import pytest

from dsec.images.directory import DirectoryInput
from dsec.images.inputs import ImportConfig, Notes
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound
from dsec.model.tree import EntryKind


def entries(path: Path, notes: Notes | None = None, **more: object) -> tuple[DirectoryInput, dict[str, object]]:
    source = DirectoryInput(path, number=0, config=ImportConfig(), notes=notes or Notes(), **more)  # type: ignore[arg-type]
    return source, {e.path.decode(): e for e in source.entries()}


def test_all_kinds(tmp_path: Path) -> None:
    root = tmp_path / "r"
    (root / "d/e").mkdir(parents=True)
    (root / "d/f").write_bytes(b"data")
    os.utime(root / "d/f", ns=(0, -1_500_000_001))
    os.link(root / "d/f", root / "d/g")
    os.symlink("/etc/passwd", root / "s")
    os.symlink("..", root / "up")
    os.mkfifo(root / "p")
    os.setxattr(root / "d/f", "user.a", b"\0\xff")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "sock"))
        notes = Notes()
        source, found = entries(root, notes, owner=(5, 6))
    assert set(found) == {"", "d", "d/e", "d/f", "d/g", "s", "up", "p"}
    f, g, s = found["d/f"], found["d/g"], found["s"]
    assert (f.mtime, f.mtime_ns, f.uid, f.gid) == (-2, 499_999_999, 5, 6)  # type: ignore[attr-defined]
    assert f.xattrs == ((b"user.a", b"\0\xff"),)  # type: ignore[attr-defined]
    assert (g.kind, g.target) == (EntryKind.LINK, b"d/f")  # type: ignore[attr-defined]
    assert (s.kind, s.target) == (EntryKind.SYMLINK, b"/etc/passwd")  # type: ignore[attr-defined]
    assert any("sockets" in note for note in notes.all())
    assert b"".join(source.read(f.content)) == b"data"  # type: ignore[attr-defined]
    source.close()


def test_a_file_or_folder_swapped_meanwhile_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "r", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    for place in (root / "d", outside):
        (place / "f").write_bytes(b"secret")
    (root / "x").write_bytes(b"123456")
    source, found = entries(root)
    (root / "d/f").unlink()
    (root / "d").rmdir()
    (root / "d").symlink_to(outside)
    (root / "x").unlink()
    (root / "x").symlink_to(outside / "f")
    for name in ("d/f", "x"):
        with pytest.raises(ImageUnavailable):
            list(source.read(found[name].content))  # type: ignore[attr-defined]
    source.close()


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1234")
    source, found = entries(tmp_path)
    (tmp_path / "f").write_bytes(b"12345")
    with pytest.raises(ImageUnavailable, match="changed"):
        list(source.read(found["f"].content))  # type: ignore[attr-defined]
    (tmp_path / "f").unlink()
    os.mkfifo(tmp_path / "f")
    with pytest.raises(ImageUnavailable, match="changed"):
        list(source.read(found["f"].content))  # type: ignore[attr-defined]
    source.close()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        entries(tmp_path / "missing")
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(InvalidArgument):
        entries(tmp_path / "f")
