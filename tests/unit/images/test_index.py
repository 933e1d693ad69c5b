"""The chunk index and the manifest, as they come from a store: read back what was written, and refuse all else."""

import hashlib
import os
import struct
from pathlib import Path

import msgspec
import pytest
import zstandard
from msgspec.structs import replace

from dsec.images.importing import Quiet
from dsec.images.index import PAGE_ENTRIES, ChunkIndex, encode_index, index_root, zeros_digest
from dsec.images.making import DATA, INDEX, MANIFEST
from dsec.images.manifests import decode_manifest, encode_manifest
from dsec.images.records import FileRecord, read_records, write_records
from dsec.images.verify import HAVE, check_chunks
from dsec.model.errors import ImageUnavailable
from dsec.model.layers import Blob, LayerKind, LayerManifest
from imagekit import Shelf, file, folder, tar

D = "sha256:" + "0" * 64


def manifest_of(raw: bytes, data_bytes: int) -> LayerManifest:
    return LayerManifest(
        kind=LayerKind.BASE, meta=Blob(digest=D, size=1), data=Blob(digest=D, size=data_bytes), files=Blob(digest=D, size=1),
        index=Blob(digest=f"sha256:{hashlib.sha256(raw).hexdigest()}", size=len(raw)), chunk_bytes=32 << 10,
        hash_root=index_root(raw), entries=1, content_bytes=0, schema_version=2,
    )  # fmt: skip


def made(lengths: list[int]) -> tuple[bytes, LayerManifest]:
    digests = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(len(lengths)))
    raw = encode_index(sum(lengths) * 4096, 32 << 10, lengths, digests)
    return raw, manifest_of(raw, sum(lengths) * 4096)


def test_what_was_written_is_read() -> None:
    lengths = [1 + n * 7 % 16 for n in range(2 * PAGE_ENTRIES + 5)]
    raw, manifest = made(lengths)
    index = ChunkIndex(raw, manifest)
    assert index.count == len(lengths) and index.data_bytes == 4096 * sum(lengths)
    at = 0
    for number, (start, length, digest) in enumerate(index):
        assert (start, length) == (at, lengths[number] * 4096) and digest == hashlib.sha256(b"%d" % number).digest()
        assert index.find(at) == index.find(at + length - 1) == number
        at += length
    assert index.covering(0, at) == range(index.count) and index.covering(4096, 0) == range(0)
    assert index.start(index.count) == at
    for outside in (-1, at):
        with pytest.raises(IndexError):
            index.find(outside)
    # The root is as the format says, whatever the code that writes it does.
    pages = [raw[64 + 36_864 * n : 64 + 36_864 * (n + 1)] for n in range(3)]
    root = hashlib.sha256(raw[:64] + b"".join(hashlib.sha256(page).digest() for page in pages)).hexdigest()
    assert manifest.hash_root == f"sha256:{root}"
    assert struct.unpack("<8sIIQQI", raw[:36]) == (b"DSECIDX2", 4096, 1024, len(lengths), at, 32 << 10)


def test_chunks_of_zeros_are_known() -> None:
    raw = encode_index(5 * 4096, 32 << 10, [2, 3], zeros_digest(8192) + zeros_digest(4096))
    index = ChunkIndex(raw, manifest_of(raw, 5 * 4096))
    assert index.is_zeros(0) and not index.is_zeros(1)


def test_an_empty_layer_has_an_empty_index() -> None:
    raw, manifest = made([])
    index = ChunkIndex(raw, manifest)
    assert index.count == 0 and list(index) == []


@pytest.mark.parametrize("at", [0, 8, 12, 16, 24, 32, 40, 64, 70, 1000])
def test_a_changed_byte_is_noticed(at: int) -> None:
    raw, manifest = made([3] * 40)
    bad = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    with pytest.raises(ImageUnavailable, match="root"):
        ChunkIndex(bad, manifest)


@pytest.mark.parametrize(
    "bad",
    [
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0" * 36,
        lambda raw: raw[:64] + struct.pack("<I", 0) + raw[68:],
        lambda raw: raw[:64] + struct.pack("<I", 65) + raw[68:],
        lambda raw: raw[:64] + struct.pack("<I", 4) + raw[68:],
        lambda raw: raw[:16] + struct.pack("<Q", 1 << 60) + raw[24:],
        lambda raw: raw[:24] + struct.pack("<Q", 4096) + raw[32:],
        lambda raw: raw[:32] + struct.pack("<I", 16 << 10) + raw[36:],
        lambda raw: raw[:8] + struct.pack("<I", 512) + raw[12:],
        lambda raw: raw[:40] + b"x" + raw[41:],
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused_even_where_its_root_is_right(bad: object) -> None:
    raw, manifest = made([3] * 40)
    lying = bad(raw)  # type: ignore[operator]
    with pytest.raises(ImageUnavailable):
        ChunkIndex(lying, replace(manifest, hash_root=index_root(lying), index=Blob(digest=D, size=len(lying))))


@pytest.fixture
def layer(tmp_path: Path) -> tuple[Shelf, str]:
    shelf = Shelf(tmp_path / "state")
    source = tmp_path / "root.tar"
    source.write_bytes(
        tar([folder("d"), file("d/a", b"alpha"), file("big", os.urandom(1 << 20)), file("zeros", bytes(1 << 20))])
    )
    return shelf, shelf.import_image("x", source).digest


def test_manifests_are_checked(layer: tuple[Shelf, str]) -> None:
    shelf, digest = layer
    raw = (shelf.layers.directory(digest) / MANIFEST).read_bytes()
    manifest = decode_manifest(raw, digest)
    assert encode_manifest(manifest) == (raw, digest)
    good = msgspec.json.decode(raw)
    blob = {"digest": D, "size": 4096}
    for change in (
        {"schema_version": 1}, {"schema_version": 3}, {"chunk_bytes": 1 << 30}, {"chunk_bytes": 0}, {"hash_root": "x"},
        {"data": {**blob, "size": 4097}}, {"data": {**blob, "size": -4096}}, {"data": {**blob, "digest": "md5:0"}},
        {"data": {**blob, "size": 1 << 50}}, {"index": {**blob, "size": 1 << 40}}, {"index": {**blob, "size": 63}},
        {"meta": {**blob, "size": 0}}, {"files": {**blob, "size": 1 << 60}}, {"below": [D, D]}, {"below": ["x"]},
        {"below": [f"sha256:{n:064x}" for n in range(2000)]}, {"entries": -1}, {"kind": "other"}, {"meta": None},
    ):  # fmt: skip
        changed = msgspec.json.encode({**good, **change})
        with pytest.raises(ImageUnavailable):
            decode_manifest(changed, f"sha256:{hashlib.sha256(changed).hexdigest()}")
    for broken in (b"", b"{", b"[" * 100_000, raw + b" " * (5 << 20), b"\xff"):
        with pytest.raises(ImageUnavailable):
            decode_manifest(broken, f"sha256:{hashlib.sha256(broken).hexdigest()}")
    with pytest.raises(ImageUnavailable):
        decode_manifest(raw, D)


def test_a_layer_of_version_1_is_refused_by_name(tmp_path: Path) -> None:
    old = {"kind": "base", "meta": {"digest": D, "size": 1}, "chunk_bytes": 1 << 20, "hash_root": D}
    raw = msgspec.json.encode(old)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    shelf = Shelf(tmp_path)
    place = shelf.layers.directory(digest)
    place.mkdir(parents=True)
    (place / MANIFEST).write_bytes(raw)
    with pytest.raises(ImageUnavailable, match="made by an older version of DSec"):
        shelf.layers.manifest(digest)
    assert shelf.names.views() == []


def test_damaged_chunks_are_found_by_number(layer: tuple[Shelf, str]) -> None:
    shelf, digest = layer
    manifest, place = shelf.layers.manifest(digest), shelf.layers.directory(digest)
    index = ChunkIndex.read(place / INDEX, manifest)
    assert check_chunks(place, manifest, Quiet()) == []
    bad = [2, index.count - 1]
    with (place / DATA).open("r+b") as data:
        for number in bad:
            data.seek(index.start(number) + 5)
            data.write(b"?")
    assert check_chunks(place, manifest, Quiet()) == bad
    # Of a layer that is loaded on demand, only what is there is read.
    have = bytearray(b"\xff" * ((index.count + 7) // 8))
    have[0] &= ~(1 << 2)
    (place / HAVE).write_bytes(have)
    assert check_chunks(place, manifest, Quiet()) == bad[1:]
    (place / HAVE).write_bytes(b"")
    with pytest.raises(ImageUnavailable):
        check_chunks(place, manifest, Quiet())
    (place / HAVE).unlink()
    os.truncate(place / DATA, 4096)
    with pytest.raises(ImageUnavailable):
        check_chunks(place, manifest, Quiet())


@pytest.mark.parametrize("path", [b"../x", b"a/../../x", b"/etc/passwd", b"a//b", b"a/./b", b"a\0b", b"n" * 256])
def test_a_record_that_leads_out_of_its_layer_is_refused(tmp_path: Path, path: bytes) -> None:
    record = FileRecord(path, 0, 0o644, 0, 0, 0, 0, (0, 0), b"", (), 0, 0, 0, bytes(32))
    with (tmp_path / "files.zst").open("wb") as out:
        write_records(out, [record])
    with pytest.raises(ImageUnavailable):
        list(read_records(tmp_path / "files.zst"))


def test_a_record_as_large_as_memory_is_refused(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    raw = packer.compress(b"\xff\xff\xff\xff")
    raw += b"".join(packer.compress(bytes(1 << 20)) for _ in range(80)) + packer.flush()
    (tmp_path / "files.zst").write_bytes(raw)
    with pytest.raises(ImageUnavailable, match="bound"):
        list(read_records(tmp_path / "files.zst"))
