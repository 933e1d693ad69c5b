"""The edge's end of aether's socket, against servers that keep the protocol and that break it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from dsec.edge.agent import UnixAgent
from dsec.model import aether as wire
from dsec.model.errors import NotFound, RuntimeFailure, SandboxLost

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def frame(kind: int, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(4, "little") + bytes((kind,)) + payload


def message(reply: wire.Reply) -> bytes:
    return frame(wire.FRAME_MESSAGE, msgspec.msgpack.encode(reply))


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    length = int.from_bytes(await reader.readexactly(4), "little")
    data = await reader.readexactly(length)
    return data[0], data[1:]


@asynccontextmanager
async def agent(folder: Path, serve: Serve) -> AsyncIterator[UnixAgent]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(handle, folder / "s")
    try:
        yield UnixAgent(str(folder / "s"))
    finally:
        server.close()


async def test_one_request_one_reply(tmp_path: Path) -> None:
    seen: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, payload = await read_frame(reader)
        seen.extend((kind, msgspec.msgpack.decode(payload)))
        data = message(wire.HelloReply(version=1, pid=7))
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()

    async with agent(tmp_path, serve) as client:
        assert await client.call(wire.HelloRequest(version=1)) == wire.HelloReply(version=1, pid=7)
    assert seen == [wire.FRAME_MESSAGE, {"op": "hello", "version": 1}]


async def test_a_failed_reply_is_the_error_that_it_names(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(message(wire.FailedReply(code="not_found", detail="no such file", what="file")))

    async with agent(tmp_path, serve) as client:
        with pytest.raises(NotFound) as caught:
            await client.call(wire.ListProcessesRequest())
        assert caught.value.what == "file"
        async with await client.begin(wire.ListProcessesRequest()) as channel:
            assert isinstance(await channel.receive(), wire.FailedReply)


async def test_output_and_input_both_ways(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        while True:
            kind, payload = await read_frame(reader)
            if kind == wire.FRAME_END_OF_INPUT:
                break
            writer.write(frame(wire.FRAME_STDOUT, payload) + frame(wire.FRAME_STDERR, payload[:1]))
            await writer.drain()
        writer.write(message(wire.DoneReply()))

    data = bytes(range(256)) * 10000
    async with agent(tmp_path, serve) as client, await client.begin(wire.ListProcessesRequest()) as channel:
        async with asyncio.TaskGroup() as group:

            async def feed() -> None:
                await channel.send(data)
                await channel.end_of_input()

            group.create_task(feed())
            got = b""
            async for part in channel.frames():
                if not isinstance(part, tuple):
                    break
                got += part[1] if part[0] == wire.FRAME_STDOUT else b""
        assert got == data


async def test_a_flood_waits_in_the_sandbox(tmp_path: Path) -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(400):
            writer.write(frame(wire.FRAME_STDOUT, bytes(1 << 18)))
            await writer.drain()
            sent += 1 << 18

    async with agent(tmp_path, serve) as client, await client.begin(wire.ListProcessesRequest()) as channel:
        await channel.receive()
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.05)
        assert sent < 8 << 20
        for _ in range(399):
            await channel.receive()
        with pytest.raises(SandboxLost):
            await channel.receive()
    assert sent == 400 << 18


BROKEN = {
    "empty frame": bytes(5),
    "too long": (wire.MAX_PAYLOAD + 2).to_bytes(4, "little") + b"\1",
    "huge": b"\xff\xff\xff\xff\1",
    "unknown kind": frame(9, b""),
    "a client's kind": frame(wire.FRAME_STDIN, b"x"),
    "no message": frame(wire.FRAME_MESSAGE, b"\xc1"),
    "unknown message": frame(wire.FRAME_MESSAGE, msgspec.msgpack.encode({"reply": "nonsense"})),
    "a field missing": frame(wire.FRAME_MESSAGE, msgspec.msgpack.encode({"reply": "hello", "version": 1})),
    "deep": frame(wire.FRAME_MESSAGE, b"\x91" * 100000),
    "deep inside": frame(wire.FRAME_MESSAGE, b"\x82\xa5reply\xa4done\xa1x" + b"\x91" * 100000),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_breaks_the_protocol_ends_the_connection(tmp_path: Path, name: str) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(frame(wire.FRAME_STDOUT, b"before") + BROKEN[name] + frame(wire.FRAME_STDOUT, b"after"))
        await reader.read()
        closed.set()

    async with agent(tmp_path, serve) as client, await client.begin(wire.ListProcessesRequest()) as channel:
        assert await channel.receive() == (wire.FRAME_STDOUT, b"before")
        with pytest.raises(RuntimeFailure, match="broke the protocol"):
            await channel.receive()
        with pytest.raises(RuntimeFailure):
            await channel.send(b"x")
        async with asyncio.timeout(5):
            await closed.wait()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(SandboxLost):
        await UnixAgent(str(tmp_path / "nothing")).call(wire.HelloRequest(version=1))


async def test_the_end_midway_is_a_lost_sandbox(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(message(wire.DoneReply())[:-1])

    async with agent(tmp_path, serve) as client:
        with pytest.raises(SandboxLost):
            await client.call(wire.HelloRequest(version=1))


async def test_a_refusal_is_read_though_a_write_failed(tmp_path: Path) -> None:
    """aether may refuse and close before it took all of the input: its words are still there to be read."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        async with await UnixAgent(str(tmp_path / "s")).begin(wire.ListProcessesRequest()) as channel:
            with listener.accept()[0] as taken:  # all of this before the loop looks at the connection again
                taken.recv(1 << 16)
                taken.sendall(message(wire.FailedReply(code="permission_denied", detail="no", what="file")))
            with suppress(SandboxLost):
                await channel.send(b"x")
            reply = await channel.receive()
            assert isinstance(reply, wire.FailedReply) and reply.code == "permission_denied"
            with pytest.raises(SandboxLost):
                await channel.receive()


async def test_leaving_closes_the_connection(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        closed.set()

    async with agent(tmp_path, serve) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), await client.begin(wire.WatchRequest()) as channel:
                await channel.receive()
        async with asyncio.timeout(5):
            await closed.wait()
