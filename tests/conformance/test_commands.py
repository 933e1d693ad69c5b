"""Commands: rows EX of docs/behaviour (what users of comparable systems have reported), on the container backend."""

import asyncio
import signal
import time

import pytest

import dsec
from conformance.boxes import Boxes, eventually

pytestmark = pytest.mark.root

FOUR_APPENDERS = r"""
mkdir /t
append() { while :; do echo x >> /t/$1; usleep 100000; done; }
(append background) &
setsid sh -c 'while :; do echo x >> /t/session; usleep 100000; done' &
(setsid sh -c '(while :; do echo x >> /t/daemon; usleep 100000; done) &' &)
sh -c 'trap "" TERM INT HUP; while :; do echo x >> /t/deaf; usleep 100000; done' &
wait
"""


async def sizes(box: dsec.Sandbox) -> dict[str, int]:
    return {entry.path.rsplit("/", 1)[-1]: entry.size for entry in await box.files.list("/t")}


async def test_ex1_timeout_ends_the_whole_tree(box: dsec.Sandbox) -> None:
    began = time.monotonic()
    result = await box.run_shell(FOUR_APPENDERS, timeout=2)
    assert time.monotonic() - began < 4
    assert (result.outcome, result.limit, result.exit_code) == ("timeout", 2.0, None)
    await asyncio.sleep(0.3)
    before = await sizes(box)
    assert set(before) == {"background", "session", "daemon", "deaf"} and all(before.values())
    await asyncio.sleep(1)
    assert await sizes(box) == before
    listed = (await box.run_shell("ps -o args")).text.splitlines()
    assert len(listed) <= 4 and not any("usleep" in line for line in listed), listed
    assert (await box.exec(["true"])).exit_code == 0


@pytest.mark.parametrize(
    ("timeout", "sleep", "outcome"), [(1, "0.2", "exited"), (3, "100", "timeout"), (None, "4", "exited")]
)
async def test_ex2_the_timeout_asked_is_the_one_used(
    box: dsec.Sandbox, timeout: float | None, sleep: str, outcome: str
) -> None:
    began = time.monotonic()
    result = await box.exec(["sleep", sleep], timeout=timeout)
    taken = time.monotonic() - began
    assert result.outcome == outcome
    expected = timeout if outcome == "timeout" and timeout else float(sleep)
    assert expected - 0.05 <= taken <= expected + 1


@pytest.mark.parametrize("code", [0, 1, 42, 255])
async def test_ex3_exit_codes(box: dsec.Sandbox, code: int) -> None:
    result = await box.run_shell(f"exit {code}")
    assert (result.outcome, result.exit_code, result.signal) == ("exited", code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_ex3_signal_deaths(box: dsec.Sandbox, number: signal.Signals) -> None:
    result = await box.run_shell(f"kill -{int(number)} $$")
    assert (result.outcome, result.exit_code, result.signal) == ("signalled", None, number)


async def test_ex3_not_found_and_not_executable(box: dsec.Sandbox) -> None:
    with pytest.raises(dsec.CommandNotFound):
        await box.exec(["/none"])
    with pytest.raises(dsec.CommandNotFound):
        await box.exec(["none"])
    with pytest.raises(dsec.CommandNotExecutable):
        await box.exec(["/not-executable"])


@pytest.mark.parametrize("size", [64 << 10, 10 << 20, 128 << 20])
async def test_ex6_large_output_on_both_streams(box: dsec.Sandbox, size: int) -> None:
    count = size >> 16
    both = f"dd if=/dev/zero bs=65536 count={count} 2>/dev/null & dd if=/dev/zero bs=65536 count={count} >&2 2>/dev/null; wait"
    result = await box.run_shell(both, timeout=60, output_limit=1 << 20)
    assert result.exit_code == 0
    assert (result.stdout_bytes_total, result.stderr_bytes_total) == (size, size)
    assert len(result.stdout) == len(result.stderr) == min(size, 1 << 20)
    assert result.truncated is (size > 1 << 20)


async def test_ex6_head_and_tail(box: dsec.Sandbox) -> None:
    result = await box.run_shell("seq 1 100000", output_limit=1000)
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert result.stdout == whole[:500] + whole[-500:]


async def test_ex7_bytes_that_are_not_utf8(box: dsec.Sandbox) -> None:
    every = bytes(range(256))
    octal = "".join(f"\\{byte:03o}" for byte in every)
    split = "printf '\\303'; usleep 200000; printf '\\244'"
    result = await box.run_shell(f"printf '{octal}'; {split}")
    assert result.stdout == every + "ä".encode()
    assert isinstance(result.text, str)
    session = await box.open_session()
    for _ in range(3):
        found = await session.run(f"printf '{octal}'")
        assert found.stdout == every
        found = await session.run("cat /proc/self/cmdline; echo; echo DSEC-END 0; printf '\\0\\0exit\\n'")
        assert b"DSEC-END 0\n\0\0exit\n" in found.stdout
    await session.close()


async def test_ex8_a_background_child_does_not_hold_the_call(box: dsec.Sandbox) -> None:
    began = time.monotonic()
    result = await box.run_shell("sleep 600 & echo hi")
    assert (result.stdout, result.exit_code) == (b"hi\n", 0)
    assert time.monotonic() - began < 1.5


async def test_ex8_two_readers(box: dsec.Sandbox) -> None:
    size = 20 << 20
    process = await box.start(["sh", "-c", f"sleep 1; dd if=/dev/zero bs=65536 count={size >> 16} 2>/dev/null"])
    stuck, reader = await box.attach(process.id), await box.attach(process.id)
    slow = stuck.stream()
    got = 0
    async with asyncio.timeout(60):
        async for output in reader.stream():
            got += len(output.data)
    lost = size - got
    assert got > 0 and lost >= 0
    view = await process.wait()
    assert (view.exit_code, view.stdout_bytes_total) == (0, size)
    await slow.aclose()


async def test_ex9_orphans_are_reaped(box: dsec.Sandbox) -> None:
    async def batch(count: int) -> None:
        for _ in range(count):
            await box.run_shell("(usleep 50000 &) ; (true &)")

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(batch(25))

    async def clean() -> bool:
        listed = (await box.run_shell("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")).text
        return int(listed) == 0

    await eventually(clean, 2)

    async def flat() -> bool:
        return (await box.metrics()).pids == 0

    await eventually(flat, 2)


async def test_ex12_surroundings_of_the_image(boxes: Boxes) -> None:
    box = await boxes.make("full:1")
    result = await box.run_shell("env; echo; pwd; id -u; id -g; umask")
    env, _, rest = result.text.partition("\n\n")
    found = dict(line.split("=", 1) for line in env.splitlines())
    assert (found["PATH"], found["A"]) == ("/opt/x:/usr/bin:/bin", "b c")
    assert found["HOME"]
    assert rest.split() == ["/w", "1234", "5678", "0022"]
    result = await box.run_shell("echo $A; pwd; id -u", env={"A": "z"}, cwd="/tmp", user="0")
    assert result.text.split() == ["z", "/tmp", "0"]


@pytest.mark.parametrize(
    "harm",
    [
        "rm -rf /bin /usr",
        "chmod 000 /bin/sh /bin/busybox",
        "dd if=/dev/zero of=/fill bs=1M 2>/dev/null; true",
        "kill -9 -1",
    ],
)
async def test_ex14_a_damaged_sandbox_is_told_apart(boxes: Boxes, harm: str) -> None:
    box = await boxes.make(disk_limit_mb=32)
    await box.run_shell(harm, timeout=30)
    try:
        result = await box.exec(["/bin/true"], timeout=10)
        assert result.exit_code == 0
    except (dsec.CommandNotFound, dsec.CommandNotExecutable, dsec.SandboxLost):
        pass
    assert [entry.path for entry in await box.files.list("/etc")]
    assert (await box.metrics()).memory_bytes >= 0


async def test_cancelling_an_exec_ends_its_tree(box: dsec.Sandbox) -> None:
    task = asyncio.create_task(box.run_shell("sleep 601 & sleep 601"))

    async def running(count: int) -> bool:
        return (await box.run_shell("ps | grep -c '[s]leep 601'; true")).text.strip() == str(count)

    await eventually(lambda: running(2))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: running(0), 0.5)


async def test_a_session_after_a_cancelled_command(box: dsec.Sandbox) -> None:
    session = await box.open_session()
    await session.run("x=kept")
    task = asyncio.create_task(session.run("sleep 602"))
    await asyncio.sleep(0.1)
    task.cancel()
    assert (await session.run("echo $x")).text == "kept\n"
    assert (await session.run("exit 3")).exit_code == 3
    await session.close()


async def test_a_request_id_runs_once(box: dsec.Sandbox) -> None:
    command = "echo x >> /count; wc -l < /count"
    results = await asyncio.gather(*(box.run_shell(command, request_id="once") for _ in range(8)))
    assert {result.text.strip() for result in results} == {"1"}
    with pytest.raises(dsec.Conflict):
        await box.run_shell("true", request_id="once")
    for _ in range(2):
        await box.files.write("/log", b"x", append=True, request_id="append")
        await box.files.mkdir("/made", parents=False, request_id="make")
        await box.files.move("/log", "/moved", replace=False, request_id="move")
        await box.files.remove("/made", request_id="remove")
        await box.renew(1000, request_id="renew")
    assert await box.files.read("/moved") == b"x"
    assert (await box.files.read_text("/count")) == "x\n"
