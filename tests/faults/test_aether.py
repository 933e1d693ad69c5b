"""aether crashes, hangs, loses its channel, is sent garbage: every caller gets a typed answer in time, and nothing stays."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

import dsec
from conformance.boxes import Boxes, eventually
from conformance.conftest import import_images
from dsec.model import aether as wire
from dsec.testing.node import Node
from faults.cells import aether_pid, crash, dial, groups, helpers, kill

pytestmark = pytest.mark.root

SOON = 10.0


async def started(box: dsec.Sandbox) -> asyncio.Task[object]:
    task = asyncio.create_task(box.run_shell("touch /tmp/started; sleep 600"))

    async def runs() -> bool:
        return (await box.exec(["test", "-e", "/tmp/started"])).exit_code == 0

    await eventually(runs)
    return task


async def _commands(box: dsec.Sandbox) -> asyncio.Task[object]:
    return await started(box)


async def _upload(box: dsec.Sandbox) -> asyncio.Task[object]:
    async def body() -> object:
        return await asyncio.gather(*(box.files.write(f"/tmp/big{n}", bytes(64 << 20)) for n in range(4)))

    task = asyncio.create_task(body())
    await asyncio.sleep(0.05)
    return task


async def _session(box: dsec.Sandbox) -> asyncio.Task[object]:
    session = await box.open_session()
    task = asyncio.create_task(session.run("sleep 600"))
    await asyncio.sleep(0.2)
    return task


async def _idle(box: dsec.Sandbox) -> asyncio.Task[object]:
    async def later() -> object:
        await asyncio.sleep(0.3)
        return await box.exec(["true"])

    return asyncio.create_task(later())


@pytest.mark.parametrize("by", ["its own fault", "SIGKILL"])
@pytest.mark.parametrize("use", [_commands, _upload, _session, _idle])
async def test_a_crash_is_a_lost_sandbox(
    node: Node, boxes: Boxes, use: Callable[[dsec.Sandbox], Awaitable[asyncio.Task[object]]], by: str
) -> None:
    box = await boxes.make()
    task = await use(box)
    began = time.monotonic()
    if by == "SIGKILL":
        kill(aether_pid(node, box.id))
    else:
        crash(node, box.id)
    with pytest.raises(dsec.SandboxLost) as caught:
        async with asyncio.timeout(SOON):
            await task
    assert caught.value.end == "runtime" and caught.value.is_infra_error
    assert ("signal 9" if by == "SIGKILL" else "signal ") in str(caught.value)
    view = await box.info()
    assert view.end is not None and (view.state, view.end.end) in (("gone", "runtime"), ("stopping", "runtime"))
    with pytest.raises(dsec.SandboxLost):
        await box.exec(["true"], request_id="again")
    with pytest.raises(dsec.SandboxLost):
        await box.renew(60)
    assert (await box.stop()).state == "gone"
    assert groups(node, box.id) == [] and not (node.state / "run" / box.id).exists()
    assert time.monotonic() - began < SOON


async def test_a_repeat_of_what_a_crash_cut_does_not_run_again(node: Node, boxes: Boxes) -> None:
    box = await boxes.make()
    task = asyncio.create_task(box.run_shell("sleep 600", request_id="once"))
    await asyncio.sleep(0.2)
    repeat = asyncio.create_task(box.run_shell("sleep 600", request_id="once"))
    await asyncio.sleep(0.1)
    kill(aether_pid(node, box.id))
    found = await asyncio.wait_for(asyncio.gather(task, repeat, return_exceptions=True), SOON)
    assert [type(each) for each in found] == [dsec.SandboxLost] * 2


@pytest.mark.slow
async def test_a_stuck_aether_is_declared_broken(tmp_path: Path) -> None:
    """It lives and says nothing: who waits for it is told within the patience of the look, and it is ended."""
    with Node(tmp_path / "s", DSEC_PULSE_INTERVAL="0.3", DSEC_PULSE_PATIENCE="0.5") as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            args = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64)
            box, other = await client.run_container(args), await client.run_container(args)
            calls = [asyncio.create_task(box.exec(["sleep", "600"])), asyncio.create_task(other.exec(["sleep", "3"]))]
            await asyncio.sleep(0.2)
            kill(aether_pid(node, box.id), signal.SIGSTOP)
            calls.append(asyncio.create_task(box.files.read("/bin/busybox")))
            lost, kept, read = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 15)
            for each in (lost, read):
                assert isinstance(each, dsec.SandboxLost) and each.end == "runtime", each
            assert "does not answer" in str(lost)
            assert not isinstance(kept, BaseException) and kept.exit_code == 0
            assert (await box.info()).state in ("stopping", "gone")
            await other.stop()


async def test_a_killed_file_helper_is_no_lost_sandbox(node: Node, box: dsec.Sandbox) -> None:
    """The operation fails, typed; its sandbox goes on; the old file is whole and nothing lies beside it."""
    await box.files.write("/tmp/d/f", b"old", make_parents=True)
    pid = aether_pid(node, box.id)
    killed = 0
    for _ in range(12):
        task = asyncio.create_task(box.files.write("/tmp/d/f", bytes(16 << 20)))
        while not task.done() and not (found := helpers(pid)):
            await asyncio.sleep(0.001)
        if task.done():
            continue
        await asyncio.sleep(random.uniform(0, 0.02))
        for helper in found:
            try:
                kill(helper)
                killed += 1
            except ProcessLookupError:
                continue
        try:
            await asyncio.wait_for(task, SOON)
        except dsec.RuntimeFailure:
            assert len(await box.files.read("/tmp/d/f")) in (3, 16 << 20)
        assert [entry.path for entry in await box.files.list("/tmp/d")] == ["/tmp/d/f"]
    assert killed > 3
    assert (await box.exec(["true"])).exit_code == 0


async def test_a_helper_killed_while_it_reads(node: Node, box: dsec.Sandbox) -> None:
    await box.run_shell("dd if=/dev/zero of=/tmp/big bs=1M count=100 2>/dev/null", check=True)
    pid = aether_pid(node, box.id)
    told = 0
    for _ in range(10):
        task = asyncio.create_task(box.files.read("/tmp/big"))
        while not task.done() and not (found := helpers(pid)):
            await asyncio.sleep(0.001)
        for helper in found:
            try:
                kill(helper)
            except ProcessLookupError:
                continue
        try:
            assert len(await asyncio.wait_for(task, SOON)) == 100 << 20
        except (dsec.RuntimeFailure, dsec.Unavailable):  # told, or the stream's end is missing
            told += 1
    assert told > 3
    assert (await box.exec(["true"])).exit_code == 0


def frame(kind: int, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(4, "little") + bytes((kind,)) + payload


def _message(request: wire.Request) -> bytes:
    return frame(wire.FRAME_MESSAGE, msgspec.msgpack.encode(request))


GARBAGE = {
    "random": random.Random(1).randbytes(4096),
    "oversized": b"\xff\xff\xff\x7f\x01" + bytes(4096),
    "just too long": (wire.MAX_PAYLOAD + 2).to_bytes(4, "little") + b"\x01",
    "empty frame": bytes(4),
    "a wrong kind": frame(wire.FRAME_STDOUT, b"x"),
    "input first": frame(wire.FRAME_STDIN, b"x"),
    "no message": frame(wire.FRAME_MESSAGE, b"\xc1"),
    "a reply": frame(wire.FRAME_MESSAGE, msgspec.msgpack.encode(wire.DoneReply())),
    "deep": frame(wire.FRAME_MESSAGE, b"\x91" * 60000),
    "half a frame": _message(wire.HelloRequest(version=1))[:-3],
    "half a header": b"\x01\0",
    "nothing": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_ends_one_connection(node: Node, box: dsec.Sandbox, name: str) -> None:
    call = asyncio.create_task(box.exec(["sleep", "0.5"]))
    for _ in range(20):
        with dial(node, box.id) as raw:
            raw.sendall(GARBAGE[name])
            raw.shutdown(1)
            with_reply = await asyncio.to_thread(_rest, raw)
            assert len(with_reply) < 4096
    assert (await call).exit_code == 0
    assert (await box.exec(["true"])).exit_code == 0
    assert len(os.listdir(f"/proc/{aether_pid(node, box.id)}/fd")) < 40


def _rest(raw: object) -> bytes:
    said = b""
    try:
        while data := raw.recv(65536):  # type: ignore[attr-defined]
            said += data
    except ConnectionResetError:
        pass
    return said


async def test_a_channel_cut_in_mid_frame_ends_its_operation_alone(node: Node, box: dsec.Sandbox) -> None:
    """Cut while aether sends a flood, and while it is sent one."""
    await box.run_shell("dd if=/dev/zero of=/tmp/big bs=1M count=20 2>/dev/null", check=True)
    for request, rest in (
        (wire.FileReadRequest(path="/tmp/big", user="", offset=0), b""),
        (
            wire.FileWriteRequest(path="/tmp/in", user="", make_parents=False, append=False),
            frame(wire.FRAME_STDIN, bytes(100))[:50],
        ),
    ):
        for size in (1, 5, 4096):
            with dial(node, box.id) as raw:
                raw.sendall(_message(request) + rest)
                if not rest:
                    await asyncio.to_thread(raw.recv, size)
    pid = aether_pid(node, box.id)

    async def let_go() -> bool:
        return not helpers(pid)

    await eventually(let_go)
    assert (await box.run_shell("ls /tmp/in; ls -a /tmp")).text.split() == [".", "..", "big"]


@pytest.mark.timeout(120)
async def test_connections_beyond_the_places_wait_and_harm_nobody(node: Node, box: dsec.Sandbox) -> None:
    held = []
    try:
        while len(held) < 1400:
            try:
                held.append(dial(node, box.id))
            except BlockingIOError:
                break
            except TimeoutError:
                break
        assert len(held) > 1024
        call = asyncio.create_task(box.exec(["true"]))
        await asyncio.sleep(0.5)
        assert not call.done() or isinstance(call.exception(), dsec.Busy)
    finally:
        for each in held:
            each.close()
    async with asyncio.timeout(SOON):
        assert (await call).exit_code == 0
        assert (await box.exec(["true"])).exit_code == 0


async def test_children_that_take_all_memory_leave_aether_alone(node: Node, boxes: Boxes) -> None:
    box = await boxes.make(memory_limit_mb=64)
    pid = aether_pid(node, box.id)
    eat = "x=$(yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | head -c 300000000)"
    results = await asyncio.gather(*(box.run_shell(eat, timeout=30) for _ in range(8)))
    assert "out_of_memory" in {result.outcome for result in results}
    assert aether_pid(node, box.id) == pid
    assert (await box.exec(["true"])).exit_code == 0
    await box.files.write("/tmp/f", b"still served")
