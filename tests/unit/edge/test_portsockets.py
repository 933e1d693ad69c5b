"""WebSockets into a sandbox's port: the inner half against a real server, over a channel as aether gives it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import websockets
from websockets.asyncio.server import ServerConnection, serve
from websockets.utils import accept_key

from dsec.edge.portsockets import MESSAGE_MAX, InnerSocket, pumped
from dsec.model import aether as wire
from dsec.model.errors import Unavailable
from dsec.web import Socket

Serve = Callable[[Any], Awaitable[None]]


class TcpChannel:
    """ports.agent.Channel over a real connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        assert len(data) <= wire.MAX_PAYLOAD
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> Any:
        data = await self._reader.read(7000)
        return (wire.FRAME_STDOUT, data) if data else wire.ClosedReply()


class Caller:
    """The other end of a Socket."""

    def __init__(self) -> None:
        self.inbound: asyncio.Queue[Any] = asyncio.Queue()
        self.outbound: asyncio.Queue[Any] = asyncio.Queue()
        self.inbound.put_nowait({"type": "websocket.connect"})
        self.socket = Socket(self.inbound.get, self.outbound.put)

    def say(self, message: bytes | str) -> None:
        kind = "text" if isinstance(message, str) else "bytes"
        self.inbound.put_nowait({"type": "websocket.receive", kind: message})

    async def hear(self) -> Any:
        found = await asyncio.wait_for(self.outbound.get(), 10)
        return found.get("text", found.get("bytes")) if found["type"] == "websocket.send" else found


async def carried(handler: Serve, talk: Callable[[Caller], Awaitable[None]], **options: Any) -> None:
    async with serve(handler, "127.0.0.1", 0, **options) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        inner = InnerSocket(TcpChannel(reader, writer), port, "/chat?x=1", ["b", "a"])  # type: ignore[arg-type]
        caller = Caller()
        try:
            await caller.socket.accept(await inner.open([("x-mine", "1")]))
            task = asyncio.get_running_loop().create_task(pumped(inner, caller.socket))
            await talk(caller)
            caller.inbound.put_nowait({"type": "websocket.disconnect"})
            await asyncio.wait_for(task, 10)
        finally:
            writer.close()


async def test_messages_go_both_ways_whole() -> None:
    seen: list[Any] = []

    async def echo(connection: ServerConnection) -> None:
        seen.append((connection.request.path, connection.request.headers["x-mine"], connection.subprotocol))
        async for message in connection:
            if message == "parts":
                await connection.send(iter([b"one", b"two"]))
            elif message == "close":
                await connection.close(3001, "mine")
            else:
                await connection.send(message)

    async def talk(caller: Caller) -> None:
        assert (await caller.hear()) == {"type": "websocket.accept", "subprotocol": "a"}
        for message in ("text é", b"\0\xff" * 100_000, ""):
            caller.say(message)
            assert await caller.hear() == message
        caller.say("parts")
        assert await caller.hear() == b"onetwo"
        caller.say("close")
        assert await caller.hear() == {"type": "websocket.close", "code": 3001, "reason": "mine"}

    await carried(echo, talk, subprotocols=["a"])
    assert seen == [("/chat?x=1", "1", "a")]


async def test_a_message_without_end_is_cut() -> None:
    async def flood(connection: ServerConnection) -> None:
        with pytest.raises(websockets.ConnectionClosed):
            await connection.send(b"x" * (MESSAGE_MAX + 1))
            await connection.recv()

    async def talk(caller: Caller) -> None:
        await caller.hear()
        found = await caller.hear()
        assert found["type"] == "websocket.close"

    await carried(flood, talk)


async def test_a_port_that_answers_otherwise_is_named() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            inner = InnerSocket(TcpChannel(reader, writer), port, "/", [])  # type: ignore[arg-type]
            with pytest.raises(Unavailable, match="does not take a WebSocket"):
                await inner.open([])
        finally:
            writer.close()


async def test_messages_that_come_with_the_handshake_are_kept_and_a_close_needs_no_end_of_stream() -> None:
    gone = asyncio.Event()

    async def at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        key = next(
            line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key")
        )
        writer.write(
            b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + accept_key(key).encode()
            + b"\r\n\r\n\x81\x05hello\x81\x03you\x88\x02\x0b\xb9"
        )
        await writer.drain()
        await reader.read()  # until the caller goes: this end never closes
        writer.close()
        gone.set()

    async with await asyncio.start_server(at_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        inner = InnerSocket(TcpChannel(reader, writer), port, "/", [])  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(5):
                await inner.open([])
                assert [await inner.receive() for _ in range(3)] == ["hello", "you", None]
            assert inner.close == (3001, "")
        finally:
            writer.close()
            await asyncio.wait_for(gone.wait(), 10)
