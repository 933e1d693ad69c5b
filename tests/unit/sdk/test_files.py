"""Files through the client."""

import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from apifake import Server
from dsec.sdk.packing import PIECE, Packer
from dsec.sdk.unpacking import Unpacker


async def test_write_and_read(server: Server, box: dsec.Sandbox) -> None:
    view = await box.files.write("/w/a", b"0123456789", mode=0o600)
    assert (view.size, view.path) == (10, "/w/a")
    assert await box.files.read("/w/a") == b"0123456789"
    assert await box.files.read("/w/a", offset=2, length=3) == b"234"
    await box.files.write("/w/a", b"+", append=True)
    assert await box.files.read_text("/w/a") == "0123456789+"
    await box.files.write_text("/w/b c", "é")
    assert await box.files.read("/w/b c") == "é".encode()
    assert [view.path for view in await box.files.list("/w")] == ["/w/a", "/w/b c"]
    assert await box.files.exists("/w/a") and not await box.files.exists("/w/none")
    with pytest.raises(dsec.NotFound):
        await box.files.read("/w/none")
    with pytest.raises(dsec.TooLarge):
        await box.files.read("/w/a", limit=3)
    await box.files.mkdir("/w/d/e")
    await box.files.move("/w/a", "/w/d/a")
    await box.files.remove("/w/d/a")
    assert (await box.files.stat("/w/d")).kind == "dir"


async def test_what_arrives_otherwise_than_sent_is_an_error(server: Server, box: dsec.Sandbox) -> None:
    server.faults.wrong_hash = True
    with pytest.raises(dsec.RuntimeFailure, match="not what was sent"):
        await box.files.write("/w/a", b"x")


async def test_write_from_an_iterable(box: dsec.Sandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(50):
            yield bytes([number]) * 10_000

    view = await box.files.write("/big", pieces())
    assert view.size == 500_000
    assert (await box.files.read("/big"))[-1] == 49


async def test_an_iterable_that_fails_raises_its_own_error(box: dsec.Sandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a" * 100_000
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await box.files.write("/cut", pieces())
    assert not await box.files.exists("/cut")


async def test_a_cut_read_is_an_error_not_a_short_file(server: Server, box: dsec.Sandbox, tmp_path: Path) -> None:
    await box.files.write("/w/big", os.urandom(400_000))
    server.faults.cut_stream_after = 200_000
    with pytest.raises(dsec.Unavailable):
        await box.files.read("/w/big")
    target = tmp_path / "out" / "big"
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(dsec.Unavailable):
        await box.files.download("/w/big", target)
    assert target.read_bytes() == b"old"
    assert os.listdir(target.parent) == ["big"]


async def test_upload_and_download_of_a_tree(server: Server, box: dsec.Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d" / "empty").mkdir(parents=True)
    (tree / "d" / "big").write_bytes(os.urandom(700_001))
    (tree / "zero").write_bytes(b"")
    (tree / ("n" * 200)).write_bytes(b"long")
    (tree / os.fsdecode(b"not-\xff-utf8")).write_bytes(b"raw")
    (tree / "run").write_bytes(b"#!/bin/sh\n")
    (tree / "run").chmod(0o755)
    os.link(tree / "zero", tree / "zz-hard")
    os.symlink("d/big", tree / "soft")
    sent = await box.files.upload(tree, "/up")
    assert (sent.entries, sent.refused) == (9, ())
    assert sent.size == 700_001 + 4 + 3 + 10
    inside = server.root / "up"
    assert (inside / "zero").stat().st_ino == (inside / "zz-hard").stat().st_ino
    got = await box.files.download("/up", tmp_path / "down")
    assert (got.entries, got.size, got.refused) == (sent.entries, sent.size, ())
    for folder, _, names in os.walk(tree):
        for name in names:
            source = Path(folder) / name
            copy = tmp_path / "down" / source.relative_to(tree)
            assert copy.read_bytes() == source.read_bytes() and copy.lstat().st_mode == source.lstat().st_mode
    assert os.readlink(tmp_path / "down" / "soft") == "d/big"
    assert (tmp_path / "down/zero").stat().st_ino == (tmp_path / "down/zz-hard").stat().st_ino
    assert (tmp_path / "down/d/empty").is_dir()


async def test_upload_and_download_of_one_file(box: dsec.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "one"
    source.write_bytes(b"x" * 300_000)
    source.chmod(0o4755)
    assert (await box.files.upload(source, "/one")).size == 300_000
    assert (await box.files.download("/one", tmp_path / "back/one")).entries == 1
    assert (tmp_path / "back/one").read_bytes() == source.read_bytes()
    with pytest.raises(dsec.InvalidArgument):
        await box.files.upload(tmp_path / "none", "/one")
    with pytest.raises(dsec.InvalidArgument):
        await box.files.download("/one", tmp_path)


async def test_upload_names_what_it_leaves_out(box: dsec.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    os.mknod(tmp_path / "t" / "sock", 0o140644)
    os.mkfifo(tmp_path / "t" / "pipe")
    sent = await box.files.upload(tmp_path / "t", "/copy")
    assert [refusal.path for refusal in sent.refused] == ["sock"] and sent.entries == 1


async def test_watch_yields_and_ends_with_the_reason(box: dsec.Sandbox) -> None:
    events = []
    with pytest.raises(dsec.SandboxLost):
        async for event in box.files.watch("/w"):
            events.append((event.event, event.path))
    assert events == [("created", "/w/a"), ("overflow", "")]


def test_packing_and_unpacking_take_a_fixed_amount_of_memory(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with open(tmp_path / "t" / "sparse", "wb") as big:
        big.truncate(96 << 20)
    unpacker = Unpacker(tmp_path / "out", "/t")
    unpacker.open()
    tracemalloc.start()
    try:
        for piece in Packer(tmp_path / "t").pieces():
            assert len(piece) <= 2 * PIECE
            unpacker.feed(piece)
        assert unpacker.finish().size == 96 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        unpacker.close()
