"""A download is hostile (FI3): nothing outside the target changes, honest links survive, each refusal is named."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument, RuntimeFailure
from dsec.sdk.packing import Packer
from dsec.sdk.records import Transfer
from dsec.sdk.tarstream import Content, Entry, TarStream
from dsec.sdk.unpacking import FileReceiver, Unpacker


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", target: str = "", mode: int = 0o644) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    info.size = len(data)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)


def link(name: str, target: str) -> bytes:
    return member(name, tarfile.SYMTYPE, target=target)


def unpack(target: Path, *members: bytes, source: str = "/w/tree", piece: int = 1 << 16) -> Transfer:
    stream = b"".join(members) + bytes(1024)
    unpacker = Unpacker(target, source)
    unpacker.open()
    try:
        for start in range(0, len(stream), piece):
            unpacker.feed(stream[start : start + piece])
        return unpacker.finish()
    finally:
        unpacker.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("untouched")
    (tmp_path / "outside").mkdir()
    return tmp_path / "target"


@pytest.fixture(autouse=True)
def nothing_outside_changes(tmp_path: Path, target: Path) -> object:
    yield
    assert (tmp_path / "secret").read_text() == "untouched"
    assert (tmp_path / "secret").stat().st_nlink == 1
    assert os.listdir(tmp_path / "outside") == []
    assert set(os.listdir(tmp_path)) <= {"secret", "outside", "target"}
    assert not [name for name in os.listdir(target) if name.startswith(".dsec-")] if target.exists() else True


REFUSED = {
    "parent": (member("../x", data=b"evil"), "../x"),
    "parent inside": (member("a/../../x", data=b"evil"), "a/../../x"),
    "absolute": (member("/abs", data=b"evil"), "/abs"),
    "fifo": (member("pipe", tarfile.FIFOTYPE), "pipe"),
    "char": (member("null", tarfile.CHRTYPE), "null"),
    "block": (member("disk", tarfile.BLKTYPE), "disk"),
    "link out": (link("out", "../secret"), "out"),
    "link far out": (link("d/out", "../../secret"), "d/out"),
    "absolute link": (link("etc", "/etc/passwd"), "etc"),
    "absolute link beside": (link("t", "/w/tree2/x"), "t"),
    "absolute link back out": (link("t", "/w/tree/../x"), "t"),
    "link behind a name": (link("t", "d/../../x"), "t"),
    "hard link out": (member("h", tarfile.LNKTYPE, target="../secret"), "h"),
    "hard link absolute": (member("h", tarfile.LNKTYPE, target="/etc/passwd"), "h"),
    "hard link to nothing": (member("h", tarfile.LNKTYPE, target="none"), "h"),
    "hard link to a directory": (member("h", tarfile.LNKTYPE, target="d"), "h"),
    "hard link to itself": (member("h", tarfile.LNKTYPE, target="."), "h"),
    "the target": (member(".", data=b"x"), "."),
    "a long name": (member("n" * 300, data=b"x"), "n" * 300),
    "too deep": (member("d/" * 2000 + "x", data=b"x"), "d/" * 2000 + "x"),
    "unknown type": (member("q", b"Z"), "q"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_the_rest_is_kept(target: Path, case: str) -> None:
    hostile, name = REFUSED[case]
    done = unpack(target, member("d", tarfile.DIRTYPE, mode=0o755), hostile, member("after", data=b"good"))
    assert [refusal.path for refusal in done.refused] == [name]
    assert done.refused[0].reason
    assert (target / "after").read_bytes() == b"good" and done.size == 4
    assert sorted(os.listdir(target)) == ["after", "d"] and os.listdir(target / "d") == []


def test_a_nul_in_a_name_is_refused(target: Path) -> None:
    body = b"12 path=a\0b\n"
    info = tarfile.TarInfo("x")
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(body)
    done = unpack(target, header.tobuf() + body + bytes(512 - len(body)), info.tobuf(), member("after", data=b"good"))
    assert [refusal.path for refusal in done.refused] == ["a\0b"] and (target / "after").exists()


@pytest.mark.parametrize("absolute", [False, True])
def test_nothing_is_written_through_a_link(tmp_path: Path, target: Path, absolute: bool) -> None:
    target.mkdir()
    os.symlink(tmp_path / "outside", target / "mine")  # the local user's own link counts too
    done = unpack(
        target,
        member("d", tarfile.DIRTYPE, mode=0o755),
        link("to", "/w/tree/d" if absolute else "d"),
        member("to/x", data=b"evil"),
        member("to/e", tarfile.DIRTYPE),
        member("mine/x", data=b"evil"),
        member("to", tarfile.DIRTYPE, mode=0o777),
    )
    assert [refusal.path for refusal in done.refused] == ["to/x", "to/e", "mine/x", "to"]
    assert os.listdir(target / "d") == [] and os.readlink(target / "to") == "d"


def test_a_file_replaces_a_link_and_not_what_it_names(tmp_path: Path, target: Path) -> None:
    target.mkdir()
    os.symlink("../secret", target / "a")
    assert unpack(target, member("a", data=b"new")).refused == ()
    assert (target / "a").read_bytes() == b"new" and not (target / "a").is_symlink()


def test_a_chain_of_links_cannot_lead_out(target: Path) -> None:
    done = unpack(
        target,
        member("d/e", tarfile.DIRTYPE, mode=0o755),
        link("d/e/up", "../.."),  # the top itself: honest
        link("over", "d/e/up/../secret"),
        member("alias", tarfile.LNKTYPE, target="d/e/up"),
    )
    assert [refusal.path for refusal in done.refused] == ["over", "alias"]
    assert (target / "d/e/up").resolve() == target.resolve()


def test_honest_links_survive(target: Path) -> None:
    done = unpack(
        target,
        member("d/e/f", data=b"content"),
        link("d/up", "e/f"),
        link("d/e/across", "../../top"),
        link("abs", "/w/tree/d/e/f"),
        link("d/e/abs", "/w//tree/./top"),
        link("root", "/w/tree"),
        link("dangling", "not/yet"),
        member("top", data=b"top"),
        member("hard", tarfile.LNKTYPE, target="d/e/f"),
    )
    assert done.refused == () and done.entries == 9
    assert os.readlink(target / "d/up") == "e/f" and (target / "d/up").read_bytes() == b"content"
    assert (target / "abs").read_bytes() == b"content" and (target / "d/e/abs").read_bytes() == b"top"
    assert (target / "d/e/across").read_bytes() == b"top"
    assert (target / "root").resolve() == target.resolve()
    assert (target / "hard").stat().st_ino == (target / "d/e/f").stat().st_ino


def test_deep_trees_are_kept(target: Path) -> None:
    deep = "/".join("d" * 20 for _ in range(300))
    done = unpack(target, member(deep + "/x", data=b"deep"), member(deep + "/y", tarfile.LNKTYPE, target=deep + "/x"))
    assert done.refused == () and done.entries == 2
    assert sum(1 for _ in os.fwalk(target)) == 301


def test_set_id_bits_are_dropped_and_directories_stay_usable(target: Path) -> None:
    unpack(target, member("d", tarfile.DIRTYPE, mode=0o4000), member("d/x", data=b"x", mode=0o6755))
    assert (target / "d").stat().st_mode & 0o7777 == 0o700
    assert (target / "d/x").stat().st_mode & 0o7777 == 0o755


def test_an_entry_that_comes_twice_and_a_link_to_itself(target: Path) -> None:
    done = unpack(
        target, member("a", data=b"1"), member("h", tarfile.LNKTYPE, target="a"), member("h", tarfile.LNKTYPE, target="a"),
        member("a", data=b"2"), member("d/x", data=b"x"), member("d", data=b"file over directory"),
    )  # fmt: skip
    assert [refusal.path for refusal in done.refused] == ["d"]
    assert (target / "a").read_bytes() == b"2" and (target / "h").read_bytes() == b"1"


def test_refusals_are_bounded(target: Path) -> None:
    done = unpack(target, *[member(f"../{n}") for n in range(1500)])
    assert len(done.refused) == 1001 and done.refused[-1].reason == "and 500 more entries"


def test_a_huge_header_is_not_read_into_memory(target: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(RuntimeFailure, match="header"):
        unpack(target, header.tobuf(tarfile.GNU_FORMAT))


@pytest.mark.parametrize("record", [b"none", b"0 a=b\n", b"2 a=b\n", b"x a=b\n", b" a=b\n", b"99 a=b\n", b"7 ab=cd\n"])
def test_a_record_that_leads_nowhere_is_refused(target: Path, record: bytes) -> None:
    """Without a length behind a good record, the parser once read that one again and again, for ever."""
    body = b"8 ab=cd\n" + record
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(body)
    with pytest.raises(RuntimeFailure, match="PAX record"):
        unpack(target, header.tobuf() + body + bytes(512 - len(body)), member("x"))


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:700], lambda b: gzip.compress(b), lambda b: b"\1" * 2048, lambda b: b[:1024]]
)
def test_what_is_cut_or_no_tar_is_an_error_and_leaves_no_part(target: Path, spoil: Callable[[bytes], bytes]) -> None:
    unpacker = Unpacker(target, "/w")
    unpacker.open()
    with pytest.raises(RuntimeFailure):
        unpacker.feed(spoil(member("x", data=b"y" * 1000) + bytes(1024)))
        unpacker.finish()
    unpacker.close()
    assert os.listdir(target) == []


def test_a_download_to_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        Unpacker(tmp_path / "secret" / "x", "/w").open()
    with pytest.raises(InvalidArgument):
        FileReceiver(tmp_path / "secret" / "x", 0o644).open()


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=140).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 250
)
entries = st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), st.binary(max_size=2000), max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.integers(1, 3000))
def test_the_parser_reads_what_tarfile_writes(tree: dict[str, bytes], form: int, piece: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as packed:
        for name, data in tree.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))
    stream, read = TarStream(), dict[str, bytes]()
    current = ""
    for start in range(0, len(out.getvalue()), piece):
        for item in stream.feed(out.getvalue()[start : start + piece]):
            if isinstance(item, Entry):
                current, read[item.name] = item.name, b""
            elif isinstance(item, Content):
                read[current] += bytes(item.data)
    assert stream.ended and read == tree


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3000))
def test_the_parser_survives_any_bytes(noise: bytes) -> None:
    stream = TarStream()
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(noise)
    for data in (noise, header.tobuf() + noise + bytes(-len(noise) % 512) + tarfile.TarInfo("x").tobuf()):
        stream = TarStream()
        try:
            for _ in stream.feed(data):
                pass
        except RuntimeFailure:
            continue


def test_tarfile_reads_what_the_packer_writes(tmp_path: Path) -> None:
    root = tmp_path / "target"
    root.mkdir()
    (root / ("é" * 120)).write_bytes(b"1" * 1000)
    (root / "old").write_bytes(b"")
    os.utime(root / "old", (-1000, -1000))
    packer = Packer(root)
    with tarfile.open(fileobj=io.BytesIO(b"".join(packer.pieces()))) as packed:
        read = {item.name: (item.size, item.mtime) for item in packed.getmembers()}
    assert read["é" * 120][0] == 1000 and read["old"] == (0, -1000)
