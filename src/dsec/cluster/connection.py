"""One HTTP connection of a client that nobody has vouched for yet: bounded in what it may send, and in time, before its key is
looked at."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from dsec.model.errors import DSecError, TooLarge, Unavailable
from dsec.web import PROBLEM_JSON, problem_of
from dsec.web.problems import encode_problem

__all__ = ["HEAD_BYTES", "HEAD_SECONDS", "BoundedProtocol", "BoundedSocketProtocol"]

HEAD_BYTES = 64 * 1024
"""Bytes that may come without a request's head becoming whole, or without any of its body: a head, trailers, padding."""
HEAD_SECONDS = 20.0
"""How long a request's head may take, and how long a body may go on that nobody reads any more."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's own, which has no limit on a head's size and none on its time."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._idle_bytes = 0
        self._in_head = False
        self._in_body = False
        self._is_socket = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._is_socket or self.transport.is_closing():
            return
        if self._idle_bytes > HEAD_BYTES:
            self._refuse(TooLarge(f"a request's head has at most {HEAD_BYTES} bytes", limit=HEAD_BYTES), 431)
        elif not self._in_body and self._deadline is None:
            self._await_head()

    def handle_websocket_upgrade(self) -> None:
        self._is_socket = True  # the transport is another protocol's from here on, and so are its times
        self._came()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._came()
        self._in_head = False
        self._in_body = True
        super().on_headers_complete()
        if not self.parser.should_upgrade():
            self.headers = []  # trailers would join the headers that were judged already

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._idle_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._late)

    def _came(self) -> None:
        self._idle_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self._in_body:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            return  # the answer to the one before is still under way; its end closes or waits anew
        if self.cycle is not None and not self._in_head and self._idle_bytes == 0:
            return  # kept alive between two requests: that has a time of its own
        self._refuse(Unavailable(f"the request's head took more than {HEAD_SECONDS:.0f} s"), 408)

    def _refuse(self, error: DSecError, status: int) -> None:
        """Closes the connection, with an answer where none is under way."""
        if self.cycle is None or self.cycle.response_complete:
            body = encode_problem(problem_of(error, status))
            head = f"HTTP/1.1 {status} Refused\r\ncontent-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class BoundedSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's own, which keeps pongs for a client that does not read, and empty pieces of a message, without a bound."""

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # the pong: taken and not sent, as RFC 6455, 5.5.3 allows when more pings follow

    def handle_cont(self, event: Frame) -> None:
        if event.data or event.fin:
            super().handle_cont(event)
