"""Requests over aiohttp: one pool of connections a client, deadlines, safe repeats, errors of the taxonomy.

Cancelling any call here closes its connection. A server cannot tell that from a fault, after which the call is repeated;
so the cancelling of a command or a creation is said to it too, and it undoes it at once instead of after its grace time.
"""

import asyncio
import logging
import random
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from dsec.model.errors import DeadlineExceeded, DSecError, InvalidArgument, Unavailable
from dsec.sdk.environment import Endpoint
from dsec.sdk.wire import check_request_id, error_from_response, error_from_status

__all__ = ["CONNECT_TIMEOUT", "DEADLINE", "MARGIN", "PROXIED", "REPEATS", "Transport", "new_request_id", "path_of"]

_log = logging.getLogger("dsec.sdk")

T = TypeVar("T")
Body = bytes | Callable[[], AsyncIterator[bytes]] | None

DEADLINE = 60.0
"""Seconds for a call that runs no command."""
MARGIN = 20.0
"""Seconds between a command's own timeout and the transport's deadline: ending a tree and carrying its output."""
CONNECT_TIMEOUT = 10.0
PROXIED = "X-Dsec-Proxied"
GIVE_UP = 0.5
"""Seconds that a cancelled command may take to tell the server."""
SILENCE = 60.0
"""Seconds without a byte after which a streamed body is given up."""
REPEATS = (0.05, 0.2, 0.8, 2.0)
"""Seconds before each repeat after a connection fault, times 0.5 to 1.5; then the fault is raised."""
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
_NOT_REPEATED = (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError, aiohttp.InvalidURL)


class _Broken(Exception):
    """A connection that failed before its answer was whole; the cause says how."""


def new_request_id() -> str:
    """A fresh id: 128 random bits."""
    return secrets.token_hex(16)


def path_of(*parts: str, query: Mapping[str, str | int | float | bool | None] | None = None) -> str:
    """A path below the server's URL, every part and value quoted; None values are left out, booleans are true and false."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    if not query:
        return path
    given = {name: _text(value) for name, value in query.items() if value is not None}
    return path + ("?" + urlencode(given, quote_via=quote, safe="/") if given else "")


def _text(value: str | int | float | bool) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket on which a peer that vanished is noticed within about 35 s, also while a command says nothing for hours."""
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class Transport:
    """Connections to one server. Opened and closed on the event loop that uses it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the pool; no connection yet. Raises InvalidArgument where the CA file cannot be read."""
        if self._session is not None:
            return
        context: ssl.SSLContext | bool = True
        if self._endpoint.ca_file is not None:
            try:
                context = ssl.create_default_context(cafile=self._endpoint.ca_file)
            except OSError as error:
                raise InvalidArgument(f"CA file {self._endpoint.ca_file}: {error}", field="ca_file") from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=30, ssl=context, socket_factory=_socket, happy_eyeballs_delay=None
            ),
            headers={
                "Authorization": f"Bearer {self._endpoint.api_key}",
                "Accept-Encoding": "identity",
                "User-Agent": "libdsec",
            },
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT),
            auto_decompress=False,
            read_bufsize=1 << 18,
            max_field_size=1 << 16,
        )

    async def close(self) -> None:
        """Close every connection; streams and calls in flight end with Unavailable."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open pool. Raises InvalidArgument before open() and after close()."""
        if self._session is None:
            raise InvalidArgument("the client is not open: await client.open(), or use `async with`", field="client")
        return self._session

    def url(self, path: str) -> URL:
        """The address of a path, as path_of makes it."""
        return URL(self._endpoint.url + path, encoded=True)

    async def call(
        self,
        method: str,
        url: str | URL,
        decoder: msgspec.json.Decoder[T],
        *,
        body: Body = None,
        request_id: str | None = None,
        deadline: float | None = DEADLINE,
        cancel: str | None = None,
    ) -> T:
        """One request and its whole answer. A connection fault is repeated with the same request_id (REPEATS), within
        `deadline` seconds in all; None means no limit but keep-alive. A `body` that is a function is called anew each time.
        `cancel`: path by which the server is told, at most GIVE_UP seconds, when this call is cancelled. Raises the server's error, DeadlineExceeded, or Unavailable.
        """
        headers = _headers(method, body, request_id)
        try:
            return decoder.decode(await self._fetched(method, url, body, headers, deadline))
        except asyncio.CancelledError:
            if cancel is not None:
                await self._give_up(cancel, headers["Idempotency-Key"])
            raise

    async def fetch(
        self,
        method: str,
        url: str | URL,
        *,
        body: Body = None,
        request_id: str | None = None,
        deadline: float | None = DEADLINE,
    ) -> bytes:
        """As `call`, answering the bytes."""
        return await self._fetched(method, url, body, _headers(method, body, request_id), deadline)

    async def _fetched(
        self, method: str, url: str | URL, body: Body, headers: dict[str, str], deadline: float | None
    ) -> bytes:
        target = self.url(url) if isinstance(url, str) else url
        if deadline is None:
            return await self._repeated(method, target, body, headers, None)
        ends = asyncio.get_running_loop().time() + deadline
        return await self._repeated(method, target, body, headers, ends)

    async def _give_up(self, path: str, request_id: str) -> None:
        joint = "&" if "?" in path else "?"
        target = self.url(f"{path}{joint}request_id={quote(request_id, safe='')}")
        try:
            await self._once("POST", target, None, {}, asyncio.get_running_loop().time() + GIVE_UP)
        except (DSecError, _Broken) as error:
            # the server gives it up by itself a little later
            _log.debug("cancelling %s: %s", request_id, error)

    async def _repeated(self, method: str, url: URL, body: Body, headers: dict[str, str], ends: float | None) -> bytes:
        for delay in REPEATS:
            try:
                return await self._once(method, url, body, headers, ends)
            except _Broken as broken:
                await self._pause(delay, ends, broken)
        try:
            return await self._once(method, url, body, headers, ends)
        except _Broken as broken:
            raise Unavailable(f"{method} {url.path}: {broken}") from broken

    async def _pause(self, delay: float, ends: float | None, broken: _Broken) -> None:
        wait = delay * (0.5 + random.random())
        if ends is not None and asyncio.get_running_loop().time() + wait >= ends:
            raise Unavailable(str(broken)) from broken
        await asyncio.sleep(wait)

    async def _once(self, method: str, url: URL, body: Body, headers: dict[str, str], ends: float | None) -> bytes:
        total = None if ends is None else max(ends - asyncio.get_running_loop().time(), 0.001)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_TIMEOUT)
        data = body() if callable(body) else body
        try:
            async with self.session.request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _fault(error, f"{method} {url.path}") from error
        if status < 300:
            return content
        problem = error_from_response(status, content)
        if isinstance(problem, Unavailable):
            raise _Broken(str(problem)) from problem
        raise problem

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
        silence: float | None = SILENCE,
        proxied: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer to be read piece by piece. Not repeated. `silence`: seconds without a byte before it is given up.
        `proxied`: an answer that a server inside the sandbox gave (PROXIED says so) is an answer, whatever its status."""
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT, sock_read=silence)
        sent = _headers(method, body, request_id) | dict(headers or {})
        data = body() if callable(body) else body
        try:
            async with self.session.request(
                method, self.url(path), data=data, headers=sent, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300 and not (proxied and PROXIED in response.headers):
                    raise error_from_response(response.status, await response.content.read(1 << 20))
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _raised(error, f"{method} {path}") from error

    async def websocket(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket, the server's refusal being raised as its error."""
        try:
            return await self.session.ws_connect(self.url(path), max_msg_size=8 << 20, autoping=True)
        except aiohttp.WSServerHandshakeError as error:
            raise error_from_status(error.status, f"GET {path}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _raised(error, f"GET {path}") from error


def _headers(method: str, body: Body, request_id: str | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    if method != "GET":
        headers["Idempotency-Key"] = check_request_id(request_id) if request_id else new_request_id()
    if body is not None:
        headers["Content-Type"] = "application/json" if isinstance(body, bytes) else "application/octet-stream"
    return headers


def _fault(error: Exception, what: str) -> DSecError | _Broken:
    """What a failed exchange means: a definite error, or a fault that may be repeated."""
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
        return DeadlineExceeded(f"{what}: no answer before the transport's deadline")
    if isinstance(error, _NOT_REPEATED):
        return Unavailable(f"{what}: {error}")
    return _Broken(str(error) or type(error).__name__)


def _raised(error: Exception, what: str) -> DSecError:
    fault = _fault(error, what)
    return fault if isinstance(fault, DSecError) else Unavailable(f"{what}: {fault}")
