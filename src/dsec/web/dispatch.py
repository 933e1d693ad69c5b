"""The one dispatcher: an ASGI application over a table of routes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
from msgspec import Struct

from dsec.model.errors import DSecError, InvalidArgument, NotFound
from dsec.ports.clock import Clock
from dsec.ports.cluster import Receive, Scope, Send
from dsec.web.answers import Bytes, Headers, Stream
from dsec.web.call import REQUEST_ID_MAX, Call, ClientGone, QueryReader, invalid, read_body
from dsec.web.matching import Matcher
from dsec.web.problems import encode_problem, failure, problem_of, retry_after
from dsec.web.routes import PROBLEM_JSON, Route
from dsec.web.sockets import Socket, SocketGone, close_code

__all__ = ["App", "Guard", "Handler", "SocketHandler", "bind", "refuse"]

Handler = Callable[[Call[Any, Any]], Awaitable[Any]]
SocketHandler = Callable[[Call[Any, Any], Socket], Awaitable[None]]
Guard = Callable[[Call[Any, Any]], Awaitable[None]]

_encoder = msgspec.json.Encoder()
_JSON = b"application/json"


class _Served(Struct, frozen=True):
    """A route with all that can be made ahead of a request."""

    route: Route
    handler: Handler | SocketHandler
    query: QueryReader | None
    body: msgspec.json.Decoder[Any] | None


def bind(routes: Sequence[Route], target: object) -> dict[str, Handler | SocketHandler]:
    """The handlers of `routes`: methods of `target` called like the routes. Raises AttributeError for one not there."""
    return {route.name: getattr(target, route.name) for route in routes}


class App:
    """Serves `routes` by `handlers` (route name to coroutine function).

    A handler returns a record (sent as JSON with the route's status), Bytes, Stream, or None (an empty answer). `guard` runs
    once a route is found and before the body is read: it authenticates, and may set `call.principal`. A client that goes
    away cancels its handler. Errors become problem documents; one nobody foresaw becomes an incident in the log.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        handlers: Mapping[str, Handler | SocketHandler],
        clock: Clock,
        guard: Guard | None = None,
    ) -> None:
        self._clock = clock
        self._guard = guard
        self._matcher: Matcher[_Served] = Matcher()
        for route in routes:
            query = QueryReader(route.query) if route.query else None
            body = msgspec.json.Decoder(route.body) if route.body is not None else None
            self._matcher.add(route, _Served(route, handlers[route.name], query, body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            raise ValueError(f"cannot serve a scope of type {scope['type']}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        served, params, methods = self._matcher.find(scope["path"], scope["method"])
        if served is None or served.route.method == "WS":
            await _send_bytes(send, _unmatched(scope, methods))
            return
        call: Call[Any, Any] = Call(served.route, scope, receive, params)
        try:
            if served.route.body_media is None:
                await self._watched(served, call, send)
            else:
                await self._deliver(await self._answer(served, call), call, send)
        except ClientGone:
            return

    async def _watched(self, served: _Served, call: Call[Any, Any], send: Send) -> None:
        """Answers while a second task watches for the client's going, which cancels the first."""
        try:
            await self._prepare(served, call)
        except DSecError as error:
            await _send_bytes(send, _rendered(error))
            return
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(_watch(call.receive))
                try:
                    await self._deliver(await self._handle(served, call), call, send)
                finally:
                    watcher.cancel()
        except* ClientGone as gone:
            raise ClientGone from gone

    async def _prepare(self, served: _Served, call: Call[Any, Any]) -> None:
        try:
            if self._guard is not None:
                await self._guard(call)
            _read_request_id(call)
            if served.query is not None:
                call.query = served.query.read(call.scope["query_string"])
            if served.body is not None:
                data = await read_body(call, served.route.body_limit)
                call.body = served.body.decode(data)
            elif served.route.body_media is None:
                await read_body(call, served.route.body_limit)
        except (msgspec.DecodeError, RecursionError) as error:  # the second of a document that is nested too deeply
            raise invalid(error, "body") from error
        except (DSecError, ClientGone):
            raise
        except Exception as error:
            raise failure(error, self._clock, call.route.name) from error

    async def _answer(self, served: _Served, call: Call[Any, Any]) -> Bytes | Stream:
        try:
            await self._prepare(served, call)
        except DSecError as error:
            return _rendered(error)
        return await self._handle(served, call)

    async def _handle(self, served: _Served, call: Call[Any, Any]) -> Bytes | Stream:
        try:
            answer = await cast(Handler, served.handler)(call)
        except DSecError as error:
            return _rendered(error)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where the unforeseen becomes an incident
            return _rendered(failure(error, self._clock, call.route.name))
        if isinstance(answer, Bytes | Stream):
            return answer
        if answer is None:
            return Bytes(status=204 if call.route.status == 200 else call.route.status, media="")
        return Bytes(body=_encoder.encode(answer), status=call.route.status, media="application/json")

    async def _deliver(self, answer: Bytes | Stream, call: Call[Any, Any], send: Send) -> None:
        if isinstance(answer, Bytes):
            await _send_bytes(send, answer)
        elif call.body_ended and call.route.body_media is not None:
            try:
                async with asyncio.TaskGroup() as group:
                    watcher = group.create_task(_watch(call.receive))
                    try:
                        await self._stream(answer, call, send)
                    finally:
                        watcher.cancel()
            except* ClientGone as gone:
                raise ClientGone from gone
        else:
            await self._stream(answer, call, send)

    async def _stream(self, answer: Stream, call: Call[Any, Any], send: Send) -> None:
        """Sends a stream; its first piece is awaited before the head, so that an early error is still a problem document."""
        async with aclosing(cast(Any, answer.chunks)) as opened:
            chunks = cast(AsyncIterator[bytes], opened)
            started = False
            try:
                async for chunk in chunks:
                    if not started:
                        started = True
                        await _send_head(send, answer.status, answer.media, answer.headers)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the one place where the unforeseen becomes an incident
                known = error if isinstance(error, DSecError) else failure(error, self._clock, call.route.name)
                if not started:
                    await _send_bytes(send, _rendered(known))
                return  # the end is not sent: the server cuts the connection and the client sees that it is not whole
            if not started:
                await _send_head(send, answer.status, answer.media, answer.headers)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        served, params, methods = self._matcher.find(scope["path"], "WS")
        if served is None:
            await _refuse(scope, send, _unmatched({**scope, "method": "WebSocket"}, methods))
            return
        call: Call[Any, Any] = Call(served.route, scope, receive, params)
        socket = Socket(receive, send)
        try:
            try:
                if self._guard is not None:
                    await self._guard(call)
                _read_request_id(call)
                if served.query is not None:
                    call.query = served.query.read(scope["query_string"])
                await cast(SocketHandler, served.handler)(call, socket)
                await socket.close()
            except (SocketGone, ClientGone):
                return
            except Exception as error:  # noqa: BLE001 - the one place where the unforeseen becomes an incident
                known = error if isinstance(error, DSecError) else failure(error, self._clock, call.route.name)
                if socket.accepted:
                    await socket.close(close_code(known), known.code)
                else:
                    await _refuse(scope, send, _rendered(known))
        except SocketGone:
            return


def _read_request_id(call: Call[Any, Any]) -> None:
    key = call.header(b"idempotency-key")
    if key is None:
        return
    if not 0 < len(key) <= REQUEST_ID_MAX or not key.isascii() or not key.isprintable():
        raise InvalidArgument(f"1 to {REQUEST_ID_MAX} printable ASCII characters", field="Idempotency-Key")
    call.request_id = key


async def _watch(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone


def _unmatched(scope: Scope, methods: tuple[str, ...]) -> Bytes:
    """405 with the methods that the path has, or 404."""
    if methods:
        error: DSecError = InvalidArgument(f"{scope['path']} does not take {scope['method']}", field="method")
        allow = ", ".join("GET" if method == "WS" else method for method in methods)
        return _rendered(error, 405, ((b"allow", allow.encode()),))
    return _rendered(NotFound(f"no such path: {scope['path']}", what="path"))


def _rendered(error: DSecError, status: int | None = None, headers: Headers = ()) -> Bytes:
    wait = retry_after(error)
    if wait is not None:
        headers = (*headers, (b"retry-after", str(wait).encode()))
    problem = problem_of(error, status)
    return Bytes(body=encode_problem(problem), status=problem.status, media=PROBLEM_JSON, headers=headers)


async def refuse(scope: Scope, send: Send, error: DSecError) -> None:
    """Answers a request, or turns a WebSocket's handshake down, with the problem document of `error`."""
    if scope["type"] == "websocket":
        await _refuse(scope, send, _rendered(error))
    else:
        await _send_bytes(send, _rendered(error))


async def _send_head(send: Send, status: int, media: str, headers: Headers) -> None:
    kind = ((b"content-type", media.encode()),) if media else ()
    await send({"type": "http.response.start", "status": status, "headers": [*kind, *headers]})


async def _send_bytes(send: Send, answer: Bytes) -> None:
    headers = [(b"content-length", b"%d" % len(answer.body)), *answer.headers]
    if answer.media:
        headers.append((b"content-type", _JSON if answer.media == "application/json" else answer.media.encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def _refuse(scope: Scope, send: Send, answer: Bytes) -> None:
    """Turns a handshake down with a problem document where the server can, and by a plain close where it cannot."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 4000 + answer.status})
        return
    headers = [(b"content-type", answer.media.encode()), (b"content-length", b"%d" % len(answer.body)), *answer.headers]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body, "more_body": False})
