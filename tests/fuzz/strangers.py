"""Clients of a real node: one that reads its document and sends what it tells of, and one that cannot speak HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import yarl

from fuzz.draw import Draw
from fuzz.schema import Document

SPEC = {"container_image": "busybox", "memory_limit_mb": 128, "disk_limit_mb": 32}
PATIENCE = 1.0
STREAMS = ("application/octet-stream", "application/x-tar", "application/x-ndjson")
WORDS = (
    b"GET", b"POST", b"PUT", b"HEAD", b"CONNECT", b"OPTIONS", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"G\0T", b"", b"get", b"X" * 70_000,
)  # fmt: skip
PATHS = (
    b"/healthz", b"/v1/me", b"/v1/sandboxes", b"*", b"/", b"//", b"/../../etc/passwd", b"/%2e%2e/x", b"/v1/%2f%2f", b"/\xff\xfe", b"/%ff%fe",
    b"/v1/images/%00", b"/v1/sandboxes/%zz", b"http://elsewhere/healthz", b"/healthz?" + b"a=b&" * 400, b"/v1/sandboxes/..;/x", b"/a b",
    b"/healthz#x", b"/v1/sandboxes?limit=" + b"9" * 4400, b"/v1/sandboxes?limit=%00&limit=1", b"\\..\\", b"",
)  # fmt: skip
INSIDE = (
    b"/http/8000/", b"/http/8000/%2e%2e/%2fetc", b"/http/8000//", b"/http/8000/..", b"/http/8000/" + b"x" * 5000, b"/http/8001/", b"/http/1/",
    b"/http/65536/", b"/http/8000/\xff", b"/http/8000/%0d%0aX:1", b"/tunnel/8001", b"/files/watch?path=/", b"/processes/x/stream", b"/exec",
    b"/files?path=/tmp/f", b"/files?path=%ff", b"/files/tree?path=/", b"/files/stat?path=/..%2f..",
)  # fmt: skip
VERSIONS = (
    b" HTTP/1.1",
    b" HTTP/1.0",
    b" HTTP/1.1",
    b" HTTP/1.1",
    b" HTTP/2.0",
    b" HTTP/0.9",
    b"",
    b" HTTP/1.1 x",
    b" http/1.1",
)
HEADERS = (
    b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: 5, 5", b"Content-Length: +5", b"Content-Length: 0x5",
    b"Content-Length: 99999999999999999999999", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding:\tchunked", b"Transfer-Encoding: xchunked", b"Transfer-Encoding: identity",
    b"Host: a\r\nHost: b", b"Host:", b" folded: x", b"X: " + b"y" * 9000, b"X\0: y", b"X: y\0z", b": x", b"Expect: 100-continue",
    b"Connection: close", b"Connection: keep-alive, Authorization", b"Upgrade: websocket", b"Upgrade: h2c", b"X: \xff\xff", b"X: a\rY: b",
    b"Content-Type: application/json", b"Idempotency-Key: \xff", b"Idempotency-Key: k", b"Content-Encoding: gzip", b"Range: bytes=0-0",
    b"Authorization: Bearer x", b"Authorization: Basic eDp5", b"Trailer: Authorization", b"TE: trailers",
)  # fmt: skip
BODIES = (
    b"hello", b"", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffffff\r\nx", b"5;a=\"b\r\n\"\r\nhello\r\n0\r\n\r\n", b"-1\r\n", b"0\r\n\r\nGET /v1/me HTTP/1.1\r\n\r\n",
    b"5\r\nhello\r\n0\r\nAuthorization: x\r\n\r\n", b"5\nhello\n0\n\n", b'{"argv":["true"]}', b"0\r\nX: " + b"y" * 66_000, b"x" * 100_000,
)  # fmt: skip
HANDSHAKE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="


@dataclass
class Requests:
    """A sandbox of a node, replaced when it is gone, and the node's document."""

    url: str
    key: str
    http: aiohttp.ClientSession
    document: Document
    sandbox: str = ""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str, key: str) -> AsyncIterator[Self]:
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=60)) as http:
            async with http.get(url + "/openapi.json") as answer:
                made = cls(url, key, http, Document(await answer.read()))
            await made.check()
            yield made

    async def check(self) -> None:
        """The node answers, ends all sandboxes but for one anew, and that one works."""
        async with asyncio.timeout(20), self.http.get(self.url + "/healthz") as answer:
            assert answer.status == 200
        async with self.http.get(self.url + "/v1/sandboxes?limit=1000&state=running&state=starting") as answer:
            found = [each["id"] for each in (await answer.json())["items"]]
        for each in found:
            async with self.http.delete(f"{self.url}/v1/sandboxes/{each}") as answer:
                assert answer.status == 200, await answer.text()
        async with self.http.post(self.url + "/v1/sandboxes", json=SPEC) as answer:
            assert answer.status == 201, await answer.text()
            self.sandbox = (await answer.json())["id"]
        for argv in (
            ["busybox", "httpd", "-p", "8000", "-h", "/"],
            ["sh", "-c", "while true; do busybox nc -l -p 8001 -e cat; done"],
        ):
            async with self.http.post(
                f"{self.url}/v1/sandboxes/{self.sandbox}/processes", json={"argv": argv}
            ) as answer:
                assert answer.status == 201, await answer.text()
        async with self.http.post(
            f"{self.url}/v1/sandboxes/{self.sandbox}/exec", json={"argv": ["echo", "ok"]}
        ) as answer:
            assert json.loads(await answer.read())["exit_code"] == 0
        self.names = {
            "id": (self.sandbox,),
            "pid": ("p1",),
            "sid": ("s1",),
            "port": ("8000", "8001"),
            "name": ("busybox",),
        }

    async def one(self, draw: Draw) -> None:
        """One request of the document; who waits too long leaves."""
        request = self.document.request(draw.of(self.document.operations), draw, self.names)
        if request.operation.socket:
            return  # raw_bytes opens those
        if "memory_limit_mb" in request.body.decode("latin-1") and draw.once_in(2):
            request.body = json.dumps({**SPEC, **as_object(request.body), "container_image": "busybox"}).encode()
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        headers = {**request.headers, "Content-Type": "application/json"}
        told: aiohttp.ClientResponse | None = None
        from_url = yarl.URL(self.url + request.target, encoded=True)
        try:
            async with self.http.request(
                request.operation.method, from_url, data=request.body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:  # fmt: skip
                told = answer
                body = await answer.read()
        except TimeoutError:
            return
        except aiohttp.ClientPayloadError:
            # An error behind a stream's first piece cuts the connection, as the routes say: no other answer may be cut.
            assert told is not None and ("X-Dsec-Proxied" in told.headers or told.content_type in STREAMS), request
            return
        proxied = "X-Dsec-Proxied" in answer.headers
        self.document.judge(
            request, answer.status, answer.content_type, body, proxied or request.operation.method == "head"
        )


def as_object(raw: bytes) -> dict[str, object]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def head(requests: Requests, draw: Draw) -> bytes:
    """A request's head, nearly right."""
    path = b"/v1/sandboxes/" + requests.sandbox.encode() + draw.of(INSIDE) if draw.once_in(2) else draw.of(PATHS)
    lines = [draw.of((b"GET", b"POST", *WORDS)) + b" " + path + draw.of(VERSIONS)]
    if draw.once_in(2):
        lines.append(b"Authorization: Bearer " + requests.key.encode())
    if draw.once_in(5):
        lines.append(HANDSHAKE)
    lines += [draw.of(HEADERS) for _ in range(draw.below(5))]
    return draw.of((b"\r\n", b"\r\n", b"\r\n", b"\n")).join(lines) + draw.of(
        (b"\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\r\n")
    )


async def raw_bytes(requests: Requests, draw: Draw) -> None:
    """A few requests down one connection, cut anywhere; every answer is HTTP, none is an incident, and the key comes back in none."""
    data = b""
    for _ in range(1 + draw.below(3)):
        data += head(requests, draw) + draw.of(BODIES)
    if draw.once_in(4):
        at = draw.below(len(data))
        data = data[:at] + draw.bytes(8) + data[at + draw.below(9) :]
    if draw.once_in(4):
        data += draw.rest()
    cut = 1 + draw.below(3000)
    where = urlsplit(requests.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    said = b""
    try:
        for at in range(0, len(data), max(cut, len(data) // 8)):
            writer.write(data[at : at + max(cut, len(data) // 8)])
            await writer.drain()
        if draw.once_in(3):
            writer.write_eof()
        async with asyncio.timeout(0.15):
            while len(said) < 1 << 20 and (part := await reader.read(1 << 16)):
                said += part
    except OSError:  # a timeout too: it may close whenever it likes
        pass
    finally:
        writer.transport.abort()
    shown = (data[:3000], said[:600])
    assert not said or said.startswith(b"HTTP/1.1 "), shown
    assert b"has incident" not in said and b"Traceback" not in said and b"Internal Server Error" not in said, shown
    if b"/tunnel/" not in data:
        assert requests.key.encode() not in said, shown
