"""Names that change while the platform works on them: nothing outside the sandbox, or of another user, is read or changed."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aether.box import Box, request
from dsec.edge.agent import UnixAgent
from dsec.model import aether as wire
from security.cell import Cell, Starter

pytestmark = pytest.mark.root

SECRET = b"of the host"
REFUSALS = ("not_found", "invalid_argument", "permission_denied", "conflict", "runtime_failure", "limit_reached")
Act = Callable[[], Awaitable[object]]


@asynccontextmanager
async def swapping(cell: Cell, link: str, user: str = "") -> AsyncIterator[Box]:
    """/tmp/w is a directory with `x`, and a link to `link`, by turns and without end."""
    await cell.run("sh", "-c", f"mkdir -p /tmp/w; echo inside > /tmp/w/x; ln -sfn '{link}' /tmp/other", user=user)
    running = asyncio.ensure_future(cell.run("storm", "swap", "/tmp/w", "/tmp/other", user=user, timeout_ms=110_000))
    agent = cell.backend.agent(cell.handle)
    assert isinstance(agent, UnixAgent)
    try:
        yield Box(agent, 0)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def refused(act: Act) -> object:
    """What an operation gives; None where it is refused by name."""
    try:
        return await act()
    except AssertionError as refusal:
        assert any(code in str(refusal).split(",")[0] for code in REFUSALS), refusal
        return None


async def told(box: Box, message: wire.Request) -> str:
    async with await box.agent.begin(message) as channel:
        while True:
            frame = await channel.receive()
            if isinstance(frame, wire.FailedReply):
                return frame.code
            if not isinstance(frame, tuple | wire.StartedReply):
                return "done"


def operations(box: Box, user: str) -> list[Act]:
    """Every file operation, and commands with a directory, on what changes."""
    write = {"user": user, "make_parents": True, "append": False}
    return [
        lambda: box.read("/tmp/w/x", user=user),
        lambda: box.tree("/tmp/w", user=user),
        lambda: box.write("/tmp/w/new", b"w", user=user),
        lambda: box.write("/tmp/w/a/b", b"w", **write),
        lambda: box.list("/tmp/w", depth=3),
        lambda: told(box, wire.FileStatRequest(path="/tmp/w/x", user=user, follow=True)),
        lambda: told(box, wire.FileMkdirRequest(path="/tmp/w/made/deep", user=user, mode=0o755, parents=True)),
        lambda: told(box, wire.FileRemoveRequest(path="/tmp/w/new", user=user, recursive=True)),
        lambda: told(box, wire.FileMoveRequest(source="/tmp/w/new", target="/tmp/w/moved", user=user, replace=True)),
        # The sandbox's own directory is made by its root, whoever the command's user is.
        lambda: told(box, request(["true"], cwd="/tmp/w/made", make_cwd=user == "", user=user)),
        lambda: told(box, request(["/tmp/w/x"], cwd="/tmp/w", user=user)),
    ]


async def storm_of_operations(box: Box, user: str, count: int, seconds: float) -> list[bytes]:
    """Runs the operations in turn, four at once; what was read."""
    read: list[bytes] = []
    ends, turns = time.monotonic() + seconds, itertools.islice(itertools.cycle(operations(box, user)), count)

    async def worker() -> None:
        for act in turns:
            if time.monotonic() > ends:
                return
            said = await refused(act)
            if isinstance(said, bytes):
                read.append(said)

    await asyncio.gather(*(worker() for _ in range(4)))
    return read


def ways_out(outside: Path) -> list[str]:
    """Links that would lead to the host, if anyone followed them with more rights than the sandbox's, or from elsewhere."""
    up = "/.." * 12
    return [
        f"/proc/1/root{outside}", f"/proc/1/cwd{up}{outside}", f"/proc/self/root{up}{outside}", f"/proc/self/fd/3{up}{outside}",
        f"/proc/self/fd/6{up}{outside}", f"/proc/self/cwd{up}{outside}", f"/proc/1/fd/6{up}{outside}", f"{up}{outside}",
    ]  # fmt: skip


async def check_the_host_is_spared(start: Starter, outside: Path, count: int, seconds: float) -> None:
    (outside / "x").write_bytes(SECRET)
    (outside / "new").write_bytes(b"stays")
    for number, link in enumerate(ways_out(outside)):
        cell = await start(f"c{number}")
        async with swapping(cell, link) as box:
            read = await storm_of_operations(box, "", count, seconds)
        assert not any(SECRET in data for data in read), link
        assert b"inside\n" in read, "the operations reached the directory too"
        assert sorted(os.listdir(outside)) == ["new", "x"], link
        assert (outside / "new").read_bytes() == b"stays"


async def test_racing_links_never_lead_to_the_host(start: Starter, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    await check_the_host_is_spared(start, outside, 150, 1.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_thousands_of_operations_never_lead_to_the_host(start: Starter, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    await check_the_host_is_spared(start, outside, 4000, 60)


async def test_racing_links_give_a_user_no_more_than_its_own(start: Starter) -> None:
    cell = await start()
    await cell.shell(
        "mkdir -m 700 /srv/private; echo secret > /srv/private/x; echo stays > /srv/private/new; mkdir /tmp/u; chmod 777 /tmp/u"
    )
    async with swapping(cell, "/srv/private", user="user") as box:
        read = await storm_of_operations(box, "user", 500, 3)
    assert read and not any(b"secret" in data for data in read)
    assert (await cell.shell("cat /srv/private/x /srv/private/new; ls /srv/private")).split() == [
        "secret",
        "stays",
        "new",
        "x",
    ]


async def test_removing_a_tree_follows_no_link_that_comes_meanwhile(start: Starter) -> None:
    cell = await start()
    await cell.shell(
        "mkdir -p /srv/kept/d; for n in 1 2 3 4 5 6 7 8 9; do echo $n > /srv/kept/$n; echo $n > /srv/kept/d/$n; done"
    )
    async with swapping(cell, "/srv/kept") as box:
        for _ in range(100):
            await box.sh("mkdir -p /tmp/t; mv /tmp/w /tmp/t/w 2>/dev/null; ln -sfn /srv/kept /tmp/w; true")
            await told(box, wire.FileRemoveRequest(path="/tmp/t", user="", recursive=True))
            await box.sh(
                "rm -f /tmp/w; mkdir -p /tmp/w; echo inside > /tmp/w/x; test -e /tmp/other || ln -s /srv/kept /tmp/other"
            )
    # What the shell itself wrote through the link may be there too.
    left = (await cell.shell("cd /srv/kept && echo [1-9] d/[1-9]")).split()
    assert left == [*"123456789", *(f"d/{n}" for n in range(1, 10))]
