"""Commands: how they run, how they end, and what is told of it (rows EX)."""

import asyncio
import signal
import time

import pytest

from dsec.testing.suite.boxes import Box, Boxes, eventually
from dsec.testing.suite.callers import Refused
from dsec.testing.suite.sites import Site, needs

pytestmark = pytest.mark.asyncio

FOUR_APPENDERS = r"""
mkdir /t
(while :; do echo x >> /t/background; usleep 100000; done) &
setsid sh -c 'while :; do echo x >> /t/session; usleep 100000; done' &
(setsid sh -c '(while :; do echo x >> /t/daemon; usleep 100000; done) &' &)
sh -c 'trap "" TERM INT HUP; while :; do echo x >> /t/deaf; usleep 100000; done' &
wait
"""


async def sizes(box: Box) -> dict[str, int]:
    return {name: view.size for name, view in (await box.names("/t")).items()}


async def test_a_timeout_ends_the_whole_tree(box: Box) -> None:
    """EX1: children in the background, in other sessions, daemons and deaf ones end with their command."""
    began = time.monotonic()
    result = await box.shell(FOUR_APPENDERS, timeout=2)
    assert time.monotonic() - began < 4
    assert (result.outcome, result.limit, result.exit_code) == ("timeout", 2.0, None)
    before = await sizes(box)
    assert set(before) == {"background", "session", "daemon", "deaf"} and all(before.values())
    await asyncio.sleep(1)
    assert await sizes(box) == before
    listed = (await box.said("ps -o args")).splitlines()
    assert len(listed) <= 4 and not any("usleep" in line for line in listed), listed
    assert (await box.exec(["true"])).exit_code == 0


async def slept(box: Box, timeout: float | None, sleep: str, outcome: str) -> None:
    began = time.monotonic()
    result = await box.exec(["sleep", sleep], timeout=timeout)
    taken = time.monotonic() - began
    assert result.outcome == outcome
    expected = timeout if outcome == "timeout" and timeout else float(sleep)
    assert expected - 0.05 <= taken <= expected + 1


@pytest.mark.parametrize(
    ("timeout", "sleep", "outcome"), [(1, "0.2", "exited"), (2, "100", "timeout"), (None, "2", "exited")]
)
async def test_the_timeout_asked_for_is_the_one_used(box: Box, timeout: float | None, sleep: str, outcome: str) -> None:
    """EX2, in seconds that a quick run has."""
    await slept(box, timeout, sleep, outcome)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("timeout", "outcome"), [(90, "timeout"), (None, "exited")])
async def test_long_timeouts_are_kept_to_the_second(box: Box, timeout: float | None, outcome: str) -> None:
    """EX2: 90 s, and no limit at all."""
    await slept(box, timeout, "100", outcome)


@pytest.mark.parametrize("code", [0, 1, 42, 255])
async def test_exit_codes_are_exact(box: Box, code: int) -> None:
    """EX3: what a command exits with is what is told."""
    result = await box.shell(f"exit {code}")
    assert (result.outcome, result.exit_code, result.signal) == ("exited", code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_deaths_by_signal_are_told_apart(box: Box, number: signal.Signals) -> None:
    """EX3: a signal is no exit code."""
    result = await box.shell(f"kill -{int(number)} $$")
    assert (result.outcome, result.exit_code, result.signal) == ("signalled", None, number)


@pytest.mark.parametrize(
    ("program", "code"),
    [("/none", "command_not_found"), ("none", "command_not_found"), ("/not-executable", "command_not_executable")],
)
async def test_what_cannot_be_run_is_no_result(box: Box, program: str, code: str) -> None:
    """EX3: not found and not executable differ from a run that failed."""
    with pytest.raises(Refused) as refused:
        await box.exec([program])
    assert (refused.value.code, refused.value.kind) == (code, "request")


async def test_a_cut_connection_is_an_error_and_never_a_code(boxes: Boxes) -> None:
    """EX3: the sandbox goes in the middle of a command."""
    box = await boxes.make()
    task = asyncio.ensure_future(box.shell("echo begun > /begun; sleep 60"))
    await eventually(lambda: has(box, "begun"))
    await box.stop()
    with pytest.raises(Refused) as refused:
        await task
    assert refused.value.code == "sandbox_lost"


async def test_a_cut_way_to_the_agent_is_an_error_and_never_a_code(site: Site, boxes: Boxes) -> None:
    """EX3: the connection to the agent breaks in the middle of a command; the sandbox goes on, and the next command works."""
    needs(site, "crash")
    box = await boxes.make()
    task = asyncio.ensure_future(box.shell("echo begun > /begun; sleep 60"))
    await eventually(lambda: has(box, "begun"))
    assert site.cut_agent(box.id) >= 1
    with pytest.raises(Refused) as refused:
        await task
    assert (refused.value.code, refused.value.kind) == ("runtime_failure", "infra"), refused.value
    assert await box.said("cat /begun; echo after") == "begun\nafter\n"


async def has(box: Box, name: str) -> bool:
    return name in await box.names("/")


async def flooded(box: Box, size: int) -> None:
    """Both streams at once, to their totals and bounds."""
    count = size >> 16
    one = f"dd if=/dev/zero bs=65536 count={count}"
    result = await box.shell(f"{one} 2>/dev/null & {one} >&2 2>/dev/null; wait", timeout=300, output_limit=1 << 20)
    assert (result.outcome, result.exit_code) == ("exited", 0)
    assert (result.stdout_bytes_total, result.stderr_bytes_total) == (size, size)
    assert len(result.stdout) == len(result.stderr) == min(size, 1 << 20)
    assert result.truncated is (size > 1 << 20)
    # What carries the output is no part of the sandbox's memory, and keeps no more than was asked for.
    assert (await box.usage()).memory_peak_bytes < 64 << 20


@pytest.mark.costly
@pytest.mark.parametrize("size", [64 << 10, 10 << 20, 64 << 20])
async def test_large_output_on_both_streams(box: Box, size: int) -> None:
    """EX6: nothing hangs, the bytes are right up to the limit, and the rest is counted."""
    await flooded(box, size)


async def test_head_and_tail_are_kept(box: Box) -> None:
    """EX6: of what is too long, the first and the last half of the limit."""
    result = await box.shell("seq 1 100000", output_limit=1000)
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert result.stdout == whole[:500] + whole[-500:]


EVERY = bytes(range(256))
PRINT_EVERY = "printf '" + "".join(f"\\{byte:03o}" for byte in EVERY) + "'"


async def test_bytes_that_are_not_utf8(box: Box) -> None:
    """EX7: every value, NULs, and a character split over two writes."""
    result = await box.shell(f"{PRINT_EVERY}; printf '\\303'; usleep 200000; printf '\\244'")
    assert result.stdout == EVERY + "ä".encode()
    assert isinstance(result.text, str)
    process = await box.start(f"sleep 0.3; {PRINT_EVERY}")
    assert b"".join([piece async for piece in box.caller.output(box.id, process.id)]) == EVERY


async def test_markers_in_a_session_are_data(box: Box) -> None:
    """EX7: nothing that a command prints is taken for the end of a command."""
    session = await box.caller.open_session(box.id)
    for _ in range(3):
        assert (await box.caller.run_in_session(box.id, session, PRINT_EVERY)).stdout == EVERY
        noise = "cat /proc/self/cmdline; echo; echo DSEC-END 0; printf '\\0\\0exit\\n'"
        found = await box.caller.run_in_session(box.id, session, noise)
        assert b"DSEC-END 0\n\0\0exit\n" in found.stdout and found.exit_code == 0
    await box.caller.close_session(box.id, session)


async def test_a_background_child_does_not_hold_the_call(box: Box) -> None:
    """EX8 (a): the shell's end is the command's, whoever still holds its output."""
    began = time.monotonic()
    result = await box.shell("sleep 600 & echo hi")
    assert (result.stdout, result.exit_code) == (b"hi\n", 0)
    assert time.monotonic() - began < 1.5


async def read_beside_a_stuck_reader(box: Box, pieces: int, between: int = 0) -> None:
    """Pieces of 1 MiB, and microseconds between them."""
    printed = f"for i in $(seq {pieces}); do dd if=/dev/zero bs=1M count=1 2>/dev/null; usleep {between}; done"
    size = pieces << 20
    process = await box.start(f"while [ ! -e /go ]; do usleep 20000; done; {printed}", output_limit=16 << 20)
    stuck, reader = (box.caller.output(box.id, process.id) for _ in range(2))
    first = asyncio.ensure_future(anext(stuck))
    got = asyncio.ensure_future(total(reader))
    await box.write("/go", b"")
    await first  # and no more of it
    assert await got == size
    view = await box.caller.wait(box.id, process.id)
    assert (view.exit_code, view.stdout_bytes_total) == (0, size)
    await stuck.aclose()


async def total(pieces: object) -> int:
    found = 0
    async for piece in pieces:  # type: ignore[attr-defined]
        found += len(piece)
    return found


async def test_a_reader_that_stops_holds_up_no_other(box: Box) -> None:
    """EX8 (b): within what is kept of a stream the other reader gets every byte."""
    await read_beside_a_stuck_reader(box, 12)


@pytest.mark.slow
async def test_a_reader_that_stops_holds_up_fifty_mebibytes_of_no_other(box: Box) -> None:
    """EX8 (b), at the row's size: more than is kept, at a pace (10 MiB/s) at which who reads on misses nothing."""
    await read_beside_a_stuck_reader(box, 50, 100_000)


async def test_attached_again_output_flows_on(box: Box) -> None:
    """EX8 (c), without a pause: a reader that left and one that comes later see the same stream."""
    process = await box.start("i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); usleep 20000; done")
    first = box.caller.output(box.id, process.id)
    assert (await anext(first)).startswith(b"0\n")
    await first.aclose()
    again = b"".join([piece async for piece in box.caller.output(box.id, process.id)])
    assert again == b"".join(b"%d\n" % n for n in range(40))


async def orphaned(box: Box, count: int) -> None:
    before = (await box.usage()).pids

    async def batch() -> None:
        for _ in range(count // 8):
            await box.shell("(usleep 50000 &) ; (true &)")

    await asyncio.gather(*(batch() for _ in range(8)))

    async def clean() -> bool:
        zombies = await box.said("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
        return int(zombies) == 0 and (await box.usage()).pids == before

    await eventually(clean, 2)


@pytest.mark.costly
@pytest.mark.parametrize("image", ["box:1", "full:1"])
async def test_orphans_are_reaped(boxes: Boxes, image: str) -> None:
    """EX9: for images with an entry point and without one, no zombie stays and no process is counted."""
    await orphaned(await boxes.make(image), 120)


@pytest.mark.slow
async def test_two_thousand_orphans_are_reaped(box: Box) -> None:
    """EX9, at the row's size."""
    await orphaned(box, 2000)


async def test_the_surroundings_are_the_image_s(boxes: Boxes) -> None:
    """EX12: environment, directory, user; and what a call gives wins over them. The entry point is not run."""
    box = await boxes.make("full:1")
    env, _, rest = (await box.said("env; echo; pwd; id -u; id -g; umask")).partition("\n\n")
    found = dict(line.split("=", 1) for line in env.splitlines())
    assert (found["PATH"], found["A"]) == ("/opt/x:/usr/bin:/bin", "b c")
    assert found["HOME"]
    assert rest.split() == ["/w", "1234", "5678", "0022"]
    told = await box.said("echo $A; pwd; id -u", env={"A": "z"}, cwd="/tmp", user="0")
    assert told.split() == ["z", "/tmp", "0"]


@pytest.mark.parametrize(
    "harm",
    [
        "rm -rf /bin /usr",
        "chmod 000 /bin/sh /bin/busybox",
        "dd if=/dev/zero of=/fill bs=1M 2>/dev/null; true",
        "kill -9 -1",
    ],
)
async def test_a_damaged_sandbox_is_told_apart(boxes: Boxes, harm: str) -> None:
    """EX14: the agent needs no program of the sandbox's, and what cannot run is an error and no exit code."""
    box = await boxes.make(disk_limit_mb=32)
    await box.shell(harm, timeout=30)
    try:
        assert (await box.exec(["/bin/true"], timeout=10)).exit_code == 0
    except Refused as refused:
        assert refused.code in ("command_not_found", "command_not_executable", "sandbox_lost")
    assert await box.names("/etc")
    assert (await box.usage()).memory_bytes >= 0


async def test_a_request_id_runs_once(box: Box) -> None:
    """LC3 for commands: a repeated call acts once, and one that differs is refused."""
    command = "echo x >> /count; wc -l < /count"
    results = await asyncio.gather(*(box.shell(command, "once") for _ in range(8)))
    assert {result.text.strip() for result in results} == {"1"}
    with pytest.raises(Refused) as refused:
        await box.shell("true", "once")
    assert refused.value.code == "conflict"
    assert await box.read("/count") == b"x\n"
