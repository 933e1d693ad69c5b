"""WebSockets to a port of the sandbox, through its HTTP: our handshake inside, the caller's outside. What answers there is hostile."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import Event
from websockets.uri import parse_uri

from dsec.edge.execution import failed
from dsec.model import aether as wire
from dsec.model.errors import Unavailable
from dsec.ports.agent import Channel
from dsec.web import Socket, SocketGone

__all__ = ["OWN_HEADERS", "InnerSocket", "pumped", "until_one_ends"]

MESSAGE_MAX = 2 << 20
OWN_HEADERS = frozenset(
    {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"}
)
"""Of the caller's handshake: the connection inside has a handshake of its own."""


class InnerSocket:
    """The client's end of a WebSocket inside. Messages are whole, of at most MESSAGE_MAX bytes."""

    def __init__(self, channel: Channel, port: int, target: str, subprotocols: list[str]) -> None:
        self._channel = channel
        self._peer = ClientProtocol(
            parse_uri(f"ws://127.0.0.1:{port}/"), subprotocols=subprotocols or None, max_size=MESSAGE_MAX  # type: ignore[arg-type]
        )  # fmt: skip
        self._target = target
        self._events: deque[Event] = deque()
        self._parts: list[bytes] = []
        self._text = False
        self._sending = asyncio.Lock()

    async def open(self, headers: list[tuple[str, str]]) -> str | None:
        """Shakes hands; the subprotocol agreed on. Raises Unavailable where the port does not speak WebSocket."""
        request = self._peer.connect()
        fields = Headers([*request.headers.raw_items(), *headers])
        self._peer.send_request(Request(self._target, fields))
        await self._flush()
        while True:
            while self._events:  # frames may have come with the response: they stay for receive()
                if isinstance(self._events.popleft(), Response) and self._peer.handshake_exc is None:
                    return self._peer.subprotocol
            error = self._peer.handshake_exc
            if error is not None:
                told = str(error) if isinstance(error, InvalidHandshake) else type(error).__name__
                raise Unavailable(f"the port does not take a WebSocket: {told[:200]}", what="port")
            if not await self._fill():
                raise Unavailable("the port closed the connection during the handshake", what="port")

    async def _fill(self) -> bool:
        """More bytes from inside; False at their end."""
        frame = await self._channel.receive()
        if type(frame) is tuple:
            self._peer.receive_data(frame[1])
        elif isinstance(frame, wire.ClosedReply):
            self._peer.receive_eof()
            return False
        else:
            raise failed(frame)
        self._events.extend(self._peer.events_received())
        await self._flush()
        return True

    async def _flush(self) -> None:
        async with self._sending:
            for data in self._peer.data_to_send():
                for start in range(0, len(data), wire.MAX_PAYLOAD):
                    await self._channel.send(data[start : start + wire.MAX_PAYLOAD])

    async def receive(self) -> bytes | str | None:
        """The next whole message; None at the end."""
        while True:
            while self._events:
                event = self._events.popleft()
                found = self._message(event) if isinstance(event, Frame) else None
                if found is not None:
                    return found
            if self._peer.close_rcvd is not None or self._peer.parser_exc is not None:
                return None  # what answers inside need not close its end
            if not await self._fill():
                return None

    def _message(self, frame: Frame) -> bytes | str | None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return None
        if frame.opcode is not Opcode.CONT:
            self._text, self._parts = frame.opcode is Opcode.TEXT, []
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return None
        whole, self._parts = b"".join(self._parts), []
        return whole.decode("utf-8", "replace") if self._text else whole

    async def send(self, message: bytes | str) -> None:
        """Sends a whole message; waits while the program inside does not read."""
        try:
            if isinstance(message, str):
                self._peer.send_text(message.encode())
            else:
                self._peer.send_binary(message)
        except ProtocolError as error:
            raise SocketGone from error
        await self._flush()

    @property
    def close(self) -> tuple[int, str]:
        """How the program inside closed it, as far as that may be passed on: else 1001."""
        said = self._peer.close_rcvd
        if said is None:
            return 1001, ""
        code, reason = said.code, said.reason
        allowed = code in (1000, 1001, 1003) or 1007 <= code <= 1011 or 3000 <= code < 4000
        return (code, reason) if allowed else (1001, "")


async def pumped(inner: InnerSocket, socket: Socket) -> None:
    """Carries messages both ways until one side ends; then the other is closed."""

    async def outward() -> None:
        while (message := await inner.receive()) is not None:
            await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))
        await socket.close(*inner.close)

    async def inward() -> None:
        while True:
            await inner.send(await socket.receive())

    await until_one_ends(outward(), inward())


async def until_one_ends(outward: Coroutine[Any, Any, None], inward: Coroutine[Any, Any, None]) -> None:
    """Runs both ways of a connection until one ends, then the other is cancelled. A socket that is gone is an end like any other."""
    failures: list[Exception] = []

    async def kept(part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except SocketGone:
            return
        except Exception as error:  # noqa: BLE001 - raised below, outside the group, which would wrap it
            failures.append(error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(kept(outward)), group.create_task(kept(inward))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    if failures:
        raise failures[0]
