"""A hostile program's every attempt, by group: none succeeds but those that are named here, each with its reason."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from aether.box import Box
from dsec.edge.agent import UnixAgent
from dsec.edge.backends.container import Container
from dsec.model import aether as wire
from dsec.model.errors import SandboxLost
from dsec.model.plan import Mount
from security.cell import LIMITS, Cell, Starter

pytestmark = pytest.mark.root

GROUPS = ("aether", "papers", "mounts", "kernel", "settings", "sockets", "disk")
# What may succeed. A program's own audit mark is a number that nobody here reads; ioctls by family and number: flags of a
# file read and written (0x66 1 and 2), extents compared (0x94 0x36), and the flag that asks for compression.
ALLOWED = {
    "settings": {"/proc/self/loginuid"},
    "disk": {"ioctl-66-1", "ioctl-66-2", "ioctl-94-36", "ioctl-58-1f", "compress"},
    "sockets": {
        "family-1", "family-2", "family-10", "family-16", "netlink-0", "netlink-4", "netlink-15",
        "inet-0", "inet-1", "inet-6", "inet-17", "inet-136", "inet-262",
    },
}  # fmt: skip
ATTEMPTS = {"aether": 120, "papers": 100, "mounts": 60, "kernel": 45, "settings": 35, "sockets": 1400, "disk": 40}


def gained(said: str, group: str) -> tuple[set[str], set[str]]:
    """Attempts that succeeded beyond those allowed, and those that ended otherwise than by an answer."""
    ends = [line.rsplit(" ", 1) for line in said.splitlines()]
    assert len(ends) >= ATTEMPTS[group], said
    done = {name for name, end in ends if end == "done"} - ALLOWED.get(group, set())
    return done, {f"{name} {end}" for name, end in ends if end.startswith("died")}


@pytest.mark.parametrize("user", ["", "user"])
async def test_no_attempt_succeeds(start: Starter, user: str) -> None:
    cell = await start()
    for group in GROUPS:
        place = "/tmp/root" if user == "" else "/tmp/user"
        await cell.run("mkdir", place, user=user)
        ran = await cell.run("hostile", group, place, user=user, timeout_ms=60_000, output_limit=1 << 18)
        assert gained(ran.out, group) == (set(), set()), group
    assert (await cell.run("true")).code == 0


async def test_no_attempt_on_a_volume_succeeds(start: Starter, container: Container) -> None:
    """A volume is the pool's own file system, without the overlay between."""
    source = str(container.pool.create_volume("v", 16 << 20))
    cell = await start(mounts=(Mount(kind="volume", source=source, target="/v", read_only=False),))
    ran = await cell.run("hostile", "disk", "/v", timeout_ms=60_000, output_limit=1 << 18)
    # A whiteout is device 0:0, which is none: it opens nothing.
    assert gained(ran.out, "disk") == ({"whiteout"}, set())
    await container.stop(cell.handle)
    container.pool.delete_volume("v")


async def test_a_command_cannot_make_aether_its_tracer(start: Starter) -> None:
    """Its stops were taken for its end: a program could seem dead and go on."""
    cell = await start()
    ran = await cell.run("storm", "traced", "7", timeout_ms=5000)
    assert ran.out == "7 OK"


async def test_what_a_command_holds_leads_nowhere(start: Starter) -> None:
    cell = await start()
    held = await cell.shell("for f in /proc/self/fd/*; do readlink $f; done")
    assert all(name == "/dev/null" or name.startswith("pipe:") for name in held.splitlines()), held
    # Sockets of the sandbox's network namespace, those without a path too: aether's is in the host's.
    assert len((await cell.shell("cat /proc/net/unix")).splitlines()) == 1


async def test_what_sessions_and_file_helpers_hold_leads_nowhere(start: Starter) -> None:
    cell = await start()
    agent = cell.backend.agent(cell.handle)
    assert isinstance(agent, UnixAgent)
    box = Box(agent, 0)
    await box.open("s", "/bin/sh")
    held = await box.in_session("s", "for f in /proc/$$/fd/* /proc/self/fd/*; do readlink $f; done")
    names = held.out.decode().split()
    assert names and all(name == "/dev/null" or name.startswith("pipe:") for name in names), names
    wanted = wire.FileWriteRequest(path="/tmp/f", user="", mode=None, make_parents=False, append=False)
    helper = "for p in /proc/[0-9]*; do test $p != /proc/1 && grep -q aether $p/comm && echo $p; done"
    async with await agent.begin(wanted) as channel:
        await channel.send(b"x")
        (found,) = (await box.sh(helper)).out.decode().split()
        for part in ("fd/", "maps", "environ", "mem", "root/", "cwd/", "exe", "syscall", "stack"):
            assert (await box.sh(f"ls {found}/{part} 2>/dev/null && head -c 1 {found}/{part}")).code != 0, part
        await channel.end_of_input()
        assert isinstance(await channel.receive(), wire.WrittenReply)


async def test_the_hosts_pressure_is_not_to_be_had(start: Starter) -> None:
    """Each trigger is memory that no group pays for and a wait for RCU at its end."""
    cell = await start()
    assert (await cell.run("storm", "triggers", "1000")).out.split()[0] == "0"


async def test_terminals_of_one_leave_enough_for_others(start: Starter) -> None:
    greedy, other = await start("one"), await start("two")
    task = asyncio.ensure_future(greedy.run("storm", "terminals", "9999", "hold", timeout_ms=3000))
    async with asyncio.timeout(3):
        while await greedy.shell("test -e /dev/pts/250 && echo full") != "full":
            await asyncio.sleep(0.05)
    assert (await other.run("storm", "terminals", "8")).out == "8 OK"
    assert (await task).out.split() == ["256", "ENOSPC"]


async def slowest_answer(cell: Cell, seconds: float) -> float:
    """The longest that `true` took, asked again and again."""
    worst, ends = 0.0, time.monotonic() + seconds
    while time.monotonic() < ends:
        begun = time.monotonic()
        assert (await cell.run("true")).code == 0
        worst = max(worst, time.monotonic() - begun)
    return worst


@pytest.mark.parametrize("storm", ["forks", "threads", "files", "memory", "silent"])
async def test_aether_answers_within_a_second(start: Starter, storm: str) -> None:
    limits = msgspec.structs.replace(LIMITS, cpu_cores=0.5)
    cell = await start(limits=limits)
    limited = {"forks": "40", "threads": "50"}.get(storm, "999999")
    loop = "while :; do probe touch 512; done" if storm == "memory" else f"storm {storm} {limited} hold"
    running = asyncio.ensure_future(cell.run("sh", "-c", loop, timeout_ms=20_000))
    assert await slowest_answer(cell, 2.0) < 1.0
    begun = time.monotonic()
    await cell.backend.stop(cell.handle)
    assert time.monotonic() - begun < 5
    with pytest.raises(SandboxLost):
        await running


def in_cell(name: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if f"/{name}" in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue  # gone meanwhile
    return found


async def test_signals_of_the_sandbox_reach_its_own_alone(start: Starter) -> None:
    one, two = await start("one"), await start("two")
    waiting = asyncio.ensure_future(two.run("sleep", "3"))
    await asyncio.sleep(0.2)
    before = set(in_cell("two"))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        await one.run("sh", "-c", f"kill -{int(number)} -1; kill -{int(number)} 1")
        assert (await one.run("true")).code == 0
    for pid in [*in_cell("one"), os.getpid()]:
        assert (await one.run("sh", "-c", f"kill -9 {pid} 2>&1")).code != 0
    assert set(in_cell("two")) == before
    assert (await waiting).code == 0
