"""The dispatcher against an in-process client: matching, decoding, problems, streams, sockets, cancellation."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import Struct
from openapi_spec_validator import OpenAPIV31SpecValidator

from dsec.model.errors import Busy, Conflict, NotFound
from dsec.model.views import ExecRequest, FileView
from dsec.testing.asgi import AsgiClient, SocketRefused
from dsec.testing.clock import VirtualClock
from dsec.web import App, Bytes, Call, Route, Socket, Stream, bind, document, lines


class Size(Struct, forbid_unknown_fields=True):
    width: int
    deep: bool = False
    label: tuple[str, ...] = ()


ROUTES = (
    Route(name="echo", method="POST", path="/v1/{id}/exec", summary="Echo.", body=ExecRequest, answer=ExecRequest,
          body_limit=1000, acts=True, permission="run"),
    Route(name="fixed", method="GET", path="/v1/known/exec", summary="Fixed.", query=Size, answer=Size),
    Route(name="fail", method="POST", path="/fail/{how}", summary="Fails.", errors=(Busy,)),
    Route(name="upload", method="PUT", path="/files", summary="Upload.", body_media="application/octet-stream", answer=FileView),
    Route(name="stream", method="GET", path="/stream/{how}", summary="Stream.", answer_media="application/octet-stream"),
    Route(name="batch", method="POST", path="/batch", summary="Lines.", answer_media="application/x-ndjson"),
    Route(name="hang", method="POST", path="/hang", summary="Hangs."),
    Route(name="proxy", method="ANY", path="/http/{port}/{path:rest}", summary="Proxy.", body_media="*/*"),
    Route(name="chat", method="WS", path="/chat/{room}", summary="Chat."),
    Route(name="nothing", method="DELETE", path="/nothing", summary="Empty."),
)  # fmt: skip


class Target:
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.began = asyncio.Event()
        self.got = b""

    async def echo(self, call: Call[None, ExecRequest]) -> ExecRequest:
        assert call.params["id"]
        return call.body

    async def fixed(self, call: Call[Size, None]) -> Size:
        return call.query

    async def fail(self, call: Call[None, None]) -> None:
        if call.params["how"] == "busy":
            raise Busy("full", retry_after=1.2)
        raise ZeroDivisionError("secret detail")

    async def upload(self, call: Call[None, None]) -> Any:
        async for part in call.chunks():
            self.got += part
        return Bytes(body=b"%d" % len(self.got))

    async def stream(self, call: Call[None, None]) -> Stream:
        return Stream(chunks=self._pieces(call.params["how"]))

    async def _pieces(self, how: str) -> AsyncIterator[bytes]:
        if how == "early":
            raise NotFound("no", what="file")
        yield b"one"
        if how == "late":
            raise Conflict("broke")
        try:
            if how == "endless":
                self.began.set()
                await asyncio.Event().wait()
            yield b"two"
        finally:
            self.cancelled.set()

    async def batch(self, call: Call[None, None]) -> Stream:
        async def items() -> AsyncIterator[Size]:
            yield Size(1)
            yield Size(2, label=("a",))

        return lines(items())

    async def hang(self, call: Call[None, None]) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def proxy(self, call: Call[None, None]) -> Bytes:
        return Bytes(body=f"{call.scope['method']} {call.params['port']} {call.params['path']}".encode())

    async def chat(self, call: Call[None, None], socket: Socket) -> None:
        if call.params["room"] == "closed":
            raise NotFound("no room", what="room")
        await socket.accept()
        while True:
            got = await socket.receive()
            if got == "fail":
                raise Conflict("enough")
            if got == "end":
                return
            await socket.send_bytes(got if isinstance(got, bytes) else got.encode())

    async def nothing(self, call: Call[None, None]) -> None:
        return None


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def client(target: Target) -> AsgiClient:
    return AsgiClient(App(ROUTES, bind(ROUTES, target), VirtualClock()))


async def test_json_in_and_out(client: AsgiClient) -> None:
    answer = await client.request("POST", "/v1/s1/exec", json={"argv": ["true"], "stdin": "AAE="})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {"argv": ["true"], "stdin": "AAE="}
    assert int(answer.headers["content-length"]) == len(answer.body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"", "body"),
        (b'{"argv": 3}', "argv"),
        (b'{"argv": ["a", 3]}', "argv[1]"),
        (b'{"nope": 3}', "nope"),
        (b'{"pty": {"cols": "x"}}', "pty.cols"),
    ],
)
async def test_a_bad_body_names_its_field(client: AsgiClient, body: bytes, field: str) -> None:
    answer = await client.request("POST", "/v1/s1/exec", body=body)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.json()["code"], answer.json()["fields"]["field"]) == ("invalid_argument", field)


async def test_query_types(client: AsgiClient) -> None:
    answer = await client.request("GET", "/v1/known/exec", width="3", deep="true", label=["a", "b"])
    assert answer.json() == {"width": 3, "deep": True, "label": ["a", "b"]}
    for query, field in (
        ({}, "width"),
        ({"width": "x"}, "width"),
        ({"width": 1, "odd": 1}, "odd"),
        ({"width": ["1", "2"]}, "width"),
    ):
        answer = await client.request("GET", "/v1/known/exec", **query)
        assert (answer.status, answer.json()["fields"]["field"]) == (400, field)


async def test_a_large_body_is_refused_before_it_is_read(client: AsgiClient) -> None:
    answer = await client.request("POST", "/v1/s1/exec", body=b"x", headers={"content-length": "1001"})
    assert (answer.status, answer.json()["fields"]["limit"]) == (413, 1000)
    answer = await client.request("POST", "/v1/s1/exec", body=[b"x" * 600, b"x" * 600])
    assert answer.status == 413


async def test_paths_and_methods(client: AsgiClient) -> None:
    assert (await client.request("GET", "/v2")).json()["fields"] == {"what": "path"}
    assert (await client.request("POST", "/v1//exec")).status == 404
    answer = await client.request("GET", "/v1/s1/exec")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert (await client.request("GET", "/chat/a")).status == 405
    for path, expected in (
        ("/http/80/a/b//c", "PATCH 80 a/b//c"),
        ("/http/80/", "PATCH 80 "),
        ("/http/80", "PATCH 80 "),
    ):
        assert (await client.request("PATCH", path)).body.decode() == expected


async def test_the_unforeseen_becomes_an_incident(client: AsgiClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "dsec.web"):
        answer = await client.request("POST", "/fail/other")
    assert answer.status == 500
    assert answer.json()["code"] == "runtime_failure"
    assert b"secret" not in answer.body and b"Zero" not in answer.body
    assert answer.json()["fields"]["incident"] in caplog.text


async def test_busy_says_when(client: AsgiClient) -> None:
    answer = await client.request("POST", "/fail/busy")
    assert (answer.status, answer.headers["retry-after"], answer.json()["retryable"]) == (503, "2", True)


async def test_request_id_is_checked(client: AsgiClient) -> None:
    for bad in ("", "x" * 129, "a\x07b"):
        answer = await client.request("POST", "/fail/busy", headers={"Idempotency-Key": bad})
        assert answer.json()["fields"]["field"] == "Idempotency-Key"


async def test_streamed_bodies(client: AsgiClient, target: Target) -> None:
    answer = await client.request("PUT", "/files", body=[b"ab", b"", b"cd"])
    assert (answer.body, target.got) == (b"4", b"abcd")
    assert (await client.request("PUT", "/files", body=[b"ab"], cut=True)).status == 0


async def test_streamed_answers(client: AsgiClient, target: Target) -> None:
    assert (await client.request("GET", "/stream/fine")).body == b"onetwo"
    early = await client.request("GET", "/stream/early")
    assert (early.status, early.json()["code"]) == (404, "not_found")
    late = await client.request("GET", "/stream/late")
    assert (late.status, late.body, late.whole) == (200, b"one", False)
    assert (await client.request("POST", "/batch")).lines() == [
        {"width": 1, "deep": False, "label": []}, {"width": 2, "deep": False, "label": ["a"]},
    ]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), [("POST", "/hang"), ("GET", "/stream/endless")])
async def test_a_client_that_goes_cancels(client: AsgiClient, target: Target, method: str, path: str) -> None:
    gone = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.request(method, path, gone=gone))
        await target.began.wait()
        gone.set()
        assert not (await task).whole
    assert target.cancelled.is_set()


async def test_empty_answer(client: AsgiClient) -> None:
    answer = await client.request("DELETE", "/nothing")
    assert (answer.status, answer.body) == (204, b"")


async def test_sockets(client: AsgiClient) -> None:
    async with client.socket("/chat/open") as socket:
        await socket.send(b"\0\xff")
        assert await socket.receive() == b"\0\xff"
        await socket.send("fail")
        assert await socket.receive() is None
        assert socket.closed == (4409, "conflict")
    async with client.socket("/chat/open") as socket:
        await socket.send("end")
        assert await socket.receive() is None
        assert socket.closed == (1000, "")
    for path, code in (("/chat/closed", "not_found"), ("/nowhere", "not_found")):
        with pytest.raises(BaseExceptionGroup) as refused:
            async with client.socket(path):
                raise AssertionError("opened")
        [error] = refused.value.exceptions
        assert isinstance(error, SocketRefused)
        assert (error.response.status, error.response.json()["code"]) == (404, code)


def test_the_document_is_valid_and_says_what_the_table_says() -> None:
    found = document(ROUTES, title="t", version="1", description="d")
    OpenAPIV31SpecValidator(found).validate()
    echo = found["paths"]["/v1/{id}/exec"]["post"]
    assert echo["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ExecRequest"}
    assert {p["name"] for p in echo["parameters"]} == {"id", "Idempotency-Key"}
    assert [p["name"] for p in found["paths"]["/v1/known/exec"]["get"]["parameters"]] == ["width", "deep", "label"]
    assert set(found["paths"]["/http/{port}/{path}"]) == {"get", "put", "post", "delete", "patch", "head", "options"}
    assert "busy" in found["paths"]["/fail/{how}"]["post"]["responses"]["503"]["description"]


def test_a_route_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        App((*ROUTES, ROUTES[0]), bind(ROUTES, Target()), VirtualClock())
