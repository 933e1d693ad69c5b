"""The edge's HTTP API in process, over an honest fake of aether: requests out of the served document."""

import asyncio
import json
from typing import Any

from dsec.edge.routes import ROUTES
from dsec.model.errors import DSecError
from dsec.testing.asgi import SocketRefused
from dsec.web import document
from fuzz.archives import place
from fuzz.draw import Draw
from fuzz.schema import Document, Request
from unit.edge.rig import Rig, running, settle

DOCUMENT = Document(json.dumps(document(ROUTES, title="x", version="0", description="x")).encode())
HEADS = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 101 Up\r\n", b"HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 999 X\r\n", b"HTTP/9.9 200 OK\r\n", b"HTTP/1.1 600 X\r\n", b"garbage", b"HTTP/1.1 304 No\r\n", b"HTTP/1.1 404 \xff\r\n",
)  # fmt: skip
FIELDS = (
    b"Content-Length: 2\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n", b"Content-Length: 2, 2\r\n",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: x\r\n",
    b"Connection: close, x-a\r\n", b"X-A: \xff\xfe\r\n", b"X-A: b\r\n", b" folded\r\n", b"X-Dsec-Proxied: 0\r\n", b"Set-Cookie: a\r\n",
    b": empty\r\n", b"X\0Y: a\r\n", b"X-A: a\rb\r\n", b"Trailer: x\r\n", b"Upgrade: h2c\r\n", b"Content-Type: text/html\r\n",
)  # fmt: skip
ENDS = (
    b"hi",
    b"",
    b"2\r\nhi\r\n0\r\n\r\n",
    b"ffffffffffffffffff\r\n",
    b"2\r\nhi\r\n0\r\nX-T: 1\r\n\r\n",
    b"-2\r\nhi",
    b"2;x=y\r\nhi\r\n0\r\n\r\n",
    b"x" * 9000,
)
GIVEN = (
    ("content-length", "3"), ("content-length", "-3"), ("transfer-encoding", "chunked"), ("connection", "x-a, close"), ("x-a", "1"),
    ("x-a", "\xff"), ("x-a", "a\tb"), ("expect", "100-continue"), ("host", ""), ("upgrade", "websocket"), ("te", "trailers"),
    ("content-length", "3, 3"), ("content-length", "99999999999999999999"), ("x a", "1"), ("x-a", "a\x0bb"), ("x-a", " "),
)  # fmt: skip
PATHS = (
    "",
    "/",
    "a",
    "a/b",
    "%2e%2e/x",
    "../x",
    "a b",
    "\xff",
    "é",
    "//",
    "a?b",
    "a#b",
    "x" * 3000,
    "\x7f",
    "%",
    "a\\b",
    "\r\nX: y",
)


async def answered(rig: Rig, request: Request, method: str, **more: Any) -> Any:
    """The answer; a request that waits is left by its client, and has to end then."""
    gone = asyncio.Event()
    query: dict[str, Any] = {}
    for key, value in request.query:
        query.setdefault(key, []).append(value)
    call = asyncio.ensure_future(
        rig.client.request(method, request.path, body=request.body, headers=request.headers, gone=gone, **query)
    )
    for patience in range(6):
        await settle(40)
        if call.done():
            return await call
        if patience:
            gone.set()
            await rig.advance(10.0)
    call.cancel()
    raise AssertionError(("does not end", method, request.target, request.body[:300]))


async def attached(rig: Rig, request: Request, draw: Draw) -> None:
    """A WebSocket that says anything and vanishes."""
    query = dict(request.query)
    try:
        async with asyncio.timeout(5), rig.client.socket(request.path, **query) as socket:
            for _ in range(draw.below(5)):
                await socket.send(
                    draw.of(
                        (
                            draw.bytes(50),
                            draw.of((*map(bytes.decode, (b"", b"{", b"[1]", b"{}")), '{"resize":{"cols":-1}}')),
                        )
                    )
                )
            await settle(20)
    except* SocketRefused as group:
        for refused in group.exceptions:
            assert isinstance(refused, SocketRefused)
            DOCUMENT.judge(request, refused.response.status, "application/problem+json", refused.response.body)


async def _api(draw: Draw) -> None:
    async with running(place()) as rig:
        view = await rig.create()
        agent = rig.agent(view)
        agent.files |= {"/tmp/f": b"content"}
        agent.directories.add("/tmp")
        names = {"id": (view.id,), "pid": ("p1",), "sid": ("s1",), "port": ("80",)}
        for _ in range(8):
            if not draw:
                break
            request = DOCUMENT.request(draw.of(DOCUMENT.operations), draw, names)
            if request.operation.socket:
                await attached(rig, request, draw)
                continue
            answer = await answered(rig, request, request.operation.method.upper())
            if answer.status == 0:
                continue  # its client has left
            media = answer.headers.get("content-type", "")
            DOCUMENT.judge(request, answer.status, media, answer.body, "x-dsec-proxied" in answer.headers)
            if answer.status == 201:
                made = json.loads(answer.body)
                names["pid"] = (*names["pid"], str(made.get("process_id") or made.get("pid") or "p1"))
                names["sid"] = (*names["sid"], str(made.get("session_id") or "s1"))


def api(data: bytes) -> None:
    """Requests in a row to one sandbox: every answer is one that the document tells of, and what waits ends with its client."""
    asyncio.run(_api(Draw(data)))


async def _proxy(draw: Draw) -> None:
    async with running(place()) as rig:
        view = await rig.create()
        said = draw.of(HEADS) + b"".join(draw.of(FIELDS) for _ in range(draw.below(5))) + b"\r\n" + draw.of(ENDS)
        if draw.once_in(4):
            at = draw.below(len(said))
            said = said[:at] + draw.bytes(6) + said[at + draw.below(6) :]
        seen: list[bytes] = []

        def program(data: bytes) -> bytes:
            seen.append(data)
            return said

        rig.agent(view).listeners[80] = program
        method = draw.of(("GET", "POST", "HEAD", "OPTIONS", "PUT", "get", "CONNECT", "X-Y", "DELETE"))
        request = Request(
            DOCUMENT.operations[0], f"/v1/sandboxes/{view.id}/http/80/" + draw.of(PATHS), [("q", draw.of(STRINGS_IN_QUERY))] * draw.below(2),
            dict(draw.of(GIVEN) for _ in range(draw.below(4))), draw.of((b"", b"abc", b"x" * 100)),
        )  # fmt: skip
        answer = await answered(rig, request, method)
        shown = (method, request.path, request.headers, said, answer.status, answer.body[:200])
        assert b"has incident" not in answer.body, shown
        assert answer.status in (0, 400, 503, 501) or "x-dsec-proxied" in answer.headers, shown
        whole = b"".join(seen[-1:])
        head = whole.partition(b"\r\n\r\n")[0].lower()
        assert b"authorization" not in head and head.count(b"\r\nhost:") <= 1 and head.count(b"content-length:") <= 1, (
            shown,
            whole,
        )
        assert not (b"\r\ncontent-length:" in head and b"\r\ntransfer-encoding:" in head), (shown, whole)
        if answer.status:
            assert not ({"transfer-encoding", "connection", "upgrade"} & set(answer.headers)) or answer.status != 200, (
                shown
            )
        await settle(40)
        assert not rig.agent(view).channels, shown


STRINGS_IN_QUERY = ("", "a", "é", "a b", "x" * 300, "\r\n")


def proxy(data: bytes) -> None:
    """Any request to a port, any answer of the program there: passed on in HTTP's form or refused by name; nothing stays open."""
    try:
        asyncio.run(_proxy(Draw(data)))
    except DSecError as error:
        raise AssertionError("an error came through the dispatcher") from error
