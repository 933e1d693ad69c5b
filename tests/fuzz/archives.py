"""Archives into layers: dsec.images and dsec.rules.compose."""

import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from dsec.images.importing import Quiet, open_path
from dsec.images.index import ChunkIndex, encode_index, index_root
from dsec.images.inputs import ImportConfig, Notes
from dsec.images.manifests import decode_manifest, encode_manifest
from dsec.images.oci import Platform
from dsec.images.records import FileRecord, read_records, write_records
from dsec.images.spool import spool
from dsec.images.tar import TarInput
from dsec.model.errors import DSecError
from dsec.model.layers import Blob, LayerKind, LayerManifest
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import flatten, overlay_layer
from fuzz.draw import Draw
from fuzz.hostile import Archive, archive, packed
from imagekit import Shelf, sha

BOUNDS = ImportConfig(
    entries=200, content_bytes=1 << 20, archive_bytes=1 << 21, header_bytes=1 << 14, sparse_pieces=100, document_bytes=1 << 14,
    layers=8,
)  # fmt: skip
PLATFORM = Platform("linux", "amd64")
KINDS = {
    EntryKind.FILE: "isreg", EntryKind.DIR: "isdir", EntryKind.SYMLINK: "issym", EntryKind.LINK: "islnk", EntryKind.FIFO: "isfifo",
}  # fmt: skip


def read(raw: bytes) -> list[tuple[TreeEntry, bytes]] | None:
    """Every entry and its bytes; None where the archive is refused."""
    source = TarInput(io.BytesIO(raw), number=0, config=BOUNDS, notes=Notes())
    try:
        entries = list(source.entries())
        assert len(entries) <= BOUNDS.entries
        found = []
        for each in entries:
            pieces = list(source.read(each.content)) if each.content else []
            assert all(len(piece) <= 1 << 20 for piece in pieces)
            found.append((each, b"".join(pieces)))
            assert each.content is None or len(found[-1][1]) == each.content.size
    except DSecError:
        return None
    assert sum(len(data) for _, data in found) <= BOUNDS.content_bytes
    return found


def agrees(raw: bytes, found: list[tuple[TreeEntry, bytes]] | None) -> None:
    """The standard library's reader sees the same in an archive that means no harm."""
    assert found is not None
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", errorlevel=2) as other:
        members = other.getmembers()
        assert len(members) == len(found)
        for member, (entry, data) in zip(members, found, strict=True):
            assert os.fsencode(member.name) == entry.path.rstrip(b"/"), (member.name, entry.path)
            assert getattr(member, KINDS[entry.kind])(), (member.type, entry.kind)
            assert (member.mode & 0o7777, member.uid) == (entry.mode, entry.uid)
            assert member.mtime == entry.mtime + entry.mtime_ns / 1e9
            if entry.kind in (EntryKind.SYMLINK, EntryKind.LINK):
                assert os.fsencode(member.linkname) == entry.target
            if entry.kind is EntryKind.FILE:
                inside = other.extractfile(member)
                assert inside is not None and inside.read() == data


def tar(data: bytes) -> None:
    """Any archive: entries within the bounds or a typed error, and what tarfile reads where nobody lies."""
    made: Archive = archive(Draw(data))
    found = read(made.raw)
    if made.honest:
        agrees(made.raw, found)


def raw_tar(data: bytes) -> None:
    """Any bytes at all."""
    read(data)


def layers(data: bytes) -> None:
    """A few layers over each other: a tree that holds together, the same again when it is laid once more, or a refusal."""
    draw = Draw(data)
    raws = []
    while draw and len(raws) < 4:
        raws.append(archive(Draw(draw.bytes(draw.number(2) % 2048))).raw)
    found = [[entry for entry, _ in entries] for entries in map(read, raws) if entries is not None]
    try:
        tree = flatten([iter(entries) for entries in found])
    except DSecError:
        return
    whole(tree)
    assert flatten([iter([entry for entry in tree if entry.group == 0])]) == [e for e in tree if e.group == 0]
    for entries in found:
        try:
            whole(overlay_layer(iter(entries), ()))
        except DSecError:
            continue


def whole(tree: list[TreeEntry]) -> None:
    """The root first, every parent a directory above its children, no path twice, groups of one inode alike."""
    kinds: dict[bytes, EntryKind] = {}
    groups: dict[int, TreeEntry] = {}
    assert tree[0].path == b""
    for entry in tree:
        assert entry.path not in kinds
        if entry.path:
            parent = entry.path.rpartition(b"/")[0]
            assert kinds[parent] is EntryKind.DIR, entry.path
            assert not {b"", b".", b".."} & set(entry.path.split(b"/")) and b"\0" not in entry.path
        assert entry.kind is not EntryKind.LINK
        kinds[entry.path] = entry.kind
        if entry.group:
            first = groups.setdefault(entry.group, entry)
            assert (first.kind, first.content, first.xattrs) == (entry.kind, entry.content, entry.xattrs)


class Place:
    """A folder that is emptied between inputs, for a process that runs thousands of them."""

    def __init__(self) -> None:
        shm = Path("/dev/shm")
        self.path = Path(tempfile.mkdtemp(prefix="dsec-fuzz-", dir=shm if shm.is_dir() else None))

    def empty(self) -> Path:
        shutil.rmtree(self.path)
        self.path.mkdir(mode=0o700)
        return self.path


PLACE: list[Place] = []


def place() -> Path:
    if not PLACE:
        PLACE.append(Place())
    return PLACE[0].empty()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def unpack(data: bytes) -> None:
    """A compressed archive, as it may come from a registry: bounded, or refused; nothing is left open."""
    draw = Draw(data)
    at = draw.number(2) % 4096
    raw = packed(Draw(draw.bytes(64)), archive(Draw(draw.bytes(at))).raw) if draw.once_in(2) else draw.rest()
    folder, before = place(), open_descriptors()
    config = ImportConfig(archive_bytes=1 << 20)
    try:
        with spool(io.BytesIO(raw), folder / "out", config, Quiet()) as out:
            out.read()
    except DSecError:
        pass
    assert open_descriptors() == before
    assert not (folder / "out").exists() or (folder / "out").stat().st_size <= config.archive_bytes


def imports(data: bytes) -> None:
    """A file into the store: one named layer that the store vouches for, or a typed error and a store as it was."""
    draw = Draw(data)
    raw = packed(Draw(draw.bytes(32)), archive(draw).raw)
    folder, before = place(), open_descriptors()
    shelf = Shelf(folder / "state", BOUNDS)
    (folder / "input").write_bytes(raw)
    try:
        with shelf.layers.scratch() as scratch:
            work = shelf.importer.workshop(scratch, Quiet())
            named = shelf.importer.image("fuzz", open_path(folder / "input", None, PLATFORM, work), work)
    except DSecError:
        assert shelf.names.all() == []
    else:
        assert shelf.layers.manifest(named.digest).entries >= 1
    assert open_descriptors() == before
    assert sorted(os.listdir(folder)) == ["input", "state"]
    assert [name for name in os.listdir(folder / "state/tmp") if not name.startswith(".")] == []


def parts(data: bytes) -> None:
    """An index, a manifest or a record as a store may send it, whole or with bytes changed: read within its bounds, or refused."""
    draw = Draw(data)
    which, place = draw.below(4), draw.number(2)
    change = draw.bytes(8)
    lengths = [1 + draw.below(70) for _ in range(draw.below(40))]
    digests = b"".join(bytes([n]) * 32 for n in range(len(lengths)))
    index = _changed(encode_index(sum(lengths) * 4096, 16 << 10, lengths, digests), place, change)
    blob = Blob(digest="sha256:" + "0" * 64, size=sum(lengths) * 4096)
    manifest = LayerManifest(
        kind=LayerKind.BASE, meta=Blob(digest=blob.digest, size=4096), data=blob, files=Blob(digest=blob.digest, size=1),
        index=Blob(digest=blob.digest, size=len(index)), chunk_bytes=16 << 10, hash_root=index_root(index), entries=1,
        content_bytes=1, schema_version=2,
    )  # fmt: skip
    try:
        if which == 0:
            found = ChunkIndex(index, manifest)
            assert sum(length for _, length, _ in found) == found.data_bytes == blob.size
            assert all(0 < length <= 256 << 10 for _, length, _ in found)
        elif which == 1:
            raw = _changed(encode_manifest(manifest)[0], place, change)
            _manifest_holds(decode_manifest(raw, sha(raw)))
        elif which == 2:
            raw = draw.rest()
            _manifest_holds(decode_manifest(raw, sha(raw)))
        else:
            _records(draw, place, change)
    except DSecError:
        return


def _changed(raw: bytes, place: int, change: bytes) -> bytes:
    at = place % (len(raw) + 1)
    return raw[:at] + change + raw[at + len(change) :] if change.strip(b"\0") else raw


def _manifest_holds(manifest: LayerManifest) -> None:
    assert manifest.data.size % 4096 == 0 and manifest.data.size >= 0
    assert len(manifest.below) <= 1024 and manifest.chunk_bytes <= 128 << 10
    # What a reader takes into memory for the index follows from the data's size.
    assert manifest.index.size <= 64 + 36 * (manifest.data.size // 4096)


def _records(draw: Draw, place: int, change: bytes) -> None:
    record = FileRecord(b"a", 0, 0o644, 0, 0, 0, 0, (0, 0), b"", (), 0, 0, draw.below(9), bytes(32))
    out = io.BytesIO()
    write_records(out, [record] * draw.below(20))
    raw = _changed(out.getvalue(), place, change) if draw.once_in(2) else _changed(out.getvalue(), 0, b"") + draw.rest()
    path = place_file(raw)
    assert all(isinstance(found.path, bytes) for found in read_records(path))


def place_file(raw: bytes) -> Path:
    path = place() / "files.zst"
    path.write_bytes(raw)
    return path
