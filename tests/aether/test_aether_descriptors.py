"""aether's own descriptors lead out of the sandbox: no path of the sandbox's choosing may be walked while they are there."""

import asyncio
import os
from pathlib import Path

import pytest

from aether.box import Box, request
from dsec.model import aether as wire

pytestmark = pytest.mark.root

NUMBERS = range(3, 32)


def said(path: Path) -> str:
    """A file of /proc; "" of a process that is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


async def test_no_directory_of_a_command_leads_through_aethers_descriptors(box: Box) -> None:
    await box.sh("for n in $(seq 3 31); do ln -s /proc/self/fd/$n /tmp/l$n; done")
    held = request(["sleep", "60"], process_id="held", keep=True, stream=False)
    async with await box.agent.begin(held) as channel:  # its group's directory is one more descriptor
        assert isinstance(await channel.receive(), wire.StartedReply)
    for pty in (None, wire.PtySize(cols=80, rows=24)):
        for number in NUMBERS:
            for cwd in (f"/proc/self/fd/{number}", f"/proc/thread-self/fd/{number}/..", f"/tmp/l{number}/../.."):
                assert await box.refusal(request(["true"], cwd=cwd, pty=pty)) == ("not_found", "cwd"), cwd
    await box.agent.call(wire.ForgetRequest(process_id="held"))


async def test_no_program_and_no_new_directory_does(box: Box) -> None:
    out = "/..".join([""] * 12)
    for number in NUMBERS:
        program = f"/proc/self/fd/{number}{out}/bin/sh"
        assert await box.refusal(request([program, "-c", "true"])) == ("command_not_found", "command")
        made = request(["true"], cwd=f"/proc/self/fd/{number}{out}/tmp/dsec-made", make_cwd=True)
        assert await box.refusal(made) == ("not_found", "cwd")


async def test_no_session_does(box: Box) -> None:
    for number in NUMBERS:
        wanted = wire.OpenSessionRequest(
            session_id="s", shell="", env=(), cwd=f"/proc/self/fd/{number}", user="", open_files=64
        )
        assert await box.refusal(wanted) == ("not_found", "cwd")


async def test_no_user_is_looked_up_through_one(box: Box) -> None:
    out = "/..".join([""] * 12)
    for number in NUMBERS:
        await box.sh(f"ln -sf /proc/self/fd/{number}{out}/etc/passwd /etc/passwd")
        assert await box.refusal(request(["true"], user="daemon")) == ("not_found", "user")
    await box.sh("ln -sf /proc/1/root/etc/passwd /etc/passwd")
    assert await box.refusal(request(["true"], user="daemon")) == ("not_found", "user")


async def test_aethers_own_directories_have_nothing_above_them(box: Box) -> None:
    """Should a path get through to them all the same, it ends at the sandbox's own groups."""
    mark = f"9{os.getpid()}"
    held = request(["sleep", mark], process_id="held", keep=True, stream=False)
    async with await box.agent.begin(held) as channel:
        assert isinstance(await channel.receive(), wire.StartedReply)
    sleeper = next(path for path in Path("/proc").glob("[0-9]*") if said(path / "cmdline") == f"sleep\0{mark}\0")
    folder = f"/proc/{said(sleeper / 'stat').split()[3]}/fd"
    groups = [name for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/cgroup.procs")]
    assert "6" in groups and len(groups) > 1
    for name in groups:
        assert os.path.samefile(f"{folder}/{name}/../../..", f"{folder}/6")


async def test_a_file_operation_stopped_from_inside_ends_with_its_caller(box: Box) -> None:
    """Its place would otherwise be taken for as long as the sandbox lives."""
    wanted = wire.FileWriteRequest(path="/tmp/f", user="", mode=None, make_parents=False, append=False)
    stop = "for p in /proc/[0-9]*; do grep -qx memfd:aether $p/comm && kill -STOP ${p#/proc/}; done; true"
    left = "n=0; for p in /proc/[0-9]*; do grep -qx memfd:aether $p/comm && n=$((n+1)); done; echo $n"
    async with await box.agent.begin(wanted) as channel:
        await channel.send(b"x")
        assert (await box.sh(left)).out == b"2\n"
        await box.sh(stop)
    async with asyncio.timeout(10):
        while (await box.sh(left)).out != b"1\n":
            await asyncio.sleep(0.2)
