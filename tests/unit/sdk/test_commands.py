"""Commands, processes and sessions through the client."""

import asyncio
import signal
import time
from contextlib import aclosing

import pytest

import dsec
from apifake import Server


async def test_result_is_what_the_command_did(box: dsec.Sandbox) -> None:
    result = await box.exec(["sh", "-c", "cat; printf '\\377\\000' >&2; exit 3"], stdin=b"in\xff")
    assert (result.outcome, result.exit_code, result.signal) == (dsec.Outcome.EXITED, 3, None)
    assert (result.stdout, result.stderr, result.text) == (b"in\xff", b"\xff\x00", "in�")
    assert not result.ok and not result.truncated and result.stdout_bytes_total == 3


async def test_the_request_carries_what_was_asked(server: Server, box: dsec.Sandbox) -> None:
    await box.exec(["true"], env={"A": "b"}, cwd="/w", user="1:2", timeout=9, output_limit=5)
    order = server.executed[-1]
    assert (order.argv, order.env, order.cwd, order.user) == (("true",), {"A": "b"}, "/w", "1:2")
    assert (order.timeout, order.output_limit) == (9, 5)


async def test_timeout_and_signal_are_results(box: dsec.Sandbox) -> None:
    result = await box.run_shell("sleep 60", timeout=0.1)
    assert result.outcome is dsec.Outcome.TIMEOUT and result.exit_code is None
    result = await box.run_shell("kill -9 $$")
    assert (result.outcome, result.signal, result.exit_code) == (dsec.Outcome.SIGNALLED, 9, None)


async def test_check_raises_with_the_result(box: dsec.Sandbox) -> None:
    assert (await box.exec(["true"], check=True)).ok
    with pytest.raises(dsec.CommandFailed, match="exit code 4") as caught:
        await box.run_shell("echo out; exit 4", check=True)
    assert caught.value.result.text == "out\n"
    assert isinstance(caught.value, dsec.TaskError) and not caught.value.is_infra_error


async def test_errors_are_of_the_taxonomy(server: Server, box: dsec.Sandbox) -> None:
    with pytest.raises(dsec.CommandNotFound):
        await box.exec(["no-such-command"])
    with pytest.raises(dsec.InvalidArgument):
        await box.exec("echo x")
    server.sandboxes.clear()
    with pytest.raises(dsec.SandboxLost) as caught:
        await box.exec(["true"])
    assert caught.value.end == "node_lost" and caught.value.is_infra_error
    assert not dsec.SandboxLost("idle", end="idle", infra=False).is_infra_error, "its caller let it idle out"


async def test_cancelling_an_exec_ends_it_on_the_server(server: Server, box: dsec.Sandbox) -> None:
    task = asyncio.get_running_loop().create_task(box.exec(["sleep", "60"]))
    while not server.executed:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while not server.cancelled:
            await asyncio.sleep(0.001)
    told = [seen[1] for seen in server.seen if seen[1].startswith(f"/v1/sandboxes/{box.id}/cancel")]
    assert len(told) == 1, "so that the server does not wait for the caller to come back"


async def read(process: dsec.Process) -> dict[str, bytes]:
    got = {"stdout": b"", "stderr": b""}
    async for piece in process.stream():
        assert piece.offset == len(got[piece.stream]) and piece.lost == 0
        got[piece.stream] += piece.data
    return got


async def test_process_streams_and_waits(box: dsec.Sandbox) -> None:
    process = await box.start(["sh", "-c", "echo a; echo b >&2; exit 7"], request_id="mine")
    assert process.id == "mine"
    assert await read(process) == {"stdout": b"a\n", "stderr": b"b\n"}
    assert (process.view.running, process.view.exit_code) == (False, 7)
    assert (await process.wait()).exit_code == 7
    assert [view.id for view in await box.processes()] == ["mine"]
    await process.stop()
    await process.stop()
    with pytest.raises(dsec.NotFound):
        await box.attach("mine")


async def test_process_takes_input_while_it_is_read(box: dsec.Sandbox) -> None:
    process = await box.start(["cat"], keep_stdin=True)
    await process.write(b"x" * 300_000)
    async with aclosing(process.stream()) as pieces:
        got = b""
        async for piece in pieces:
            got += piece.data
            if len(got) == 300_000:
                await process.write(b"end")
                await process.close_stdin()
    assert got == b"x" * 300_000 + b"end"


async def test_a_broken_stream_goes_on_where_it_broke(server: Server, box: dsec.Sandbox) -> None:
    process = await box.start(["sh", "-c", "head -c 500000 /dev/zero | tr '\\0' z"])
    server.faults.cut_stream_after = 1000
    assert await read(process) == {"stdout": b"z" * 500_000, "stderr": b""}
    streams = [path for _, path, _ in server.seen if "/stream" in path]
    assert len(streams) == 2 and "stdout_from=1000" in streams[1]


async def test_attach_reads_from_an_offset_and_beside_another(box: dsec.Sandbox) -> None:
    process = await box.start(["sh", "-c", "printf 0123456789; sleep 0.2; printf ab"])
    other = await box.attach(process.id, from_offset=4)
    pieces = [piece async for piece in other.stream()]
    assert b"".join(piece.data for piece in pieces) == b"456789ab" and pieces[0].offset == 4
    assert await read(process) == {"stdout": b"0123456789ab", "stderr": b""}


async def test_one_reader_a_process_object(box: dsec.Sandbox) -> None:
    process = await box.start(["cat"], keep_stdin=True)
    await process.write(b"a")
    async with aclosing(process.stream()) as pieces:
        assert (await anext(pieces)).data == b"a"
        with pytest.raises(dsec.InvalidArgument):
            await anext(process.stream())


async def test_leaving_early_detaches_and_the_process_goes_on(box: dsec.Sandbox) -> None:
    process = await box.start(["sh", "-c", "echo a; exec cat"], keep_stdin=True)
    async with aclosing(process.stream()) as pieces:
        await anext(pieces)
    assert (await process.info()).running
    await process.signal(signal.SIGTERM)
    assert (await process.wait()).signal == signal.SIGTERM


async def test_wait_with_a_timeout_says_that_it_runs(box: dsec.Sandbox) -> None:
    process = await box.start(["sleep", "60"])
    began = time.monotonic()
    assert (await process.wait(timeout=0.1)).running
    assert time.monotonic() - began < 5
    with pytest.raises(dsec.InvalidArgument):
        await process.resize(80, 24)
    await process.stop()


async def test_stream_of_a_process_that_is_gone_is_not_found(box: dsec.Sandbox) -> None:
    process = await box.start(["true"])
    await process.wait()
    await process.stop()
    with pytest.raises(dsec.NotFound):
        await read(process)


async def test_session_runs_and_closes(server: Server, box: dsec.Sandbox) -> None:
    async with await box.open_session(cwd="/") as session:
        assert (await session.run("echo s")).text == "s\n"
        assert (await box.run_shell("echo t", session=session)).text == "t\n"
        assert (await box.run_shell("echo u", session=session.id)).text == "u\n"
        with pytest.raises(dsec.CommandFailed):
            await session.run("exit 1", check=True)
        with pytest.raises(dsec.InvalidArgument):
            await box.run_shell("true", session=session, cwd="/")
    assert ("DELETE", f"/v1/sandboxes/{box.id}/sessions/session-1") in [seen[:2] for seen in server.seen]


async def test_a_session_that_is_gone_may_be_closed(server: Server, box: dsec.Sandbox) -> None:
    session = await box.open_session()
    server.closing = "not_found"
    await session.close()


async def test_http_answers_of_the_inside_are_answers(server: Server, box: dsec.Sandbox) -> None:
    answer = await box.http(8000, "post", "/p?q=1", headers={"X-Mine": "1"}, body=b"data")
    assert (answer.status, answer.headers["x-a"]) == (404, "b")
    assert answer.text == f"/v1/sandboxes/{box.id}/http/8000/p?q=1 data"
    assert server.http_headers["X-Mine"] == "1"
    with pytest.raises(dsec.Unavailable, match="nothing listens"):
        await box.http(9, "GET", "/")
    with pytest.raises(dsec.InvalidArgument):
        await box.http(8000, "GET", "/", headers={"authorization": "x"})
    with pytest.raises(dsec.TooLarge):
        await box.http(8000, "GET", "/" + "a" * 200, limit=100)


async def test_metrics_and_renew(box: dsec.Sandbox) -> None:
    assert (await box.metrics()).cpu_seconds == 0.5
    assert (await box.renew(60)).id == box.id
    assert [(event.event, event.fields) for event in await box.events()] == [("started", {"by": "p"})]
