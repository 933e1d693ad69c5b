"""Training use: an end is never mistaken for another, and nothing goes on behind the verifier's back (rows RL)."""

import asyncio
from uuid import uuid4

import pytest

from dsec.testing.suite.backends import BackendUnderTest
from dsec.testing.suite.boxes import Box, Boxes, eventually
from dsec.testing.suite.callers import Refused
from dsec.testing.suite.sites import Site, needs
from dsec.testing.suite.test_lifecycle import connected, has

pytestmark = pytest.mark.asyncio

ENDS = {
    "stopped",
    "idle",
    "expired",
    "out_of_memory",
    "policy",
    "node_lost",
    "image",
    "runtime",
    "capacity",
    "internal",
}


async def outcome_of(box: Box, text: str, timeout: float | None = None) -> str:
    """The class of a call's end, as a trainer would take it."""
    try:
        return str((await box.shell(text, timeout=timeout)).outcome)
    except Refused as refused:
        return refused.code


async def test_each_end_has_its_own_class(boxes: Boxes) -> None:
    """RL1: the program's own end, time, memory, disk, processes, and a lost sandbox are told apart."""
    box = await boxes.make(memory_limit_mb=64, disk_limit_mb=32, pids_limit=16)
    assert await outcome_of(box, "exit 3") == "exited"
    assert await outcome_of(box, "kill -9 $$") == "signalled"
    assert await outcome_of(box, "sleep 60", timeout=0.5) == "timeout"
    assert await outcome_of(box, "dd if=/dev/zero of=/dev/null bs=200M count=1; exit $?") == "out_of_memory"
    assert await outcome_of(box, "dd if=/dev/zero of=/f bs=1M count=100 2>/dev/null") == "disk_limit"
    await box.caller.remove(box.id, "/f")
    assert await outcome_of(box, "for i in $(seq 40); do sleep 2 & done; wait; exit 1", timeout=20) == "pids_limit"
    await box.stop()
    assert await outcome_of(box, "true") == "sandbox_lost"


async def test_a_full_disk_is_told_by_file_calls_too(boxes: Boxes) -> None:
    """RL1: a quota that a file call reaches is the task's class, however much of the body is still to come."""
    box = await boxes.make(disk_limit_mb=32)
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            await box.write("/big", b"x" * (64 << 20))
        assert (refused.value.code, refused.value.kind) == ("limit_reached", "task"), refused.value
    assert "big" not in await box.names("/")


async def test_a_stopped_sandbox_never_comes_back_empty(boxes: Boxes) -> None:
    """RL1: every call on its id says that it is lost and how; none makes a new one."""
    box = await boxes.make()
    await box.stop()
    caller = box.caller
    for call in (
        box.exec(["true"]), box.write("/f", b""), box.read("/etc/passwd"), box.usage(), caller.renew(box.id, 60),
        box.start("true"), caller.open_session(box.id),
    ):  # fmt: skip
        with pytest.raises(Refused) as refused:
            await call
        assert (refused.value.code, refused.value.fields["end"]) == ("sandbox_lost", "stopped")
    assert (await caller.look(box.id)).state == "gone"


@pytest.mark.timeout(120)
@pytest.mark.costly
async def test_a_lost_server_is_the_platform_s_failure(mortal: Site, surface: str, backend: BackendUnderTest) -> None:
    """RL1: the server dies in the middle of commands: each call ends with a class of the platform, the sandbox is the one
    that it was, and a command that was interrupted is told so rather than run again."""
    key = uuid4().hex
    async with connected(mortal, surface) as caller:
        boxes = Boxes(caller, backend.name)
        box = await boxes.make(ttl_running_stop=None)
        await box.write("/mark", b"mine")
        running = asyncio.ensure_future(box.shell("echo >> /begun; sleep 60", key))
        await eventually(lambda: has(box, "begun"))
        mortal.kill()
        with pytest.raises(Refused) as refused:
            await running
        assert (refused.value.code, refused.value.kind) == ("unavailable", "infra")
    mortal.start()
    async with connected(mortal, surface) as caller:
        box = Box(caller, await caller.look(box.id))
        assert await box.read("/mark") == b"mine"
        with pytest.raises(Refused) as refused:
            await box.shell("echo >> /begun; sleep 60", key)
        assert refused.value.kind == "infra"
        assert await box.read("/begun") == b"\n"
        await box.stop()


async def test_a_crashed_agent_is_the_platform_s_failure(site: Site, boxes: Boxes) -> None:
    """RL1: the agent dies in the middle of a command: the call and every later one say so, with the incident of the log."""
    needs(site, "crash")
    box = await boxes.make()
    running = asyncio.ensure_future(box.shell("echo > /begun; sleep 60"))
    await eventually(lambda: has(box, "begun"))
    site.crash_agent(box.id)
    incidents = set()
    for call in (running, box.shell("true"), box.read("/begun")):
        with pytest.raises(Refused) as refused:
            await call
        assert (refused.value.code, refused.value.fields["end"], refused.value.fields["infra"]) == (
            "sandbox_lost", "runtime", True,
        )  # fmt: skip
        incidents.add(refused.value.fields["incident"])
    view = await box.caller.look(box.id)
    assert view.end is not None and incidents == {view.end.incident} and view.end.incident
    if "log" in site.powers:
        assert f"incident {view.end.incident}: sandbox {box.id}" in site.server_log()


async def test_an_unknown_sandbox_is_no_lost_one(boxes: Boxes) -> None:
    """RL1: an id that never was is a mistake of the caller, not a failure of the platform, whatever it looks like."""
    box = await boxes.make()
    other = box.id[:9] + ("a" if box.id[9] != "a" else "b") + box.id[10:]
    for unknown in (other, box.id[:-1], box.id + "a", box.id.upper(), "nonsense"):
        for call in (box.caller.look(unknown), box.caller.stop(unknown), box.caller.renew(unknown, 60)):
            with pytest.raises(Refused) as refused:
                await call
            assert (refused.value.code, refused.value.kind) == ("not_found", "request"), unknown


AGENT = r"""
(setsid sh -c 'while :; do echo edit >> /repo/f; usleep 5000; done' &)
trap '' TERM INT HUP
while :; do echo edit >> /repo/f; usleep 5000; done
"""


@pytest.mark.parametrize("tools", [True, False])
async def test_nothing_is_written_after_the_deadline(boxes: Boxes, tools: bool) -> None:
    """RL2: an agent that edits on behind its deadline is stopped by it, with the image's tools and without any."""
    box = await boxes.make()
    await box.said("mkdir /repo")
    running = asyncio.ensure_future(box.shell(AGENT, timeout=2))
    await eventually(lambda: has_edits(box))
    if not tools:
        for name in ("bin/kill", "bin/ps", "bin/killall"):
            await box.caller.remove(box.id, f"/{name}")
        await box.caller.move(box.id, "/bin/sh", "/gone")
    result = await running
    assert (result.outcome, result.limit) == ("timeout", 2)
    graded = await box.read("/repo/f")
    assert graded
    await asyncio.sleep(0.5)
    assert await box.read("/repo/f") == graded


async def has_edits(box: Box) -> bool:
    return "f" in await box.names("/repo")


async def test_how_a_sandbox_ended_is_one_of_the_stated_ways(boxes: Boxes) -> None:
    """RL1: the end that a look tells is of the list in docs/sdk.md."""
    box = await boxes.make()
    view = await box.stop()
    assert view.end is not None and str(view.end.end) in ENDS and str(view.end.end) == "stopped"
