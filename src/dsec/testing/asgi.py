"""Calls an ASGI application in process: no socket, no server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from dsec.ports.cluster import Asgi, Principal

__all__ = ["AsgiClient", "Response", "SocketClient", "SocketRefused"]


class Response:
    """An answer. `whole` is False when the application broke off before the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False

    def json(self) -> Any:
        """The body read as JSON."""
        return msgspec.json.decode(self.body)

    def lines(self) -> list[Any]:
        """The body read as JSON lines."""
        return [msgspec.json.decode(line) for line in self.body.splitlines()]


class SocketRefused(Exception):
    """The handshake was turned down. `response` has the problem document."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"refused with status {response.status}")
        self.response = response


class SocketClient:
    """The client's end of a WebSocket in process. `receive` gives bytes, text, or None once the application closed it."""

    def __init__(self) -> None:
        self.inbound: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1024)
        self.outbound: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1024)
        self.closed: tuple[int, str] | None = None

    async def send(self, data: bytes | str) -> None:
        """Sends one message."""
        kind = "bytes" if isinstance(data, bytes) else "text"
        await self.inbound.put({"type": "websocket.receive", kind: data})

    async def receive(self) -> bytes | str | None:
        """The next message; None at the end, when `closed` has the code and the reason."""
        message = await self.outbound.get()
        if message["type"] == "websocket.close":
            self.closed = (message.get("code", 1000), message.get("reason", ""))
            return None
        data = message.get("bytes")
        return data if data is not None else str(message["text"])


class AsgiClient:
    """Requests to `app` as `principal`; `key` is sent as the API key."""

    def __init__(self, app: Asgi, principal: Principal | None = None, key: str | None = None) -> None:
        self._app = app
        self._principal = principal
        self._key = key

    def _scope(self, kind: str, path: str, query: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        pairs = [(key.lower().encode(), value.encode("latin-1")) for key, value in headers.items()]
        if self._key is not None:
            pairs.append((b"authorization", b"Bearer " + self._key.encode()))
        flat = [(k, v) for k, many in query.items() for v in (many if isinstance(many, list) else [many])]
        scope: dict[str, Any] = {
            "type": kind,
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": urlencode(flat).encode(),
            "headers": pairs,
            "http_version": "1.1",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "extensions": {"websocket.http.response": {}},
        }
        if self._principal is not None:
            scope["dsec.principal"] = self._principal
        return scope

    async def request(
        self,
        method: str,
        path: str,
        /,
        *,
        json: Any = None,
        body: bytes | list[bytes] = b"",
        headers: Mapping[str, str] | None = None,
        gone: asyncio.Event | None = None,
        cut: bool = False,
        **query: Any,
    ) -> Response:
        """One request. A list as `body` is sent piece by piece; `cut` breaks off before its end; `gone` set: the client leaves."""
        scope = {**self._scope("http", path, query, headers or {}), "method": method}
        parts = body if isinstance(body, list) else [msgspec.json.encode(json) if json is not None else body]
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if not cut:
            messages[-1]["more_body"] = False
        response = Response()
        left = gone or asyncio.Event()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            if not cut:
                await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {key.decode(): value.decode("latin-1") for key, value in message["headers"]}
            else:
                response.body += message.get("body", b"")
                response.whole = not message.get("more_body", False)

        await self._app(scope, receive, send)
        return response

    @asynccontextmanager
    async def socket(self, path: str, /, **query: Any) -> AsyncIterator[SocketClient]:
        """Opens a WebSocket; leaving the context vanishes like a client whose machine died. Raises SocketRefused."""
        client = SocketClient()
        await client.inbound.put({"type": "websocket.connect"})
        scope = self._scope("websocket", path, query, {})

        async def send(message: Any) -> None:
            await client.outbound.put(message)

        async def serve() -> None:
            await self._app(scope, client.inbound.get, send)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(serve())
            first = await client.outbound.get()
            if first["type"] != "websocket.accept":
                response = Response()
                if first["type"] == "websocket.http.response.start":
                    response.status = first["status"]
                    response.body = (await client.outbound.get())["body"]
                raise SocketRefused(response)
            yield client
            await client.inbound.put({"type": "websocket.disconnect"})
            await asyncio.wait([task])
