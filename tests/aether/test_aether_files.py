"""Files, trees, watches and tunnels through aether; what is hostile stays inside."""

import asyncio
import hashlib
import io
import os
import tarfile

import pytest

from aether.box import Box, collect, request
from dsec.model import aether as wire

pytestmark = pytest.mark.root


async def test_what_is_written_is_read(box: Box) -> None:
    for size in (0, 1, 18_000, 1 << 20, 9_000_001):
        data = os.urandom(size)
        written = await box.write("/tmp/d/f", data, make_parents=True)
        assert (written.size, written.sha256) == (size, hashlib.sha256(data).hexdigest())
        assert await box.read("/tmp/d/f") == data
        assert await box.read("/tmp/d/f", offset=size // 2, length=100) == data[size // 2 :][:100]
    assert [item.path for item in await box.list("/tmp/d")] == ["/tmp/d/f"]
    await box.write("/tmp/d/f", b"abc", mode=0o751)
    await box.write("/tmp/d/f", b"def", append=True)
    assert (await box.sh("cat /tmp/d/f; stat -c %a%u /tmp/d/f")).out == b"abcdef7510\n"
    await box.sh("chown user /tmp/d/f; ln -s d/f /tmp/link")
    await box.write("/tmp/link", b"through")
    assert (
        await box.sh("cat /tmp/d/f; stat -c ' %a %U' /tmp/d/f; readlink /tmp/link")
    ).out == b"through 751 user\nd/f\n"
    assert (await box.read("/proc/self/status")).startswith(b"Name:")


@pytest.mark.parametrize("append", [False, True])
async def test_a_cut_upload_leaves_the_old_file(box: Box, append: bool) -> None:
    await box.write("/tmp/f", b"old")
    message = wire.FileWriteRequest(path="/tmp/f", user="", make_parents=False, append=append)
    async with await box.agent.begin(message) as channel:
        await channel.send(b"x" * 2_000_000)
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.1)
    assert await box.read("/tmp/f") == b"old"
    assert [item.path for item in await box.list("/tmp")] == ["/tmp/f"]


async def test_refusals_are_named(box: Box) -> None:
    await box.sh("mkdir -m 700 /tmp/closed; mkfifo /tmp/fifo; ln -s loop /tmp/loop; mkdir /tmp/full; touch /tmp/full/x")
    stat = wire.FileStatRequest
    read = {"user": "", "offset": 0}
    write = {"user": "", "make_parents": False, "append": False}
    for message, wanted in [
        (stat(path="/nope", user="", follow=True), ("not_found", "file")),
        (stat(path="nope", user="", follow=True), ("invalid_argument", "file")),
        (stat(path="/tmp/loop", user="", follow=True), ("invalid_argument", "file")),
        (stat(path="/tmp/closed/x", user="user", follow=True), ("permission_denied", "file")),
        (stat(path="/", user="none", follow=True), ("not_found", "user")),
        (wire.FileReadRequest(path="/tmp/fifo", **read), ("invalid_argument", "file")),
        (wire.FileReadRequest(path="/dev/zero", **read), ("invalid_argument", "file")),
        (wire.FileReadRequest(path="/tmp", **read), ("invalid_argument", "file")),
        (wire.FileWriteRequest(path="/tmp/fifo", **write), ("invalid_argument", "file")),
        (wire.FileWriteRequest(path="/tmp", **write), ("invalid_argument", "file")),
        (wire.FileWriteRequest(path="/nope/x", **write), ("not_found", "file")),
        (wire.FileWriteRequest(path="/x", **(write | {"user": "user"})), ("permission_denied", "file")),
        (wire.FileMkdirRequest(path="/tmp", user="", mode=0o755, parents=False), ("conflict", "file")),
        (wire.FileMoveRequest(source="/tmp/fifo", target="/tmp/full", user="", replace=False), ("conflict", "file")),
        (wire.FileRemoveRequest(path="/tmp/full", user="", recursive=False), ("conflict", "file")),
        (wire.FileRemoveRequest(path="/", user="", recursive=True), ("invalid_argument", "file")),
        (wire.FileListRequest(path="/tmp/fifo", user="", depth=1, limit=10), ("not_found", "file")),
        (wire.ConnectRequest(port=1), ("not_found", "port")),
        (wire.ConnectRequest(port=70000), ("invalid_argument", "port")),
    ]:
        assert await box.refusal(message) == wanted, message
    message = wire.FileWriteRequest(path="/big", user="", make_parents=False, append=False)
    async with await box.agent.begin(message) as channel:
        with pytest.raises(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(channel.send(bytes(100 << 20)))
                frame = await channel.receive()
                assert isinstance(frame, wire.FailedReply)
                assert (frame.code, frame.what) == ("limit_reached", "disk")
                raise RuntimeError
    assert "/big" not in [item.path for item in await box.list("/")]


async def test_entries(box: Box) -> None:
    agent = box.agent
    await agent.call(wire.FileMkdirRequest(path="/tmp/a/b", user="", mode=0o777, parents=True))
    await box.sh("cd /tmp/a; echo 12345 > f; ln -s /etc l; mkfifo p; touch b/x $(printf '\\377')")
    items = await box.list("/tmp/a", depth=5)
    assert [(item.path.removeprefix("/tmp/a/"), item.kind) for item in items[:5]] == [
        ("b", "dir"), ("b/x", "file"), ("f", "file"), ("l", "symlink"), ("p", "fifo"),
    ]  # fmt: skip
    assert (items[0].mode, items[2].size, items[3].target, len(items)) == (0o777, 6, "/etc", 6)
    assert len(await box.list("/tmp/a", limit=3)) == 3
    await agent.call(wire.FileMoveRequest(source="/tmp/a/f", target="/tmp/a/p", user="", replace=True))
    reply = await agent.call(wire.FileStatRequest(path="/tmp/a/p", user="", follow=False))
    assert isinstance(reply, wire.FileReply) and reply.info.kind == "file"
    await agent.call(wire.FileRemoveRequest(path="/tmp/a/l", user="", recursive=True))
    await agent.call(wire.FileRemoveRequest(path="/tmp/a", user="", recursive=True))
    assert await box.list("/tmp") == [] and len(await box.list("/etc")) >= 2


async def test_removal_stays_inside_while_a_directory_is_swapped(box: Box) -> None:
    await box.sh("mkdir /tmp/safe; touch /tmp/safe/1 /tmp/safe/2")
    swap = (
        "cd /tmp; while :; do mkdir -p t/d/e; touch t/d/e/x; mv t/d t/o; ln -s /tmp/safe t/d; rm t/d; mv t/o t/d; done"
    )
    async with await box.agent.begin(request(["sh", "-c", swap])) as channel:
        await channel.receive()
        for _ in range(60):
            async with await box.agent.begin(wire.FileRemoveRequest(path="/tmp/t", user="", recursive=True)) as remove:
                await remove.receive()
    assert len(await box.list("/tmp/safe")) == 2


def archive(*entries: tuple[tarfile.TarInfo, bytes], pax: bool = True) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


@pytest.mark.parametrize("pax", [True, False])
async def test_a_tree_comes_back_as_it_went(box: Box, pax: bool) -> None:
    deep = "/".join(["d" * 20] * 300)
    odd = os.fsdecode(b"n\xff\xfe")
    data = os.urandom(70_000)
    tar = archive(
        entry("./a/", tarfile.DIRTYPE, mode=0o500, mtime=1_000_000),
        entry("./a/f", data=data, mode=0o640, mtime=1_234_567_890),
        entry("a/hard", tarfile.LNKTYPE, linkname="./a/f"),
        entry("a/link", tarfile.SYMTYPE, linkname="/usr/bin/" + "x" * 150),
        entry("a/fifo", tarfile.FIFOTYPE),
        entry("x" * 200, data=b"long"),
        entry(odd, data=b"odd"),
        entry(deep + "/deep", data=b"deep"),
        entry("un/made/file", data=b"", mode=0o755),
        pax=pax,
    )
    reply = await box.put_tree("/tmp/t", tar)
    assert reply == wire.WrittenReply(size=len(tar), sha256=hashlib.sha256(tar).hexdigest())
    with tarfile.open(fileobj=io.BytesIO(await box.tree("/tmp/t"))) as back:
        members = {member.name: member for member in back.getmembers()}
        content = back.extractfile("a/f")
        assert content is not None and content.read() == data
    assert (members["a/f"].mode, members["a/f"].mtime, members["a"].mode) == (0o640, 1_234_567_890, 0o500)
    assert members["a/hard"].islnk() and members["a/link"].linkname == "/usr/bin/" + "x" * 150
    assert members["a/fifo"].isfifo() and odd in members and "x" * 200 in members and deep + "/deep" in members
    assert members["un/made/file"].mode == 0o755
    with tarfile.open(fileobj=io.BytesIO(await box.tree("/tmp/t/a/f"))) as single:
        assert single.getnames() == ["f"]
    await box.agent.call(wire.FileRemoveRequest(path="/tmp/t", user="", recursive=True))
    assert await box.list("/tmp") == []


async def test_a_hostile_tree_changes_nothing_outside(box: Box) -> None:
    await box.sh("mkdir /tmp/out; echo old > /tmp/out/f; mkdir /tmp/t; ln -s /tmp/out /tmp/t/standing")
    evil = [
        [entry("../out/f", data=b"x")],
        [entry("a/../../out/f", data=b"x")],
        [entry("/tmp/out/f", data=b"x")],
        [entry("s", tarfile.SYMTYPE, linkname="/tmp/out"), entry("s/f", data=b"x")],
        [entry("r", tarfile.SYMTYPE, linkname="../out"), entry("r/f", data=b"x")],
        [entry("r2", tarfile.SYMTYPE, linkname="../out"), entry("r2", tarfile.DIRTYPE), entry("r2/new", data=b"x")],
        [entry("standing/f", data=b"x")],
        [entry("h", tarfile.LNKTYPE, linkname="../out/f")],
        [entry("h2", tarfile.LNKTYPE, linkname="standing/f"), entry("h2", data=b"x")],
        [entry("dev", tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [entry("blk", tarfile.BLKTYPE, devmajor=7, devminor=0)],
    ]
    for entries in evil:
        reply = await box.put_tree("/tmp/t", archive(*entries))
        assert isinstance(reply, wire.FailedReply), entries
        assert (reply.code, reply.what) == ("invalid_argument", "archive"), reply
    await box.sh("ln -s /tmp/out/f /tmp/t/direct; ln /tmp/out/f /tmp/t/same")
    good = archive(entry("direct", data=b"x"), entry("same", data=b"x"), entry("in/x", data=b"1"),
                   entry("lib", tarfile.SYMTYPE, linkname="in"), entry("lib/y", data=b"2"))  # fmt: skip
    assert isinstance(await box.put_tree("/tmp/t", good), wire.WrittenReply)
    assert (await box.sh("cat /tmp/out/*; cat /tmp/t/direct /tmp/t/same /tmp/t/in/*")).out == b"old\nxx12"
    for broken in (good[:700], b"\x01" * 2000):
        reply = await box.put_tree("/tmp/t2", broken)
        assert isinstance(reply, wire.FailedReply) and reply.what == "archive"


async def test_trees_have_the_users_permissions(box: Box) -> None:
    reply = await box.put_tree("/home/user/t", archive(entry("f", data=b"x", uid=0)), user="user")
    assert isinstance(reply, wire.WrittenReply)
    assert (await box.sh("stat -c %u /home/user/t/f; mkdir -m 700 /home/user/t/no")).out == b"1000\n"
    assert await box.refusal(wire.TreeReadRequest(path="/home/user/t", user="user")) == ("permission_denied", "file")
    reply = await box.put_tree("/etc", archive(entry("f", data=b"x")), user="user")
    assert isinstance(reply, wire.FailedReply) and reply.code == "permission_denied"


async def test_a_watch_tells_what_changes(box: Box) -> None:
    await box.sh("mkdir -p /tmp/w/a")
    message = wire.FileWatchRequest(path="/tmp/w", user="", recursive=True)
    async with await box.agent.begin(message) as channel, asyncio.timeout(10):
        assert isinstance(await channel.receive(), wire.DoneReply)
        await box.sh("cd /tmp/w; echo 1 > a/f; mkdir -p n/e/w; sleep 0.2; touch n/e/w/x; mv a/f n/g; rm -r a")
        seen = set()
        while ("removed", "/tmp/w/a") not in seen:
            frame = await channel.receive()
            assert isinstance(frame, wire.FileEventReply)
            seen.add((frame.event, frame.path.removeprefix("")))
    wanted = {("created", "a/f"), ("modified", "a/f"), ("created", "n"), ("created", "n/e/w"), ("created", "n/e/w/x"),
              ("moved_from", "a/f"), ("moved_to", "n/g")}  # fmt: skip
    assert {(event, f"/tmp/w/{path}") for event, path in wanted} <= seen


async def test_a_tunnel_carries_both_ways_and_half_closes(box: Box) -> None:
    serve = request(["nc", "-l", "-p", "8080", "-e", "sh", "-c", "cat; echo end"], keep=True, process_id="nc")
    async with await box.agent.begin(serve) as channel:
        await channel.receive()
    data = os.urandom(3_000_000)
    for _ in range(100):
        channel = await box.agent.begin(wire.ConnectRequest(port=8080))
        if isinstance(await channel.receive(), wire.DoneReply):
            break
        await channel.__aexit__(None, None, None)
        await asyncio.sleep(0.02)
    async with channel, asyncio.TaskGroup() as group:

        async def feed() -> None:
            await channel.send(data)
            await channel.end_of_input()

        group.create_task(feed())
        got = b""
        while isinstance(frame := await channel.receive(), tuple):
            got += frame[1]
        assert isinstance(frame, wire.ClosedReply)
    assert got == data + b"end\n"


async def test_a_killed_helper_is_told(box: Box) -> None:
    message = wire.FileWriteRequest(path="/tmp/f", user="", make_parents=False, append=False)
    async with await box.agent.begin(message) as channel:
        await channel.send(b"x")
        await asyncio.sleep(0.1)
        await box.sh("kill -9 -1")
        frame = await channel.receive()
    assert isinstance(frame, wire.FailedReply) and frame.code == "runtime_failure"
    async with await box.agent.begin(request(["echo", "on"])) as channel:
        assert (await collect(channel)).out == b"on\n"
