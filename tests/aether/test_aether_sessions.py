"""Sessions through aether: state is kept, ends are exact, a timeout takes the command and leaves the shell."""

import asyncio
import time

import pytest

from aether.box import Box, request
from dsec.model import aether as wire

pytestmark = pytest.mark.root
SHELLS = ("/bin/bash", "/bin/dash", "/bin/busybox sh")


async def shells(box: Box) -> list[str]:
    await box.sh("printf '#!/bin/busybox sh\\nexec /bin/busybox sh \"$@\"\\n' > /tmp/ash; chmod 755 /tmp/ash")
    return ["/bin/bash", "/bin/dash", "/tmp/ash", ""]


async def test_state_is_kept(box: Box) -> None:
    for number, shell in enumerate(await shells(box)):
        name = f"s{number}"
        info = await box.open(name, shell, user="user", cwd="/home/user")
        assert info.running and not info.busy and info.shell == (shell or "/bin/bash")
        assert (await box.in_session(name, "pwd; id -u")).out == b"/home/user\n1000\n"
        ran = await box.in_session(name, "cd /tmp; x='a  b'; f() { return 42; }; export E=5; f")
        assert (ran.code, ran.out, ran.err, ran.ended.session_ended) == (42, b"", b"", False)
        ran = await box.in_session(name, "echo $? \"$x\" $PWD; sh -c 'echo $E'; cat <<X\nhere ' \"\nX\necho err >&2")
        assert (ran.out, ran.err, ran.code) == (b"42 a  b /tmp\n5\nhere ' \"\n", b"err\n", 0)
        assert (await box.in_session(name, "echo (")).code not in (0, None)
        assert (await box.in_session(name, "cat; echo end")).out == b"end\n"
        ran = await box.in_session(name, "exit 7")
        assert (ran.code, ran.ended.session_ended) == (7, True)
        message = wire.RunInSessionRequest(session_id=name, process_id="p", command="true", output_limit=0)
        assert await box.refusal(message) == ("not_found", "session")
    assert await box.agent.call(wire.ListSessionsRequest()) == wire.SessionsReply(items=())


async def test_much_output_and_marker_text(box: Box) -> None:
    await box.open("s")
    ran = await box.in_session("s", "head -c 5000000 /dev/zero; head -c 300000 /dev/zero >&2; echo end")
    assert (len(ran.out), len(ran.err), ran.out[-4:]) == (5_000_004, 300_000, b"end\n")
    ran = await box.in_session(
        "s", "for n in 0 8 252; do echo 0123456789abcdef 0 >&$n; done 2>/dev/null; echo x; exit() { echo no; }; false"
    )
    assert (ran.out.splitlines()[-1], ran.code) == (b"x", 1)
    data = "é" * 50_000
    assert (await box.in_session("s", f"x='{data}'; echo ${{#x}}; printf '%s' \"$x\"")).out.endswith(data.encode())


async def test_background_jobs_live_and_never_wait(box: Box) -> None:
    await box.open("s")
    await box.in_session("s", "(sleep 0.2; head -c 300000 /dev/zero; touch /tmp/done; sleep 0.1; echo last) & true")
    await asyncio.sleep(0.6)
    assert [item.path for item in await box.list("/tmp")] == ["/tmp/done"]
    ran = await box.in_session("s", "echo now")
    assert ran.out.endswith(b"last\nnow\n") and len(ran.out) <= 66_000
    assert ran.lost and ran.ended.stdout_total == 300_000 + 5 + 4
    begun = time.monotonic()
    ran = await box.in_session("s", "sleep 600 & echo hi")
    assert ran.out == b"hi\n" and time.monotonic() - begun < 1
    assert (await box.in_session("s", "kill %1 || kill $!; wait; echo gone")).out.endswith(b"gone\n")


async def test_a_timeout_drops_the_command_and_keeps_the_session(box: Box) -> None:
    for number, shell in enumerate(await shells(box)):
        name = f"s{number}"
        await box.open(name, shell)
        await box.in_session(name, "kept=1; cd /tmp")
        for command in [
            "sleep 100; echo MORE >> more\necho MORE >> more",
            "while :; do :; done; echo MORE >> more",
            "(setsid sh -c 'while :; do sleep 0.02; echo x >> grow; done' &); trap '' TERM; sleep 50; echo MORE >> more",
        ]:
            begun = time.monotonic()
            ran = await box.in_session(name, command, timeout_ms=300)
            assert (ran.ended.outcome, ran.ended.session_ended) == ("timeout", False), (shell, command)
            assert time.monotonic() - begun < 1.4
        sizes = [item.size for item in await box.list("/tmp")]
        ran = await box.in_session(name, "echo $kept $PWD")
        assert ran.out == b"1 /tmp\n", shell
        await asyncio.sleep(0.2)
        listed = await box.list("/tmp")
        assert [item.size for item in listed] == sizes and "/tmp/more" not in [item.path for item in listed]


async def test_a_closed_connection_gives_the_command_up(box: Box) -> None:
    await box.open("s")
    message = wire.RunInSessionRequest(
        session_id="s", process_id="p", command="sleep 100; touch /tmp/more", output_limit=0
    )
    async with await box.agent.begin(message) as channel:
        assert await box.refusal(message) == ("conflict", "session")
        listed = await box.agent.call(wire.ListSessionsRequest())
        assert isinstance(listed, wire.SessionsReply) and listed.items[0].busy
        assert channel is not None
    back = await box.in_session("s", "ls /tmp; echo back")
    assert back.out == b"back\n", "the next command waits until the one given up is out of the way"


async def test_a_session_that_will_not_come_back_is_ended(box: Box) -> None:
    await box.open("s", "/bin/dash")
    ran = await box.in_session("s", "trap '' INT; while :; do :; done", timeout_ms=200)
    assert (ran.ended.outcome, ran.ended.session_ended) == ("timeout", True)
    await box.open("s")
    await box.in_session("s", "sleep 500 & true")
    assert isinstance(await box.agent.call(wire.CloseSessionRequest(session_id="s")), wire.DoneReply)
    assert (await box.sh("pidof sleep")).code == 1


async def test_what_is_no_shell_is_refused(box: Box) -> None:
    fields = {"env": (), "cwd": "/", "open_files": 256, "user": ""}
    for shell, wanted in [("/bin/true", "unsupported"), ("/nope", "command_not_found")]:
        message = wire.OpenSessionRequest(session_id="x", shell=shell, **fields)  # type: ignore[arg-type]
        assert (await box.refusal(message))[0] == wanted
    await box.open("x")
    message = wire.OpenSessionRequest(session_id="x", shell="", **fields)  # type: ignore[arg-type]
    assert await box.refusal(message) == ("conflict", "session")
    assert await box.refusal(request(["true"], cwd="x")) == ("invalid_argument", "cwd")
