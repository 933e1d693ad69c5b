"""Files: what was written is there, and nothing crosses the line of trust (rows FI)."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dsec.testing.suite.archives import file, folder, link, other, symlink, tar
from dsec.testing.suite.boxes import Box, Boxes, eventually
from dsec.testing.suite.callers import Refused
from dsec.testing.suite.plain import OverHttp
from dsec.testing.suite.sites import Site

pytestmark = pytest.mark.asyncio

PIECE = hashlib.sha512(b"seed").digest() * (1 << 14)


async def pieces(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, len(PIECE)):
        yield PIECE[: min(len(PIECE), size - start)]


async def written_and_read(box: Box, size: int) -> None:
    digest = hashlib.sha256()
    async for piece in pieces(size):
        digest.update(piece)
    view = await box.write("/d/f", pieces(size))
    assert (view.size, view.sha256) == (size, digest.hexdigest())
    again = hashlib.sha256()
    async for piece in box.pieces("/d/f"):
        again.update(piece)
    assert again.digest() == digest.digest()
    assert (await box.said("sha256sum /d/f", timeout=120)).split()[0] == view.sha256


@pytest.mark.parametrize("size", [0, 1, 18_000, 1 << 20, (16 << 20) + 1])
async def test_what_was_written_is_there(box: Box, size: int) -> None:
    """FI1: size and hash are equal where it was sent, where it lies, and where it is read."""
    await written_and_read(box, size)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_file_past_two_gibibytes_is_whole(boxes: Boxes) -> None:
    """FI1: 2 GiB and one byte."""
    await written_and_read(await boxes.make(disk_limit_mb=3000), (2 << 30) + 1)


@pytest.mark.parametrize("surface", ["http"], indirect=True)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_cut_upload_leaves_the_old_file(site: Site, box: Box, chunked: bool) -> None:
    """FI1: a connection cut at half leaves the old file or none, and no other name."""
    await box.write("/f", b"old")
    address = urlsplit(site.url)
    for path in ("/f", "/g"):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        kind = "Transfer-Encoding: chunked" if chunked else "Content-Length: 200000"
        writer.write(
            f"PUT /v1/sandboxes/{box.id}/files?path={path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.key}\r\n"
            f"{kind}\r\n\r\n".encode()
        )
        half = b"x" * 100_000
        writer.write(b"%x\r\n%s\r\n" % (len(half), half) if chunked else half)
        await writer.drain()
        await asyncio.sleep(0.2)  # nothing tells from outside that half of it has arrived
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
        await eventually(lambda: settled(box))
    names = await box.names("/")
    assert "f" in names and "g" not in names
    assert await box.read("/f") == b"old"


async def settled(box: Box) -> bool:
    """No file beside the target, whatever a write uses on its way."""
    return not any(name.startswith(".") for name in await box.names("/"))


async def test_a_source_that_breaks_off_leaves_nothing(box: Box) -> None:
    """FI1: the client's own source fails at half."""

    async def half() -> AsyncIterator[bytes]:
        yield PIECE
        raise OSError("the source is gone")

    with pytest.raises((OSError, Refused)):
        await box.write("/h", half())
    await eventually(lambda: settled(box))
    assert "h" not in await box.names("/")


TREE = r"""
mkdir -p /d/real /d/deep; echo in > /d/real/f; echo two > /d/real/g; ln /d/real/g /d/hard
ln -s /d/real /d/honest; ln -s real/f /d/near; ln -s ../../../../etc/passwd /d/up; ln -s /etc/passwd /d/abs
ln -s /etc /d/dir; mkfifo /d/pipe
cd /d/deep; i=0; while [ $i -lt 300 ]; do mkdir p && cd p; i=$((i+1)); done; echo bottom > f
"""


async def test_a_download_stays_in_its_target(box: Box, tmp_path: Path) -> None:
    """FI3: links that lead out, pipes and a path of 300 folders; honest ones survive, and each refusal is named."""
    await box.said(TREE)
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "in/target"
    refused = await box.caller.fetch_tree(box.id, "/d", target)
    # The standard library's filter, which the HTTP client has, takes every absolute link for one that leads out.
    absolute = {"honest"} if box.caller.surface == "http" else set()
    assert refused >= {"up", "abs", "dir", "pipe"} | absolute and refused <= {"up", "abs", "dir", "pipe", "honest"}
    assert (target / "real/f").read_text() == "in\n" and (target / "hard").read_text() == "two\n"
    assert (target / "near").read_text() == "in\n"
    if not absolute:
        assert (target / "honest/f").read_text() == "in\n"
    assert (target / ("deep/" + "p/" * 300 + "f")).read_text() == "bottom\n"
    assert sorted(os.listdir(tmp_path)) == ["in", "outside"] and os.listdir(tmp_path / "in") == ["target"]
    assert os.listdir(outside) == []


HOSTILE = {
    "above": [file("../x", b"out")],
    "absolute": [file("/abs", b"out")],
    "through a link": [symlink("l", "/etc"), file("l/x", b"out")],
    "through a link upwards": [symlink("l", ".."), file("l/x", b"out")],
    "a hard link to outside": [link("h", "/etc/passwd")],
    "a hard link upwards": [link("h", "../etc/passwd")],
    "a device": [other("n", b"3", devmajor=1, devminor=3)],
}


@pytest.mark.parametrize("surface", ["http"], indirect=True)
@pytest.mark.parametrize("what", sorted(HOSTILE))
async def test_an_archive_sent_stays_below_its_target(box: Box, what: str) -> None:
    """FI3 the other way: what a tar sent in would put elsewhere is refused by name, and nothing else changes."""
    caller = box.caller
    assert isinstance(caller, OverHttp)
    before = await box.said("find / -xdev | sort | sha256sum; cat /etc/passwd")
    with pytest.raises(Refused) as refused:
        await caller.send_archive(box.id, tar([folder("d"), *HOSTILE[what]]), "/target")
    assert (refused.value.code, refused.value.fields.get("what")) == ("invalid_argument", "archive"), refused.value
    await box.caller.remove(box.id, "/target", recursive=True)
    assert await box.said("find / -xdev | sort | sha256sum; cat /etc/passwd") == before


async def test_a_tree_sent_is_the_tree_that_was_there(box: Box, tmp_path: Path) -> None:
    """FI3: honest trees come through whole, and come back."""
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/f").write_bytes(PIECE)
    (source / "a/b/near").symlink_to("../f")
    os.link(source / "a/f", source / "hard")
    await box.caller.send_tree(box.id, source, "/sent")
    digest = hashlib.sha256(PIECE).hexdigest()
    assert (await box.said("cd /sent; sha256sum a/f a/b/near hard")).split()[::2] == [digest] * 3
    assert await box.caller.fetch_tree(box.id, "/sent", tmp_path / "back") == set()
    assert (tmp_path / "back/a/b/near").read_bytes() == PIECE


async def test_links_are_followed_inside_only(box: Box) -> None:
    """FI3: a path through links is the sandbox's own view, kinds are told, and nothing waits for a pipe."""
    await box.said(
        "mkdir -p /d/real; echo in > /d/real/f; ln -s /d/real /d/link; ln -s ../../../etc/passwd /d/up; mkfifo /d/p"
    )
    assert await box.read("/d/link/f") == b"in\n"
    kinds = {name: view.kind for name, view in (await box.names("/d")).items()}
    assert kinds == {"real": "dir", "link": "symlink", "up": "symlink", "p": "fifo"}
    assert await box.read("/d/up") == await box.read("/etc/passwd")
    with pytest.raises(Refused):
        async with asyncio.timeout(5):
            await box.read("/d/p")


SWAP = "while :; do mkdir -p /v/a/b; rm -rf /v/a/b; ln -s /keep /v/a/b; rm -f /v/a/b; done"


async def test_a_swap_during_a_recursive_remove_stays_inside(box: Box) -> None:
    """FI3: a folder that becomes a link while it is removed leads nowhere."""
    await box.said("mkdir /keep; for i in $(seq 50); do echo x > /keep/$i; done")
    process = await box.start(SWAP)
    for _ in range(30):
        try:
            await box.caller.remove(box.id, "/v", recursive=True)
        except Refused as refused:
            assert refused.kind == "request", refused
    await box.caller.end(box.id, process.id)
    assert (await box.said("ls /keep | wc -l")).strip() == "50"


async def test_a_swap_during_a_download_stays_inside(box: Box, tmp_path: Path) -> None:
    """FI3: the same while a tree is read: what the link leads to is not in it."""
    await box.said("mkdir /keep; for i in $(seq 50); do echo x > /keep/$i; done; mkdir -p /v/a/b")
    process = await box.start(SWAP)
    for turn in range(10):
        try:
            await box.caller.fetch_tree(box.id, "/v", tmp_path / str(turn))
        except Refused as refused:
            assert refused.code != "sandbox_lost", refused
    await box.caller.end(box.id, process.id)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()] == []


async def test_permissions_are_the_kernel_s(box: Box) -> None:
    """FI1: a file call may what its user may, and what it writes belongs to that user."""
    await box.said("echo secret > /s; chmod 600 /s; mkdir /o; chmod 777 /o")
    for call in (box.read("/s", user="1000:1000"), box.write("/x", b"", user="1000:1000")):
        with pytest.raises(Refused) as refused:
            await call
        assert refused.value.code == "permission_denied"
    await box.write("/o/x", b"mine", user="1000:1000")
    assert (await box.caller.stat(box.id, "/o/x")).uid == 1000
