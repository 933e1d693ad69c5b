"""Archives read as their writers meant them, and refused where they are damaged or beyond the bounds."""

import contextlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.images.inputs import ImportConfig
from dsec.model.errors import DSecError, InvalidArgument
from dsec.model.tree import EntryKind
from imagekit import file, folder, link, other, read_all, symlink, tar

FORMATS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]


@pytest.mark.parametrize("form", FORMATS)
def test_every_kind_of_entry_and_long_names(form: int) -> None:
    long = "/".join(["d" * 90] * 12) + "/" + "n" * 250
    raw = tar(
        [
            folder("d", mode=0o1777), file(long, b"long"), symlink("s", "t" * 3000), file("f", b"x" * 1025, mode=0o6755),
            link("l", "f"), other("c", tarfile.CHRTYPE, devmajor=1, devminor=3), other("p", tarfile.FIFOTYPE),
            other("b", tarfile.BLKTYPE, devmajor=259, devminor=70000),
        ],
        form,
    )  # fmt: skip
    found = {e.path.decode().rstrip("/"): (e, data) for e, data in read_all(raw)}
    assert found[long][1] == b"long"
    assert found["s"][0].target == b"t" * 3000
    assert found["f"][0].mode == 0o6755 and found["f"][1] == b"x" * 1025
    assert (found["l"][0].kind, found["l"][0].target) == (EntryKind.LINK, b"f")
    assert found["c"][0].rdev == (1, 3) and found["b"][0].rdev == (259, 70000)
    assert found["d"][0].mode == 0o1777 and found["p"][0].kind is EntryKind.FIFO


def test_times_keep_their_nanoseconds_and_owners_their_range() -> None:
    raw = tar(
        [
            file("a", mtime=0, pax_headers={"mtime": "-2177452800.999999999"}),
            file("b", mtime=0, pax_headers={"mtime": "8600000000.000000007"}),
            file("c", uid=4294967294, gid=2097152, mtime=-5),
            file("d", pax_headers={"mtime": "3"}),
        ]
    )
    a, b, c, d = (e for e, _ in read_all(raw))
    assert (a.mtime, a.mtime_ns) == (-2177452801, 1)
    assert (b.mtime, b.mtime_ns) == (8600000000, 7)
    assert (c.uid, c.gid, c.mtime) == (4294967294, 2097152, -5)
    assert (d.mtime, d.mtime_ns) == (3, 0)
    gnu = tar([file("g", uid=4294967294, gid=2**21, mtime=-7)], tarfile.GNU_FORMAT)
    ((g, _),) = read_all(gnu)
    assert (g.uid, g.gid, g.mtime) == (4294967294, 2**21, -7)


def test_attributes_are_bytes_and_others_are_noted() -> None:
    value = bytes(range(256)).decode("utf-8", "surrogateescape")
    raw = tar([file("f", pax_headers={"SCHILY.xattr.user.x": value, "SCHILY.xattr.nfs4.acl": "v", "comment": "c"})])
    ((entry, _),) = read_all(raw)
    assert entry.xattrs == ((b"user.x", bytes(range(256))),)


def test_names_that_are_not_text() -> None:
    name = os.fsdecode(b"caf\xe9-\xff")
    for form in FORMATS:
        ((entry, _),) = read_all(tar([file(name, b"1")], form))
        assert entry.path == b"caf\xe9-\xff"


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize(
    "form", ["gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1", "posix", "v7", "ustar"]
)
def test_what_gnu_tar_writes(tmp_path: Path, form: str) -> None:
    with (tmp_path / "sparse").open("wb") as out:
        for at in range(0, 60 << 20, 2 << 20):
            out.seek(at)
            out.write(b"data%d" % at)
        out.truncate(64 << 20)
    (tmp_path / "plain").write_bytes(b"p" * 700)
    os.link(tmp_path / "plain", tmp_path / "again")
    sparse = [] if form in ("v7", "ustar") else ["--sparse"]
    command = ["tar", "-C", tmp_path, *sparse, *f"--format={form}".split(), "-cf", "-", "plain", "again", "sparse"]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    found = {e.path: (e, data) for e, data in read_all(raw)}
    assert found[b"sparse"][1] == (tmp_path / "sparse").read_bytes()
    assert found[b"plain"][1] == b"p" * 700
    assert found[b"again"][0].target == b"plain"
    if sparse:
        assert len(raw) < 2 << 20


def test_a_cut_archive_is_refused_wherever_it_is_cut() -> None:
    raw = tar([file("a", b"1" * 3000), file("b", b"2" * 10, pax_headers={"mtime": "1.5"}), file("c", b"3")])
    end = 512 * 3 + 512 * 7 + 512 * 2
    for cut in range(0, len(raw), 512):
        if cut >= end + 1024:
            break
        try:
            names = [e.path for e, _ in read_all(raw[:cut])]
        except InvalidArgument:
            continue
        assert names == [b"a", b"b", b"c"], cut


def test_damage_is_named() -> None:
    raw = bytearray(tar([file("a", b"1"), file("b", b"2")]))
    raw[1024 + 3] ^= 1
    with pytest.raises(InvalidArgument, match="checksum"):
        read_all(bytes(raw))
    with pytest.raises(InvalidArgument, match="not a tar archive"):
        read_all(b"\x7fELF" * 200)


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    raw = bytearray(512)
    raw[: len(name)] = name
    raw[124 : 124 + len(size)] = size
    raw[156:157] = kind
    raw[257:265] = b"ustar\x0000"
    raw[148:156] = b"%06o\0 " % (sum(raw) + 8 * 32)
    return bytes(raw)


def test_hostile_numbers_end_the_import() -> None:
    negative = b"\xff" * 12
    huge = b"\x80" + b"\xff" * 11
    for size in (negative, huge, b"77777777777", b"99999999999"):
        for kind in (b"0", b"x", b"L"):
            with pytest.raises(InvalidArgument):
                read_all(header(b"a", size, kind) + bytes(2048))
    with pytest.raises(InvalidArgument, match="type"):
        read_all(header(b"a", b"0", b"Q") + bytes(1024))


def test_bounds_hold() -> None:
    many = tar([file(f"f{i}") for i in range(20)])
    with pytest.raises(InvalidArgument, match="entries"):
        read_all(many, ImportConfig(entries=19))
    with pytest.raises(InvalidArgument, match="bytes"):
        read_all(tar([file("f", b"x" * 100)]), ImportConfig(content_bytes=99))
    with pytest.raises(InvalidArgument, match="extended header"):
        read_all(tar([file("f" * 5000)]), ImportConfig(header_bytes=4096))
    sparse = tar([file("f", b"2\n0\n5\n9999999\n5\n".ljust(512) + b"12345", pax_headers={
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "100"})])  # fmt: skip
    with pytest.raises(InvalidArgument, match="sparse"):
        read_all(sparse)


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            NAMES, st.binary(max_size=2000), st.integers(0, 0o7777), st.integers(0, 2**32 - 2),
            st.integers(-(2**40), 2**40), st.dictionaries(st.text("abc", min_size=1, max_size=9), st.text(max_size=50), max_size=2),
        ),
        max_size=8,
    ),
    st.sampled_from(FORMATS),
)  # fmt: skip
def test_what_the_standard_library_writes_is_read(
    members: list[tuple[str, bytes, int, int, int, dict[str, str]]], form: int
) -> None:
    infos = []
    for name, data, mode, owner, mtime, attributes in members:
        extra = {f"SCHILY.xattr.user.{k}": v for k, v in attributes.items()} if form == tarfile.PAX_FORMAT else {}
        infos.append(file(name, data, mode=mode, uid=owner, gid=owner, mtime=mtime, pax_headers=extra))
    found = read_all(tar(infos, form))
    assert len(found) == len(members)
    for (entry, data), (name, wanted, mode, owner, mtime, attributes) in zip(found, members, strict=True):
        path = name.encode("utf-8", "surrogateescape")
        if not path.endswith(b"/"):
            assert (entry.path, data) == (path, wanted)
        assert (entry.mode, entry.uid, entry.mtime) == (mode, owner, mtime)
        if form == tarfile.PAX_FORMAT:
            assert dict(entry.xattrs) == {f"user.{k}".encode(): v.encode() for k, v in attributes.items()}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_ends_in_a_typed_error_or_in_entries(data: st.DataObject) -> None:
    raw = bytearray(
        tar([file("a" * 150, b"1" * 600, pax_headers={"SCHILY.xattr.user.x": "y"}), folder("d"), link("l", "d")])
    )
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for at in range(0, len(raw), 512):
        block = raw[at : at + 512]
        if block[257:262] == b"ustar" and data.draw(st.booleans()):
            block[148:156] = b" " * 8
            raw[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    with contextlib.suppress(DSecError):
        read_all(bytes(raw), ImportConfig(content_bytes=1 << 20))
