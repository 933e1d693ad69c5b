"""The command line as a user runs it: a real process against the fake server."""

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from apifake import KEY, Server, serving

DSEC = [sys.executable, "-c", "from dsec.cli import main; main()"]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "root").mkdir()
    async with serving(tmp_path / "root") as made:
        yield made


@pytest.fixture
async def box(server: Server) -> str:
    async with dsec.DSecClient(server.url, KEY) as client:
        return (await client.run_container(dsec.DSecContainerRunArgs(container_image="python-3.11", job="j"))).id


def environment(server: Server) -> dict[str, str]:
    return {**os.environ, "DSEC_URL": server.url, "DSEC_API_KEY": KEY}


async def cli(server: Server, *argv: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *DSEC, *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environment(server)
    )
    out, err = await process.communicate(stdin)
    return process.returncode or 0, out, err.decode()


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
async def test_exec_has_the_commands_status(server: Server, box: str, script: str, status: int) -> None:
    code, out, err = await cli(server, "exec", box, "sh", "-c", f"echo out; echo err >&2; {script}")
    assert (code, out) == (status, b"out\n")
    assert err.startswith("err\n") and ("signalled" in err) == (status > 128 and status != 255)
    assert server.jobs == {}, "it is ended and forgotten"


async def test_exec_takes_the_usual_two_hyphens(server: Server, box: str) -> None:
    code, out, _ = await cli(server, "exec", box, "--", "echo", "--", "-x")
    assert (code, out) == (0, b"-- -x\n")
    assert (await cli(server, "exec", box, "--"))[0] == 2


async def test_exec_detached_leaves_it_to_logs(server: Server, box: str) -> None:
    code, out, _ = await cli(server, "exec", "-d", box, "--", "sh", "-c", "echo kept; sleep 60")
    assert code == 0 and list(server.jobs) == [out.decode().strip()], "it runs on under the id that was printed"
    code, shown, _ = await cli(server, "logs", box, out.decode().strip())
    assert (code, shown) == (0, b"kept\n")
    assert (await cli(server, "exec", "-d", "-i", box, "true"))[0] == 2


async def test_a_message_names_the_field_once(server: Server, box: str) -> None:
    _, _, err = await cli(server, "exec", "--timeout", "-1", box, "true")
    assert "field" not in err


async def test_exec_json_collects_and_says_the_class(server: Server, box: str) -> None:
    code, out, err = await cli(
        server, "exec", "--json", "--timeout", "0.2", box, "sh", "-c", "printf '\\377'; sleep 60"
    )
    record = json.loads(out)
    assert (code, record["outcome"], record["exit_code"], record["stdout_base64"]) == (124, "timeout", None, "/w==")
    assert "timeout" in err
    code, out, _ = await cli(server, "exec", "--json", "-i", box, "cat", stdin=b"piped")
    assert (code, json.loads(out)["stdout"]) == (0, "piped")


async def test_exec_sends_a_pipe_only_when_asked(server: Server, box: str) -> None:
    data = os.urandom(300_000)
    assert (await cli(server, "exec", "-i", box, "cat", stdin=data))[:2] == (0, data)
    assert (await cli(server, "exec", box, "cat", stdin=b"unread"))[:2] == (0, b"")


async def test_exec_passes_its_options_and_leaves_the_commands_alone(server: Server, box: str) -> None:
    code, out, _ = await cli(
        server, "exec", "-e", "A=b", "--user", "u", "--cwd", "/", "--timeout", "9", box, "echo", "--json", "-t"
    )
    assert (code, out) == (0, b"--json -t\n")
    assert (await cli(server, "exec", "-e", "novalue", box, "true"))[0] == 2
    assert (await cli(server, "exec", "-it", box, "true"))[0] == 2


async def test_exec_status_when_it_cannot_run(server: Server, box: str) -> None:
    code, _, err = await cli(server, "exec", box, "no-such-command")
    assert code == 127 and "CommandNotFound" in err
    code, out, err = await cli(server, "exec", "--json", "s404", "true")
    assert code == 125 and json.loads(out)["code"] == "not_found" and "NotFound" in err
    server.url = "http://127.0.0.1:1"
    code, _, err = await cli(server, "exec", box, "true")
    assert code == 125 and "Unavailable" in err and "dsec up" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_command_too(server: Server, box: str, number: int) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *DSEC, "exec", box, "sh", "-c", "echo ready; exec sleep 60", stdout=pipe, env=environment(server)
    )
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    await process.communicate()
    assert process.returncode == 128 + number
    assert server.jobs == {}


async def test_a_closed_stdout_ends_the_command_too(server: Server, box: str) -> None:
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *DSEC, "exec", box, "sh", "-c", "while echo y; do :; done", stdout=writing, stderr=asyncio.subprocess.PIPE,
        env=environment(server),
    )  # fmt: skip
    os.close(writing)
    await asyncio.to_thread(os.read, reading, 10)
    os.close(reading)
    await process.communicate()
    assert process.returncode == 141 and server.jobs == {}


async def test_exec_on_a_terminal_is_raw_and_puts_it_back(server: Server, box: str) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = await asyncio.create_subprocess_exec(
        *DSEC, "exec", "-it", box, "cat", stdin=theirs, stdout=theirs, stderr=theirs, env=environment(server),
        start_new_session=True,
    )  # fmt: skip
    while not server.jobs:
        await asyncio.sleep(0.01)
    job = next(iter(server.jobs.values()))
    assert job.request.pty is not None
    while termios.tcgetattr(theirs)[3] & termios.ICANON:
        await asyncio.sleep(0.01)
    os.write(ours, b"\x03typed\n")  # Ctrl-C goes through, as a byte
    got = b""
    while b"typed" not in got:
        got += await asyncio.to_thread(os.read, ours, 100)
    assert got.startswith(b"\x03")
    job.kill(signal.SIGTERM)
    assert await process.wait() == 143
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


async def test_run_creates_runs_and_removes(server: Server) -> None:
    code, out, err = await cli(
        server, "run", "--rm", "--image", "python-3.11", "--workspace", "w@1", "--toolkit", "a@1", "--toolkit", "b@1", "--memory",
        "512", "--cpus", "0.5", "--ttl", "0", "--label", "x=y", "--job", "j", "--volume", "v:/v:ro", "--data", "d:/d", "-e", "A=b",
        "--", "sh", "-c", "echo hi; exit 3",
    )  # fmt: skip
    assert (code, out) == (3, b"hi\n"), err
    view = next(iter(server.sandboxes.values()))
    assert view.state is dsec.SandboxState.GONE
    spec = view.spec
    assert (spec.workspace, spec.toolkits, spec.memory_limit_mb, spec.cpu_cores_limit) == (
        "w@1",
        ("a@1", "b@1"),
        512,
        0.5,
    )
    assert (spec.ttl_running_stop, spec.labels, spec.job, spec.env) == (None, {"x": "y"}, "j", {"A": "b"})
    assert [(m.volume, m.data, m.target, m.read_only) for m in spec.mounts] == [
        ("v", None, "/v", True),
        (None, "d", "/d", True),
    ]


async def test_run_without_a_command_prints_the_id(server: Server) -> None:
    code, out, _ = await cli(server, "run", "--image", "python-3.11")
    assert code == 0 and out.decode().strip() in server.sandboxes
    code, out, _ = await cli(server, "run", "--image", "python-3.11", "--json")
    assert json.loads(out)["state"] == "running"
    assert (await cli(server, "run", "--image", "x", "--rm"))[0] == 2
    server.faults.busy = 1000
    code, _, err = await cli(server, "run", "--image", "x", "--create-timeout", "0.2")
    assert code == 125 and "Busy" in err


async def test_cp_both_ways(server: Server, box: str, tmp_path: Path) -> None:
    (tmp_path / "src/d").mkdir(parents=True)
    (tmp_path / "src/d/f").write_bytes(b"content")
    assert (await cli(server, "cp", str(tmp_path / "src"), f"{box}:/w"))[0] == 0
    assert (server.root / "w/d/f").read_bytes() == b"content"
    assert (await cli(server, "cp", str(tmp_path / "src"), f"{box}:/w"))[0] == 0
    assert (server.root / "w/src/d/f").read_bytes() == b"content", "into a directory that is there"
    code, out, err = await cli(server, "cp", "--json", f"{box}:/w/d/f", str(tmp_path / "back"))
    assert code == 0 and json.loads(out) == {"entries": 1, "size": 7, "refused": []} and err == ""
    assert (await cli(server, "cp", f"{box}:/w/.", str(tmp_path / "back.d")))[0] == 0
    assert (tmp_path / "back.d/src/d/f").read_bytes() == b"content"
    assert (await cli(server, "cp", "a", "b"))[0] == 2
    code, _, err = await cli(server, "cp", f"{box}:/none", str(tmp_path / "x"))
    assert code == 1 and "NotFound" in err


async def test_cp_names_what_it_left_out(server: Server, box: str, tmp_path: Path) -> None:
    (server.root / "w").mkdir()
    os.symlink("/etc/passwd", server.root / "w" / "esc\x1b[31m")
    code, _, err = await cli(server, "cp", f"{box}:/w", str(tmp_path / "out"))
    assert code == 1 and "left out esc\\x1b[31m: an absolute link out of the tree" in err
    assert os.listdir(tmp_path / "out") == []


async def test_ps_logs_and_inspect(server: Server, box: str) -> None:
    async with dsec.DSecClient(server.url, KEY) as client:
        process = await (await client.get(box)).start(
            ["sh", "-c", "echo one; echo two >&2; exec cat"], keep_stdin=True, request_id="p1"
        )
        while (await process.info()).stderr_bytes_total < 4:
            await asyncio.sleep(0.01)
    code, out, _ = await cli(server, "ps", "--job", "j")
    assert code == 0 and [line.split()[:2] for line in out.decode().splitlines()] == [
        ["SANDBOX", "STATE"],
        [box, "running"],
    ]
    code, out, _ = await cli(server, "ps", "--json", box)
    assert [view["id"] for view in json.loads(out)] == ["p1"]
    code, out, err = await cli(server, "logs", box, "p1")
    assert (code, out, err) == (0, b"one\n", "two\n"), "it ends although the process runs"
    code, out, _ = await cli(server, "logs", "--json", "--from", "2", box, "p1")
    pieces = [json.loads(line) for line in out.splitlines()]
    assert {piece["stream"]: piece["text"] for piece in pieces} == {"stdout": "e\n", "stderr": "two\n"}
    server.jobs["p1"].kill()
    assert (await cli(server, "logs", "-f", box, "p1"))[1] == b"one\n"
    code, out, _ = await cli(server, "inspect", "--events", box)
    record = json.loads(out)[0]
    assert record["events"][0]["event"] == "started"
    assert record["sandbox"]["id"] == box and record["usage"]["pids"] == 1
    assert (await cli(server, "inspect", "s404"))[0] == 1


async def test_stop(server: Server, box: str) -> None:
    code, out, err = await cli(server, "stop", box, "s404aaaa")
    assert (code, out.decode().split()) == (1, [box]) and "s404aaaa: NotFound" in err
    assert (await cli(server, "stop", "--all"))[0] == 0
    assert (await cli(server, "stop"))[0] == 2
    code, out, _ = await cli(server, "stop", "--job", "j", "--json")
    assert json.loads(out) == {"stopped": [box], "failed": {}}


async def test_cp_shows_its_progress_on_a_terminal_only(server: Server, box: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *DSEC, "cp", str(tmp_path / "f"), f"{box}:/w/f", stderr=theirs, env=environment(server)
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += await asyncio.to_thread(os.read, ours, 4096)
        except OSError:  # the other end was closed
            break
    os.close(ours)
    assert await process.wait() == 0 and b"MB" in seen
    assert (await cli(server, "cp", str(tmp_path / "f"), f"{box}:/w/f"))[2] == ""
