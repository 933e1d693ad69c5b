"""Hostile images: whatever an archive says, nothing of the host is read or written but the store (threat: image content)."""

import gzip
import os
import struct
import tarfile
from pathlib import Path

import pytest

from dsec.images.importing import BuildArgs
from dsec.images.inputs import ImportConfig
from dsec.images.making import FILES
from dsec.images.records import read_records
from dsec.model.errors import DSecError, InvalidArgument
from dsec.model.layers import LayerKind
from imagekit import Shelf, file, folder, image, layout_files, link, other, symlink, tar, write_layout


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    (tmp_path / "secret").write_bytes(b"untouched")
    return Shelf(tmp_path / "node/state")


def listing(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """All below `root` but the store: kind and mode, size, content."""
    found = {}
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if Path(place, name) != root / "node"]
        for name in names:
            path = Path(place, name)
            status = path.lstat()
            found[str(path)] = (status.st_mode, status.st_size, b"" if path.is_symlink() else path.read_bytes())
    return found


def seen(shelf: Shelf, digest: str) -> dict[str, bytes]:
    records = read_records(shelf.layers.directory(digest) / FILES)
    return {r.path.decode(): r.target for r in records}


def hostile(tmp_path: Path) -> dict[str, list[tuple[tarfile.TarInfo, bytes]]]:
    secret = str(tmp_path / "secret")
    return {
        "parent": [file("../secret", b"x")], "deep parent": [file("a/b/../../../secret", b"x")], "absolute": [file(secret, b"x")],
        "absolute folder": [folder("/tmp/x")], "hard link out": [link("l", "../secret")], "hard link absolute": [link("l", secret)],
        "nul": [file("a", b"", pax_headers={"path": "a\0b"})], "overlay whiteout": [other("w", tarfile.CHRTYPE)],
        "overlay attribute": [file("a", pax_headers={"SCHILY.xattr.trusted.overlay.redirect": "/etc"})],
        "overlay attribute of users": [file("a", pax_headers={"SCHILY.xattr.user.overlay.metacopy": ""})],
        "long name": [file("n" * 256)], "long path": [file("p/" * 2100 + "x")], "odd whiteout": [file("d/.wh..", b"")],
        "whiteout out": [file("../.wh.secret")], "owner": [file("a", uid=2**32 - 1)], "loop": [symlink("a", "a"), file("a/b")],
    }  # fmt: skip


@pytest.mark.parametrize("case", sorted(hostile(Path("/x"))))
def test_each_refusal_is_named_and_leaves_nothing(shelf: Shelf, tmp_path: Path, case: str) -> None:
    members = [file("before", b"1"), *hostile(tmp_path)[case]]
    source = tmp_path / "in.tar"
    source.write_bytes(tar(members))
    before = listing(tmp_path)
    with pytest.raises(InvalidArgument) as refusal:
        shelf.import_image("x", source)
    assert refusal.value.detail and "\0" not in refusal.value.detail and len(refusal.value.detail) < 500
    for kind in (LayerKind.WORKSPACE, LayerKind.DATA):
        with pytest.raises(InvalidArgument):
            shelf.build(BuildArgs(kind, "x", source))
    assert listing(tmp_path) == before
    assert shelf.layers.digests() == [] and shelf.names.all() == []
    assert os.listdir(shelf.state / "tmp") == [".lock"]


def test_symlinks_lead_nowhere_but_into_the_image(shelf: Shelf, tmp_path: Path) -> None:
    members = [
        symlink("out", str(tmp_path)), file("out/secret", b"replaced"), symlink("up", "../../../../.."), file("up/up-file", b"x"),
        symlink("abs", "/usr/bin/python3"), file("/".join(["d"] * 300) + "/deep", b"x"), other("pipe", tarfile.FIFOTYPE),
        other("disk", tarfile.BLKTYPE, devmajor=8, devminor=0),
    ]  # fmt: skip
    source = tmp_path / "in.tar"
    source.write_bytes(tar(members))
    before = listing(tmp_path)
    found = seen(shelf, shelf.import_image("x", source).digest)
    assert listing(tmp_path) == before
    assert str(tmp_path / "secret").lstrip("/") in found and "up-file" in found
    assert found["abs"] == b"/usr/bin/python3" and found["out"] == str(tmp_path).encode()
    # The store holds its own five files under the digest's name, and nothing with a name from the archive.
    (layer,) = (shelf.state / "layers").glob("[0-9a-f]*")
    assert sorted(os.listdir(layer)) == ["data", "files.zst", "index", "manifest.json", "meta.erofs"]


def test_a_layout_cannot_name_files_of_the_host(shelf: Shelf, tmp_path: Path) -> None:
    made = image([tar([file("a", b"1")])])
    for digest in ("sha256:../../../secret", "../../secret", "sha512:" + "0" * 128):
        files = layout_files(made, b'{"manifests":[{"digest":"%s","size":9}]}' % digest.encode())
        with pytest.raises(InvalidArgument, match="digest"):
            shelf.import_image("x", write_layout(tmp_path / "l", files))
        (tmp_path / "l.tar").write_bytes(tar([file(name, raw) for name, raw in files.items()]))
        with pytest.raises(InvalidArgument, match="digest"):
            shelf.import_image("x", tmp_path / "l.tar")
    members = [symlink("c.json", "../../secret"), file("manifest.json", b'[{"Config":"c.json","Layers":[]}]')]
    (tmp_path / "saved.tar").write_bytes(tar(members))
    with pytest.raises(InvalidArgument, match="missing"):
        shelf.import_image("x", tmp_path / "saved.tar")


def test_bombs_end_at_their_bounds(tmp_path: Path) -> None:
    shelf = Shelf(
        tmp_path / "state",
        ImportConfig(archive_bytes=4 << 20, content_bytes=4 << 20, entries=100, header_bytes=1 << 16),
    )
    zeros = gzip.compress(bytes(64 << 20))
    cases = [
        zeros, tar([file(f"f{i}") for i in range(101)]), tar([file("f", b"", pax_headers={"comment": "c" * 70_000})]),
        tar([file("s", b"1\n0\n1\n".ljust(512) + b"x", pax_headers={
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 60)})]),
        gzip.compress(gzip.compress(b"x")), struct.pack("<I", 0xFD2FB528) + b"\xff" * 100,
    ]  # fmt: skip
    for number, raw in enumerate(cases):
        (tmp_path / f"{number}").write_bytes(raw)
        with pytest.raises(DSecError):
            shelf.import_image("x", tmp_path / f"{number}")
    assert os.listdir(shelf.state / "tmp") == [".lock"]
    documents = Shelf(tmp_path / "other", ImportConfig(document_bytes=100))
    with pytest.raises(InvalidArgument, match="document"):
        documents.import_image("x", write_layout(tmp_path / "l", layout_files(image([tar([file("a")])]))))
    with pytest.raises(InvalidArgument):
        shelf.import_image("x", write_layout(tmp_path / "nested", {"oci-layout": b"{}", "index.json": b"[" * 100_000}))
