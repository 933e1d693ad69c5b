"""Into a port of the sandbox: HTTP requests and raw tunnels, through aether. What answers there is hostile."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import h11

from dsec.edge.door import Door
from dsec.edge.execution import failed, opened
from dsec.edge.portsockets import OWN_HEADERS, InnerSocket, pumped, until_one_ends
from dsec.model import aether as wire
from dsec.model.errors import InvalidArgument, NotFound, SandboxLost, Unavailable
from dsec.ports.agent import Channel
from dsec.web import Call, Socket, Stream

__all__ = ["PortProxy"]

_HEAD_MAX = 64 * 1024
_STATUS_MAX = 599
_BODILESS = (204, 304)
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
     b"upgrade", b"proxy-connection"}
)  # fmt: skip
_PROXIED = (b"x-dsec-proxied", b"1")
"""On every answer of a program inside, whatever it says itself: an error status of its own is no error of the platform."""
_NOT_INWARD = _HOP_BY_HOP | {b"authorization", b"host", b"idempotency-key", b"content-length", b"expect"}
"""Of the request: what belongs to one connection, and the platform's own key, which no program in a sandbox may see."""


def _port(call: Call[Any, Any]) -> int:
    text = call.params["port"]
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise InvalidArgument("1 to 65535", field="port")
    return int(text)


def _dropped(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that `Connection` names belong to the connection too (RFC 9110, 7.6.1)."""
    named = [value for key, value in headers if key == b"connection"]
    return frozenset(part.strip().lower() for value in named for part in value.split(b","))


def _target(call: Call[Any, Any]) -> bytes:
    """What follows /http/{port} in the request, as it was written."""
    scope = call.scope
    prefix = scope["path"][: len(scope["path"]) - len(call.params["path"])]
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    target = raw.partition(b"?")[0]
    slashes = prefix.rstrip("/").count("/")
    target = b"/" + target.split(b"/", slashes + 1)[-1] if target.count(b"/") > slashes else b"/"
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    return target


def _request(call: Call[Any, Any], port: int) -> h11.Request:
    scope, target = call.scope, _target(call)
    if scope["method"] == "CONNECT":
        raise InvalidArgument("a port is reached by /tunnel, not by CONNECT", field="method")
    dropped = _NOT_INWARD | _dropped(scope["headers"])
    headers = [(key, value) for key, value in scope["headers"] if key not in dropped]
    length = call.header(b"content-length")
    if length is not None:
        headers.append((b"content-length", length.encode()))
    elif call.header(b"transfer-encoding") is not None:
        headers.append((b"transfer-encoding", b"chunked"))
    headers += [(b"host", b"127.0.0.1:%d" % port), (b"connection", b"close")]
    return h11.Request(method=scope["method"], target=target, headers=headers)


def _outward_headers(head: h11.Response) -> tuple[tuple[bytes, bytes], ...]:
    """A length that is not the body's, since the answer has none or comes in chunks, would break our own connection."""
    named = {bytes(key) for key, _ in head.headers}
    dropped = _HOP_BY_HOP | _dropped(head.headers) | {_PROXIED[0]}
    if head.status_code in _BODILESS or b"transfer-encoding" in named:
        dropped |= {b"content-length"}
    return (*((bytes(key), bytes(value)) for key, value in head.headers if bytes(key) not in dropped), _PROXIED)


class _Exchange:
    """One request and its response over one tunnel; an answer's chunks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._peer = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_MAX)

    async def send(self, event: Any) -> None:
        data = self._peer.send(event)
        for start in range(0, len(data or b""), wire.MAX_PAYLOAD):
            await self._channel.send((data or b"")[start : start + wire.MAX_PAYLOAD])

    async def receive(self) -> Any:
        """The next event of the response. Raises Unavailable for one that is not HTTP or ends too soon."""
        try:
            while (event := self._peer.next_event()) is h11.NEED_DATA:
                frame = await self._channel.receive()
                if type(frame) is tuple:
                    self._peer.receive_data(frame[1])
                elif isinstance(frame, wire.ClosedReply):
                    self._peer.receive_data(b"")
                else:
                    raise failed(frame)
        except h11.RemoteProtocolError as error:
            raise Unavailable(f"the port's answer is not HTTP: {error}", what="port") from error
        if event is h11.PAUSED:  # for good: it would be the next event too
            raise Unavailable("the port's answer leaves HTTP", what="port")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            event = await self.receive()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return


class PortProxy:
    """Handlers of /http and /tunnel, called like their routes."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def http_request(self, call: Call[None, None]) -> Stream:
        port = _port(call)
        try:
            request = _request(call, port)
        except h11.LocalProtocolError as error:
            raise InvalidArgument(f"not a request that can be passed on: {error}", field="headers") from error
        chunks = self._exchange(call, port, request)
        head = await anext(chunks)
        if not isinstance(head, h11.Response) or head.status_code > _STATUS_MAX:
            await chunks.aclose()
            raise Unavailable("the port's answer has no head of HTTP", what="port")
        return Stream(chunks=chunks, status=head.status_code, media="", headers=_outward_headers(head))

    async def _exchange(self, call: Call[Any, Any], port: int, request: h11.Request) -> AsyncGenerator[Any, None]:
        """First the response's head, then its body in pieces; the visit lasts as long as that."""
        with self._door.enter(call) as resident:
            async with opened(resident, wire.ConnectRequest(port=port)) as channel:
                await _connected(channel)
                exchange = _Exchange(channel)
                error = await self._send_request(call, exchange, request)
                head = await exchange.receive()
                while isinstance(head, h11.InformationalResponse):
                    head = await exchange.receive()
                if error is not None and not isinstance(head, h11.Response):
                    raise error
                yield head
                async for chunk in exchange.body():
                    yield chunk

    @staticmethod
    async def _send_request(call: Call[Any, Any], exchange: _Exchange, request: h11.Request) -> Exception | None:
        """The error of a server that stopped reading; it may have answered all the same."""
        try:
            await exchange.send(request)
            async for chunk in call.chunks():
                await exchange.send(h11.Data(data=chunk))
            await exchange.send(h11.EndOfMessage())
        except SandboxLost as error:
            return error
        except h11.LocalProtocolError as error:
            raise InvalidArgument(f"the body does not fit its headers: {error}", field="body") from error
        return None

    async def http_socket(self, call: Call[None, None], socket: Socket) -> None:
        port, scope = _port(call), call.scope
        dropped = _NOT_INWARD | _dropped(scope["headers"]) | OWN_HEADERS
        headers = [
            (key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"] if key not in dropped
        ]
        with self._door.enter(call) as resident:
            async with opened(resident, wire.ConnectRequest(port=port)) as channel:
                await _connected(channel)
                inner = InnerSocket(channel, port, _target(call).decode("latin-1"), scope.get("subprotocols", []))
                await socket.accept(await inner.open(headers))
                await pumped(inner, socket)

    async def tunnel(self, call: Call[None, None], socket: Socket) -> None:
        port = _port(call)
        with self._door.enter(call) as resident:
            async with opened(resident, wire.ConnectRequest(port=port)) as channel:
                await _connected(channel)
                await socket.accept()
                await until_one_ends(_outward(channel, socket), _inward(channel, socket))


async def _connected(channel: Channel) -> None:
    reply = await channel.receive()
    if isinstance(reply, wire.FailedReply) and reply.code == NotFound.code:
        raise NotFound(reply.detail or "nothing listens there", what="port")
    if not isinstance(reply, wire.DoneReply):
        raise failed(reply)


async def _outward(channel: Channel, socket: Socket) -> None:
    while True:
        frame = await channel.receive()
        if type(frame) is tuple:
            await socket.send_bytes(frame[1])
        elif isinstance(frame, wire.ClosedReply):
            return
        else:
            raise failed(frame)


async def _inward(channel: Channel, socket: Socket) -> None:
    while True:
        message = await socket.receive()
        if isinstance(message, str):
            raise InvalidArgument("a tunnel takes binary frames", field="frame")
        for start in range(0, len(message), wire.MAX_PAYLOAD):
            await channel.send(message[start : start + wire.MAX_PAYLOAD])
