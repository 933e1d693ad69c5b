"""The edge's end of aether's Unix socket: a connection an operation, frames as in schema/aether.toml.

What comes from the other end is checked like any input: lengths, kinds and messages; what breaks the protocol ends the
connection. Reading pauses while nobody takes what came, so a flood of output waits in the sandbox and not here.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from errno import EAGAIN
from types import TracebackType
from typing import Self

import msgspec

from dsec.model.aether import (
    FRAME_END_OF_INPUT,
    FRAME_MESSAGE,
    FRAME_STDERR,
    FRAME_STDIN,
    FRAME_STDOUT,
    MAX_PAYLOAD,
    FailedReply,
    Reply,
    Request,
)
from dsec.model.errors import Busy, DSecError, RuntimeFailure, SandboxLost, error_from_code
from dsec.ports.agent import Frame

__all__ = ["UnixAgent", "UnixChannel"]

_HEADER = 5
_HELD_MOST = 2 << 20
_READ = 1 << 16
_HELD_FEW = 1 << 19
_WORTH_A_WRITE = 1 << 14

_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def _header(kind: int, length: int) -> bytes:
    return (length + 1).to_bytes(4, "little") + bytes((kind,))


def _frame(kind: int, payload: bytes) -> bytes:
    return _header(kind, len(payload)) + payload


class _Connection(asyncio.Protocol):
    """Bytes to frames, with a bounded store between the socket and who takes them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dialled: socket.socket) -> None:
        self._loop = loop
        self._socket = dialled
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._frames: deque[Frame] = deque()
        self._held = 0
        self._paused = False
        self._error: DSecError | None = None
        self._taker: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._buffer += data
        try:
            self._split()
        except RuntimeFailure as error:
            self._end(error)
            self.close()
        if self._held > _HELD_MOST and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _split(self) -> None:
        """Takes whole frames off the buffer. Raises RuntimeFailure for what is no frame of the protocol."""
        buffer, at = self._buffer, 0
        while len(buffer) - at >= _HEADER:
            length = int.from_bytes(buffer[at : at + 4], "little")
            kind = buffer[at + 4]
            if not 1 <= length <= MAX_PAYLOAD + 1 or kind not in (FRAME_MESSAGE, FRAME_STDOUT, FRAME_STDERR):
                raise RuntimeFailure(f"aether broke the protocol: frame of kind {kind}, length {length}")
            end = at + 4 + length
            if len(buffer) < end:
                break
            payload = bytes(memoryview(buffer)[at + _HEADER : end])
            at = end
            if kind == FRAME_MESSAGE:
                try:
                    self._frames.append(_decode.decode(payload))
                except (msgspec.DecodeError, RecursionError) as error:
                    raise RuntimeFailure(f"aether broke the protocol: {error}") from error
            else:
                self._frames.append((kind, payload))
            self._held += len(payload)
        del buffer[:at]

    def eof_received(self) -> bool:
        self._end(SandboxLost("aether closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._error is None:
            self._read_rest()
        self._end(SandboxLost("aether closed the connection"))

    def _read_rest(self) -> None:
        """What aether said before it closed: the loop does not look for it once a write has failed."""
        self._paused = True  # nothing is left to pause
        with suppress(OSError):
            while self._held <= _HELD_MOST and (data := self._socket.recv(_READ)):
                self.data_received(data)

    def _end(self, error: DSecError) -> None:
        if self._error is None:
            self._error = error
        self._wake()
        self.resume_writing()

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def pause_writing(self) -> None:
        if self._writer is None:
            self._writer = self._loop.create_future()

    def resume_writing(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    @property
    def has_frame(self) -> bool:
        return bool(self._frames)

    async def take(self) -> Frame:
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._taker = self._loop.create_future()
            await self._taker
        frame = self._frames.popleft()
        if isinstance(frame, tuple):
            self._held -= len(frame[1])
        if not self._frames:
            self._held = 0
        if self._paused and self._held < _HELD_FEW and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return frame

    def write(self, data: bytes) -> None:
        if self._error is not None or self._transport is None:
            raise self._error or SandboxLost("aether closed the connection")
        self._transport.write(data)

    def write_frame(self, kind: int, payload: bytes) -> None:
        """A frame; a large payload is not copied."""
        if len(payload) < _WORTH_A_WRITE:
            self.write(_frame(kind, payload))
        elif self._error is not None or self._transport is None:
            raise self._error or SandboxLost("aether closed the connection")
        else:
            self._transport.writelines((_header(kind, len(payload)), payload))

    async def drained(self) -> None:
        """Returns when the socket takes more. Raises what ended the connection."""
        if self._writer is not None:
            await asyncio.shield(self._writer)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class UnixChannel:
    """One operation under way; see ports.agent.Channel."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    @property
    def answered(self) -> bool:
        """A frame waits to be received."""
        return self._connection.has_frame

    async def send(self, data: bytes) -> None:
        """Input of the operation; waits while aether is slow. Raises SandboxLost, RuntimeFailure."""
        for start in range(0, len(data), MAX_PAYLOAD):
            part = data if len(data) <= MAX_PAYLOAD else data[start : start + MAX_PAYLOAD]
            self._connection.write_frame(FRAME_STDIN, part)
            await self._connection.drained()

    async def end_of_input(self) -> None:
        """No more input. Raises SandboxLost, RuntimeFailure."""
        self._connection.write(_frame(FRAME_END_OF_INPUT, b""))
        await self._connection.drained()

    async def receive(self) -> Frame:
        """The next reply or piece of output. Raises SandboxLost, RuntimeFailure."""
        return await self._connection.take()

    async def frames(self) -> AsyncIterator[Frame]:
        """All frames, until the connection ends, which raises."""
        while True:
            yield await self._connection.take()


def _dial(path: str, first: bytes) -> tuple[socket.socket, int]:
    """A connection to `path` on which as much of `first` is sent as fits: the other end works while ours is set up."""
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # Connecting a Unix socket never waits: there is room in the other's queue, or EAGAIN.
        dialled.connect(path)
        try:
            return dialled, dialled.send(first)
        except BlockingIOError:
            return dialled, 0
    except OSError:
        dialled.close()
        raise


class UnixAgent:
    """The aether that listens at `path`; see ports.agent.Agent."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def begin(self, request: Request) -> UnixChannel:
        """Connects and sends the request. Raises SandboxLost where nobody listens, Busy where too many wait."""
        data = _encode(request)
        if len(data) > MAX_PAYLOAD:
            raise RuntimeFailure(f"a request of {len(data)} bytes does not fit into a frame")
        frame = _frame(FRAME_MESSAGE, data)
        try:
            dialled, sent = _dial(self._path, frame)
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(lambda: _Connection(loop, dialled), sock=dialled)
        except OSError as error:
            if error.errno == EAGAIN:
                raise Busy("too many connections wait for aether", retry_after=0.1) from error
            raise SandboxLost(f"aether does not answer: {error.strerror or error}") from error
        if sent < len(frame):
            connection.write(frame[sent:])
        return UnixChannel(connection)

    async def call(self, request: Request) -> Reply:
        """One request, one reply. Raises the error that a `failed` reply names."""
        async with await self.begin(request) as channel:
            reply = await channel.receive()
        if isinstance(reply, tuple):
            raise RuntimeFailure("aether broke the protocol: output instead of a reply")
        if isinstance(reply, FailedReply):
            raise error_from_code(reply.code, reply.detail, {"what": reply.what})
        return reply
