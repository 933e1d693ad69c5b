"""The edge's HTTP API in process, on a fake aether: commands, the ordered log, processes, sessions, files, ports, faults."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from openapi_spec_validator import OpenAPIV31SpecValidator
from rig import SPEC, Rig, running, settle, until

from dsec.edge.output import Clipped
from dsec.edge.routes import ROUTES
from dsec.model import aether as wire
from dsec.model.layers import ImageConfig
from dsec.model.outcome import ExecResult
from dsec.model.views import StreamEvent
from dsec.testing.agent import FakeProcess, Fault
from dsec.testing.asgi import AsgiClient, SocketRefused
from dsec.web import document


def result(answer: Any) -> ExecResult:
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=ExecResult)


def event(text: bytes | str | None) -> StreamEvent:
    assert isinstance(text, str)
    return msgspec.json.decode(text, type=StreamEvent)


# -- commands ------------------------------------------------------------------------------------------------------------


async def test_exec(rig: Rig) -> None:
    view = await rig.create()
    found = result(await rig.exec(view, "echo", "a", "b"))
    assert (found.outcome, found.exit_code, found.stdout, found.stdout_bytes_total) == ("exited", 0, b"a b\n", 4)
    assert result(await rig.exec(view, "false")).exit_code == 1
    for size in (3, 40_000, 3 << 20):
        data = bytes(range(256)) * (size // 256 + 1)
        found = result(await rig.exec(view, "cat", stdin=base64.b64encode(data).decode(), output_limit=4 << 20))
        assert found.stdout == data and not found.truncated
    assert not rig.agent(view).processes and not rig.agent(view).channels


async def test_run_shell_is_bin_sh(rig: Rig) -> None:
    view = await rig.create()
    rig.agent(view).programs["/bin/sh"] = rig.agent(view).programs["echo"]
    assert result(await rig.call(view, "POST", "/exec", json={"shell": "x; y"})).stdout == b"-c x; y\n"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "argv"),
        ({"argv": ["a"], "shell": "b"}, "argv"),
        ({"argv": [""]}, "argv"),
        ({"argv": ["a\0"]}, "argv"),
        ({"shell": "a\0"}, "shell"),
        ({"argv": ["a"], "timeout": 0}, "timeout"),
        ({"argv": ["a"], "output_limit": -1}, "output_limit"),
        ({"argv": ["a"], "cwd": "x"}, "cwd"),
        ({"argv": ["a"], "env": {"A=": ""}}, "env.A="),
        ({"argv": ["a"], "user": ""}, "user"),
        ({"argv": ["a"], "pty": [80, 24]}, "pty"),
        ({"argv": ["a"], "pty": {"cols": 80, "rows": 24}}, "pty"),
        ({"argv": ["a"], "keep_stdin": True}, "keep_stdin"),
    ],
)
async def test_impossible_commands_name_their_field(rig: Rig, body: dict[str, Any], field: str) -> None:
    view = await rig.create()
    answer = await rig.call(view, "POST", "/exec", json=body)
    assert (answer.status, answer.json()["fields"].get("field")) == (400, field)
    assert not rig.agent(view).requests


async def test_image_sandbox_and_call_surroundings(rig: Rig) -> None:
    rig.images.configs["full"] = ImageConfig(env=("PATH=/opt/x", "A=b c"), user="1234:5678", working_dir="/w")
    view = await rig.create(replace(SPEC, container_image="full", env={"B": "2"}))
    assert result(await rig.exec(view, "env")).stdout.decode().split("\n") == [
        "PATH=/opt/x",
        "A=b c",
        "B=2",
        "cwd=/w",
        "user=1234:5678",
    ]
    [asked] = rig.agent(view).requests
    assert isinstance(asked, wire.ExecRequest) and asked.make_cwd and asked.open_files == SPEC.open_files_limit
    found = result(await rig.exec(view, "env", cwd="/tmp", user="root", env={"A": "z"})).stdout.decode().split("\n")
    assert {"A=z", "cwd=/tmp", "user=root", "HOME=/root"} <= set(found)


async def test_not_found_and_timeout_are_typed(rig: Rig) -> None:
    view = await rig.create()
    answer = await rig.exec(view, "nope")
    assert (answer.status, answer.json()["code"]) == (404, "command_not_found")
    found = result(await rig.exec(view, "hang", timeout=0.01))
    assert (found.outcome, found.limit, found.exit_code) == ("timeout", 0.01, None)


async def test_large_output_keeps_its_ends(rig: Rig) -> None:
    view = await rig.create()
    found = result(await rig.exec(view, "fill", str(3 << 20), output_limit=1000))
    assert found.truncated and (found.stdout_bytes_total, found.stderr_bytes_total) == (3 << 20, 3 << 20)
    whole = bytes(i % 251 for i in range(1 << 16)) * 48
    assert found.stdout == whole[:500] + whole[-500:] and found.stderr == b"e" * 1000


async def test_limits_are_told(rig: Rig) -> None:
    view = await rig.create()
    cell = rig.cell(view)

    async def eats(process: FakeProcess) -> int:
        cell.oom_kills += 1
        process.kill(9)
        return 0

    async def forks(process: FakeProcess) -> int:
        cell.pids_refused += 5
        return 254

    async def fills(process: FakeProcess) -> int:
        cell.disk_bytes = view.spec.disk_limit_mb << 20
        return 1

    cell.agent.programs |= {"eats": eats, "forks": forks, "fills": fills}
    found = result(await rig.exec(view, "eats"))
    assert (found.outcome, found.signal, found.limit) == ("out_of_memory", 9, 256 << 20)
    assert result(await rig.exec(view, "false")).outcome == "exited", "an earlier kill is not counted again"
    found = result(await rig.exec(view, "forks"))
    assert (found.outcome, found.exit_code, found.limit) == ("pids_limit", 254, 512)
    found = result(await rig.exec(view, "fills"))
    assert (found.outcome, found.exit_code) == ("disk_limit", 1)
    usage = (await rig.call(view, "GET", "/metrics")).json()
    assert usage["oom_kills"] == 1


# -- the ordered log -----------------------------------------------------------------------------------------------------


async def test_a_request_id_runs_once(rig: Rig) -> None:
    view = await rig.create()
    runs = 0

    async def count(process: FakeProcess) -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.01)
        process.write(b"%d" % runs)
        return 3

    rig.agent(view).programs["count"] = count
    answers = await asyncio.gather(*(rig.exec(view, "count", key="k/1 x") for _ in range(5)))
    assert {(result(a).stdout, result(a).exit_code) for a in answers} == {(b"1", 3)} and runs == 1
    assert result(await rig.exec(view, "count", key="k/1 x")).request_id == "k/1 x"
    assert runs == 1
    for body in ({"argv": ["count", "other"]}, {"argv": ["count"], "timeout": 5}):
        answer = await rig.call(view, "POST", "/exec", json=body, headers={"Idempotency-Key": "k/1 x"})
        assert (answer.status, answer.json()["code"]) == (409, "conflict")
    for same in (
        {"argv": ["count"], "output_limit": 1 << 20, "timeout": None},
        {"argv": ["count"], "env": {}, "stdin": ""},
    ):
        repeat = await rig.call(view, "POST", "/exec", json=same, headers={"Idempotency-Key": "k/1 x"})
        assert result(repeat).stdout == b"1", "a default written out is the same request"
    rig.clock.advance(3599.0)
    assert (await rig.exec(view, "count", key="k/1 x")).status in (200, 410)


async def test_errors_are_results_too(rig: Rig) -> None:
    view = await rig.create()
    for _ in range(2):
        assert (await rig.exec(view, "nope", key="a")).json()["code"] == "command_not_found"
    assert len(rig.agent(view).requests) == 1
    assert (await rig.exec(view, key="b")).status == 400
    assert result(await rig.exec(view, "true", key="b")).exit_code == 0, "what was refused did not act"


async def test_a_large_result_is_not_kept(rig: Rig) -> None:
    view = await rig.create()
    assert (await rig.exec(view, "fill", "2000", key="big")).status == 200
    answer = await rig.exec(view, "fill", "2000", key="big")
    assert (answer.status, answer.json()["fields"]["state"]) == (409, "forgotten")


async def test_a_lost_answer_never_runs_twice(rig: Rig) -> None:
    """EX3: a cut stream is an error, never a code; asked again, the same error. The sandbox answers, so it is not lost."""
    view = await rig.create()
    for fault in (Fault.LOSE_ANSWER, Fault.BREAK_BEFORE):
        rig.agent(view).faults[wire.ExecRequest] = fault
        answer = await rig.exec(view, "true", key=fault)
        assert (answer.status, answer.json()["code"]) == (500, "runtime_failure")
        assert (await rig.exec(view, "true", key=fault)).json()["code"] == "runtime_failure"
    assert [type(each) for each in rig.agent(view).requests] == [wire.ExecRequest, wire.HelloRequest] * 2


async def test_a_caller_that_goes_ends_its_command(rig: Rig) -> None:
    """Without a request_id at once; with one after the grace time, within which it can come back."""
    view = await rig.create()
    for key in (None, "k"):
        gone = asyncio.Event()
        headers = {"Idempotency-Key": key} if key else {}
        task = asyncio.ensure_future(
            rig.call(view, "POST", "/exec", json={"argv": ["hang"]}, gone=gone, headers=headers)
        )
        await until(lambda: bool(rig.agent(view).processes))
        gone.set()
        await task
        if key:
            assert rig.agent(view).processes
            await asyncio.sleep(0.03)
        assert not rig.agent(view).processes
    answer = await rig.exec(view, "hang", key="k")
    assert (answer.status, answer.json()["fields"]["state"]) == (409, "cancelled")


async def test_an_operation_given_up_ends_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, grace=60.0) as rig:
        view = await rig.create()
        waiting = asyncio.ensure_future(rig.exec(view, "hang", key="k"))
        await until(lambda: bool(rig.agent(view).processes))
        async with asyncio.timeout(1):
            assert (await rig.call(view, "POST", "/cancel", request_id="k")).status == 204
            assert not rig.agent(view).processes
            answer = await waiting
        assert (answer.status, answer.json()["fields"]["state"]) == (409, "cancelled")
        assert (await rig.call(view, "POST", "/cancel", request_id="k")).status == 204, "one that has ended too"
        assert (await rig.exec(view, "hang", key="k")).json()["fields"]["state"] == "cancelled"


async def test_coming_back_in_time(rig: Rig) -> None:
    view = await rig.create()
    release = asyncio.Event()

    async def waits(process: FakeProcess) -> int:
        await release.wait()
        return 7

    rig.agent(view).programs["waits"] = waits
    gone = asyncio.Event()
    first = asyncio.ensure_future(
        rig.call(view, "POST", "/exec", json={"argv": ["waits"]}, gone=gone, headers={"Idempotency-Key": "k"})
    )
    await until(lambda: bool(rig.agent(view).processes))
    gone.set()
    await first
    second = asyncio.ensure_future(rig.exec(view, "waits", key="k"))
    await settle()
    await asyncio.sleep(0.03)
    release.set()
    assert result(await second).exit_code == 7


# -- processes -----------------------------------------------------------------------------------------------------------


async def test_processes(rig: Rig) -> None:
    view = await rig.create()
    started = (
        await rig.call(view, "POST", "/processes", json={"argv": ["hang"]}, headers={"Idempotency-Key": "job"})
    ).json()
    assert (started["id"], started["running"]) == ("job", True)
    again = await rig.call(view, "POST", "/processes", json={"argv": ["hang"]}, headers={"Idempotency-Key": "job"})
    assert (again.status, again.json()["pid"]) == (201, started["pid"])
    assert [each["id"] for each in (await rig.call(view, "GET", "/processes")).json()] == ["job"]
    waited = await rig.call(view, "POST", "/processes/job/wait", timeout="0.01")
    assert waited.json()["running"]
    assert (await rig.call(view, "POST", "/processes/job/resize", json={"cols": 0, "rows": 1})).status == 400
    assert (await rig.call(view, "POST", "/processes/job/resize", json={"cols": 9, "rows": 9})).status == 204
    assert (await rig.call(view, "POST", "/processes/job/signal", signal="99")).status == 400
    assert (await rig.call(view, "POST", "/processes/job/signal", signal="15", tree="true")).status == 204
    ended = (await rig.call(view, "POST", "/processes/job/wait")).json()
    assert (ended["running"], ended["outcome"], ended["signal"]) == (False, "signalled", 15)
    assert (await rig.call(view, "DELETE", "/processes/job")).status == 204
    for method, rest in (("GET", "/processes/job"), ("DELETE", "/processes/job"), ("POST", "/processes/job/wait")):
        answer = await rig.call(view, method, rest)
        assert (answer.status, answer.json()["fields"]["what"]) == (404, "process")


async def test_a_killed_process_is_classed_by_what_happened_since_its_start(rig: Rig) -> None:
    view = await rig.create()
    rig.cell(view).oom_kills = 1
    await rig.call(view, "GET", "/metrics")
    for expected, kills in (("signalled", 0), ("out_of_memory", 1)):
        process = (await rig.call(view, "POST", "/processes", json={"argv": ["hang"]})).json()["id"]
        rig.cell(view).oom_kills += kills
        await rig.call(view, "POST", f"/processes/{process}/signal", signal="9")
        assert (await rig.call(view, "GET", f"/processes/{process}")).json()["outcome"] == expected


async def test_a_process_stream(rig: Rig) -> None:
    view = await rig.create()
    body = {"argv": ["cat"], "keep_stdin": True}
    process = (await rig.call(view, "POST", "/processes", json=body)).json()["id"]
    path = f"/v1/sandboxes/{view.id}/processes/{process}/stream"
    async with rig.client.socket(path) as socket:
        assert event(await socket.receive()).event == "started"
        await socket.send(b"\x03one\n")
        assert await socket.receive() == b"\x01one\n"
        await socket.send(b"\x03two\n")
        assert await socket.receive() == b"\x01two\n"
    async with rig.client.socket(path, stdout_from="4") as socket:
        assert event(await socket.receive()).event == "started"
        assert await socket.receive() == b"\x01two\n", "attached again, from an offset"
        await socket.send('{"event":"stdin_close"}')
        ended = event(await socket.receive())
        assert ended.event == "ended" and ended.process is not None and ended.process.exit_code == 0
        assert await socket.receive() is None and socket.closed == (1000, "")
    async with rig.client.socket(path) as socket:
        await socket.receive()
        assert await socket.receive() == b"\x01one\ntwo\n", "what is there already comes as one piece"
    with pytest.raises(BaseExceptionGroup) as refused:
        async with rig.client.socket(path + "x".replace("x", "/../none")):
            raise AssertionError("opened")
    assert isinstance(refused.value.exceptions[0], SocketRefused)


@pytest.mark.parametrize(
    "bad", [b"\x01x", "{}", "[", '{"event":"started"}', '{"event":"signal","signal":99}', '{"a":' * 5000]
)
async def test_a_malformed_frame_is_told(rig: Rig, bad: bytes | str) -> None:
    view = await rig.create()
    process = (await rig.call(view, "POST", "/processes", json={"argv": ["hang"]})).json()["id"]
    async with rig.client.socket(f"/v1/sandboxes/{view.id}/processes/{process}/stream") as socket:
        await socket.receive()
        await socket.send(bad)
        problem = event(await socket.receive()).problem
        assert problem is not None and problem.code == "invalid_argument"
        assert await socket.receive() is None and socket.closed == (4400, "invalid_argument")


async def test_a_stream_tells_the_sandbox_s_death(rig: Rig) -> None:
    view = await rig.create()
    process = (await rig.call(view, "POST", "/processes", json={"argv": ["hang"]})).json()["id"]
    async with rig.client.socket(f"/v1/sandboxes/{view.id}/processes/{process}/stream") as socket:
        await socket.receive()
        rig.cell(view).die()
        found = event(await socket.receive())
        if found.event != "ended":
            assert found.problem is not None and found.problem.code == "sandbox_lost"
        assert await socket.receive() is None


# -- sessions ------------------------------------------------------------------------------------------------------------


async def test_sessions(rig: Rig) -> None:
    view = await rig.create()
    opened = await rig.call(view, "POST", "/sessions", json={})
    assert opened.status == 201
    session = opened.json()["id"]
    assert (await rig.call(view, "POST", "/sessions", json={"shell": "bash"})).json()["fields"]["field"] == "shell"
    answers = await asyncio.gather(
        *(rig.call(view, "POST", f"/sessions/{session}/run", json={"command": f"c{i}"}) for i in range(4))
    )
    assert [result(each).stdout for each in answers] == [b"c0", b"c1", b"c2", b"c3"]
    assert [each["busy"] for each in (await rig.call(view, "GET", "/sessions")).json()] == [False]
    assert (await rig.call(view, "DELETE", f"/sessions/{session}")).status == 204
    answer = await rig.call(view, "POST", f"/sessions/{session}/run", json={"command": "x"})
    assert (answer.status, answer.json()["fields"]["what"]) == (404, "session")


# -- ports ---------------------------------------------------------------------------------------------------------------


async def test_http_to_a_port(rig: Rig) -> None:
    view = await rig.create()
    heard: list[bytes] = []

    def server(data: bytes) -> bytes:
        heard[:] = [data]
        if b"\r\n\r\n" not in data or (b"POST" in data and not data.endswith(b"body")):
            return b""
        return b"HTTP/1.1 201 Made\r\nX-A: b\r\nConnection: X-Hop\r\nX-Hop: 1\r\nX-Dsec-Proxied: no\r\nContent-Length: 5\r\n\r\nhello"

    rig.agent(view).listeners[8000] = server
    answer = await rig.call(
        view,
        "POST",
        "/http/8000/a//b%20c",
        body=[b"bo", b"dy"],
        headers={"authorization": "Bearer SECRET", "content-length": "4"},
    )
    assert (answer.status, answer.body, answer.headers["x-a"]) == (201, b"hello", "b")
    assert "x-hop" not in answer.headers and "connection" not in answer.headers
    assert b"SECRET" not in heard[0] and heard[0].startswith(b"POST /a//b") and b"ost: 127.0.0.1:8000" in heard[0]
    query = await rig.client.request("GET", f"/v1/sandboxes/{view.id}/http/8000", x="1")
    assert query.status == 201 and heard[0].startswith(b"GET /?x=1 HTTP/1.1")
    nothing = await rig.call(view, "GET", "/http/9/")
    assert (nothing.status, nothing.json()["fields"]["what"]) == (404, "port")
    assert answer.headers["x-dsec-proxied"] == "1" and "x-dsec-proxied" not in nothing.headers
    for port in ("0", "65536", "x"):
        assert (await rig.call(view, "GET", f"/http/{port}/")).status == 400
    assert rig.node.lifecycle.find(view.id).busy == 0 and not rig.agent(view).channels


@pytest.mark.parametrize(
    ("said", "status", "whole"),
    [
        (b"not http at all\r\n\r\n", 503, True),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 20), 503, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", 200, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", 503, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 503, True),
    ],
)
async def test_a_hostile_server(rig: Rig, said: bytes, status: int, whole: bool) -> None:
    view = await rig.create()
    rig.agent(view).listeners[80] = lambda data: said[: 1 << 20]
    answer = await rig.call(view, "GET", "/http/80/")
    assert (answer.status, answer.whole) == (status, whole)


async def test_a_tunnel(rig: Rig) -> None:
    view = await rig.create()
    rig.agent(view).listeners[22] = lambda data: data[::-1] if len(data) == 4 else b""
    async with rig.client.socket(f"/v1/sandboxes/{view.id}/tunnel/22") as socket:
        await socket.send(b"\0a")
        await socket.send(b"b\xff")
        assert await socket.receive() == b"\xffba\0"
        assert await socket.receive() is None and socket.closed == (1000, "")
    with pytest.raises(BaseExceptionGroup) as refused:
        async with rig.client.socket(f"/v1/sandboxes/{view.id}/tunnel/23"):
            raise AssertionError("opened")
    error = refused.value.exceptions[0]
    assert isinstance(error, SocketRefused) and error.response.json()["fields"]["what"] == "port"


# -- the whole -----------------------------------------------------------------------------------------------------------


async def test_without_a_principal_nobody_gets_in(rig: Rig) -> None:
    view = await rig.create()
    client = AsgiClient(rig.node.api)
    assert (await client.request("GET", f"/v1/sandboxes/{view.id}")).status == 401


async def test_faults_of_aether_are_typed(rig: Rig) -> None:
    view = await rig.create()
    rig.agent(view).faults[wire.FileStatRequest] = Fault.REFUSE
    answer = await rig.call(view, "GET", "/files/stat", path="/")
    assert (answer.status, answer.json()["code"]) == (500, "runtime_failure")


def test_the_document_covers_the_table() -> None:
    found = document(ROUTES, title="edge", version="1", description="")
    OpenAPIV31SpecValidator(found).validate()
    each_one = [each for item in found["paths"].values() for each in item.values()]
    operations = {each["operationId"] for each in each_one} | {each.get("x-websocket") for each in each_one}
    assert {route.name for route in ROUTES if route.method != "ANY"} <= operations
    assert {route.name for route in ROUTES if not route.permission} == {"preview_request", "preview_socket"}


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(0, 64))
def test_clipped_is_head_and_tail(parts: list[bytes], limit: int) -> None:
    kept = Clipped(limit)
    for part in parts:
        kept.add(part)
    whole = b"".join(parts)
    assert (kept.total, kept.truncated) == (len(whole), len(whole) > limit)
    tail = limit // 2
    expected = whole if len(whole) <= limit else whole[: limit - tail] + (whole[-tail:] if tail else b"")
    assert kept.value() == expected
