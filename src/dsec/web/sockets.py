"""A WebSocket as a handler sees it."""

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

    async def accept(self) -> None:
        """Completes the handshake; an error raised before this is answered as a problem document over HTTP."""
        message = await self._receive()
        if message["type"] != "websocket.connect":
            raise SocketGone
        await self._put({"type": "websocket.accept"})
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

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError as error:  # servers raise a kind of OSError for a client that is gone
            self.closed = True
            raise SocketGone from error
