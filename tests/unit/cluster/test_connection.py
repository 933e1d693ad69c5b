"""What a client without a key may send: a bounded head, in bounded time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.http11 import Request

from dsec.cluster import connection
from dsec.cluster.serve import ServerSettings, open_listener, serve
from unit.cluster.fakes import RealClock

CALLS: list[list[tuple[bytes, bytes]]] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    CALLS.append(scope["headers"])
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (said := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": said["text"]})
        return
    while scope["path"] == "/read" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = open_listener(ServerSettings(listen="127.0.0.1:0", stop_patience=1.0), folder, RealClock())
    stop, ready = asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(serve(app, listener, ServerSettings(), stop, ready.set))
    await ready.wait()
    reader, writer = await asyncio.open_connection(*listener.socket.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        stop.set()
        await server


async def pour(writer: asyncio.StreamWriter, piece: bytes, times: int) -> int:
    """Sends until the server will take no more; what it took."""
    sent = 0
    try:
        for _ in range(times):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except OSError:
        return sent
    return sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET / HTTP/1.1\r\n", b"X: " + b"a" * 30_000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 5000),
        (b"GET / HTTP/1.1\r\nX: ", b"a" * 30_000),
        (b"GET /", b"a" * 30_000),
        (b"GET / HTTP/1.1\r\nX-", b"a" * 30_000),
        (b"", b"\r\n" * 15_000),
        (b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"X: " + b"a" * 30_000 + b"\r\n"),
        (b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a" * 30_000),
    ],
)
async def test_what_has_no_end_is_cut(tmp_path: Path, start: bytes, piece: bytes) -> None:
    async with served(tmp_path) as (_, writer):
        writer.write(start)
        assert await pour(writer, piece, 2000) < 55 << 20


async def test_a_head_too_large_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * (connection.HEAD_BYTES + 1))
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        assert b'"code":"too_large"' in await reader.read()
    async with served(tmp_path) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_trailers_do_not_become_headers(tmp_path: Path) -> None:
    CALLS.clear()
    async with served(tmp_path) as (reader, writer):
        writer.write(b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\nA: 1\r\n\r\n1\r\na\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"0\r\nAuthorization: Bearer x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert CALLS == [[(b"transfer-encoding", b"chunked"), (b"a", b"1")]]


@pytest.mark.parametrize("start", [b"", b"GET / HT", b"\r\n", b"GET / HTTP/1.1\r\n\r\nGET / HT"])
async def test_a_slow_head_is_cut(tmp_path: Path, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    async with served(tmp_path) as (reader, writer):
        writer.write(start)
        async with asyncio.timeout(5):
            assert b"HTTP/1.1 408" in await reader.read()


async def test_a_connection_is_kept_between_requests_and_a_slow_body_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    async with served(tmp_path) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /read HTTP/1.1\r\nContent-Length: 2\r\n\r\na")
            await asyncio.sleep(0.25)
            writer.write(b"b")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"ok")).endswith(b"ok")
            await asyncio.sleep(0.25)


async def test_a_body_that_nobody_reads_any_more_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    async with served(tmp_path) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\na")
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b"ok")


async def test_a_websocket_lives_longer_than_a_head_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    async with served(tmp_path) as (_, writer):
        host, port = writer.get_extra_info("peername")[:2]
        async with connect(f"ws://{host}:{port}/") as talk:
            for word in ("one", "two"):
                await asyncio.sleep(0.25)
                await talk.send(word)
                assert await talk.recv() == word


class Wire:
    """A transport that says it is full, and what was written to it."""

    def __init__(self) -> None:
        self.written = 0
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if self.written > 64 * 1024:
            self.protocol.pause_writing()

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        raise AssertionError("nothing was delivered")


async def test_a_socket_that_does_not_read_gets_no_pongs_without_end() -> None:
    config = uvicorn.Config(app, ws=connection.BoundedSocketProtocol)
    config.load()
    protocol, wire = connection.BoundedSocketProtocol(config, ServerState(), {}), Wire()
    wire.protocol = protocol
    protocol.connection_made(cast(Any, wire))
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    protocol.conn.receive_data(
        b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Sec-WebSocket-Key: " + b"A" * 22 + b"==\r\n\r\n"
    )
    request = next(iter(protocol.conn.events_received()))
    assert isinstance(request, Request)
    protocol.conn.send_response(protocol.conn.accept(request))
    protocol.conn.data_to_send()
    for _ in range(2000):
        protocol.data_received(b"\x89\xfd" + b"\0" * 4 + b"p" * 125)
    assert 64 * 1024 < wire.written < 66 * 1024
    protocol.data_received(b"\x02\x80\0\0\0\0" + b"\0\x80\0\0\0\0" * 1000)
    assert len(protocol.frames) == 1
