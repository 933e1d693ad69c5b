"""A WebSocket as a handler sees it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from dsec.model.errors import DSecError
from dsec.ports.cluster import Receive, Send

__all__ = ["Socket", "SocketGone", "close_code"]

_REASON_MAX = 120


class SocketGone(Exception):
    """The other end closed the socket."""


def close_code(error: DSecError) -> int:
    """A private close code (RFC 6455, 7.4.2): 4000 plus the error's HTTP status."""
    return 4000 + error.status


class Socket:
    """One WebSocket. `accept` must come first; `receive` gives bytes or text and raises SocketGone at its end."""

    __slots__ = ("_receive", "_send", "accepted", "closed")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.accepted = False
        self.closed = False

    async def accept(self, subprotocol: str | None = None) -> None:
        """Completes the handshake, agreeing on one of the client's subprotocols where given; an error raised before this is answered as a problem document over HTTP."""
        message = await self._receive()
        if message["type"] != "websocket.connect":
            raise SocketGone
        await self._put({"type": "websocket.accept", "subprotocol": subprotocol})
        self.accepted = True

    async def receive(self) -> bytes | str:
        """The next message. Raises SocketGone when the client has closed or vanished."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            self.closed = True
            raise SocketGone
        data = message.get("bytes")
        return data if data is not None else str(message.get("text") or "")

    async def send_bytes(self, data: bytes) -> None:
        """Sends a binary message; waits while the client is slow. Raises SocketGone."""
        await self._put({"type": "websocket.send", "bytes": data})

    async def send_text(self, text: str) -> None:
        """Sends a text message; waits while the client is slow. Raises SocketGone."""
        await self._put({"type": "websocket.send", "text": text})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Closes it; does nothing when it is closed already."""
        if self.closed:
            return
        self.closed = True
        await self._put({"type": "websocket.close", "code": code, "reason": reason[:_REASON_MAX]})

    async def until_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work`, which only sends, until it ends or the client goes, whose messages are dropped meanwhile."""
        failures: list[Exception] = []

        async def kept(part: Coroutine[Any, Any, None]) -> None:
            try:
                await part
            except Exception as error:  # noqa: BLE001 - raised below, outside the group, which would wrap it
                failures.append(error)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(kept(work)), group.create_task(kept(self._drain()))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        if failures:
            raise failures[0]

    async def _drain(self) -> None:
        while True:
            await self.receive()

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError as error:  # servers raise a kind of OSError for a client that is gone
            self.closed = True
            raise SocketGone from error
        except (
            RuntimeError
        ) as error:  # and uvicorn this, where it closed the socket itself: a client that answers no ping
            if message["type"] == "websocket.accept":
                raise
            self.closed = True
            raise SocketGone from error
