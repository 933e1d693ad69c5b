"""The mirrors' HTTP server: plain HTTP at the gateway; which sandbox asks is told by its source address, and its policy says for what date."""

import asyncio
import re
import socket
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from urllib.parse import unquote

from dsec.gate.catalogue import Answer, Catalogue
from dsec.gate.credentials import Credentials, Scrubber
from dsec.gate.files import Files, Stored
from dsec.gate.head import Head, HeadReader, parse_head
from dsec.gate.reach import Reach
from dsec.gate.refusal import Refused
from dsec.gate.relay import accept
from dsec.gate.settings import Credential, GateSettings, MirrorService
from dsec.gate.tenants import Tenant, Tenants
from dsec.gate.together import together
from dsec.gate.upstream import Upstream
from dsec.gate.wire import Wire
from dsec.model.network import Flow, MirrorRule

__all__ = ["Mirrors"]

_STATUS = {"not_found": 404, "before": 404, "module": 403, "upstream": 502, "hash": 502}
_WORDS = {200: "OK", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 502: "Bad Gateway"}


class Mirrors:
    """Serves all mirrors that the operator named."""

    def __init__(
        self,
        tenants: Tenants,
        settings: GateSettings,
        services: Sequence[MirrorService],
        credentials: Credentials,
        cache: Path,
        reach: Reach,
    ) -> None:
        self._tenants = tenants
        self._settings = settings
        self._services = services
        self._credentials = credentials
        self._cache = cache
        self._reach = reach

    async def serve(self, listeners: dict[str, list[socket.socket]]) -> None:
        """Serves until cancelled; then closes the listeners. `listeners`: by the service's name."""
        async with Upstream(self._settings, self._services, self._reach) as upstream, together() as group:
            files = Files(self._cache, self._settings, upstream, group)
            for service in self._services:
                mirror = _Mirror(service, self._settings, upstream)
                credential = self._credentials.named(service.credential) if service.credential else None
                if service.kind != "plain":
                    mirror.catalogue = Catalogue(service, self._settings, upstream, files, group, credential)
                mirror.credential = credential
                for listener in listeners.get(service.service, ()):
                    group.create_task(accept(listener, self._tenants, self._settings.connections, mirror.handle))


class _Mirror:
    def __init__(self, service: MirrorService, settings: GateSettings, upstream: Upstream) -> None:
        self._service = service
        self._settings = settings
        self._upstream = upstream
        self.catalogue: Catalogue | None = None
        self.credential: Credential | None = None

    async def handle(self, tenant: Tenant, sock: socket.socket) -> None:
        """One connection: requests one after the other."""
        wire, port, refused = Wire(sock), sock.getsockname()[1], ""
        try:
            rule = self._rule(tenant)
            with tenant.held(lambda policy: policy.mirrors.get(self._service.service) == rule):
                await self._requests(tenant, wire)
        except Refused as reason:
            refused = reason.reason
            wire.reset()
        except TimeoutError:
            return
        if refused:
            tenant.log(
                Flow(
                    at=0,
                    verdict="refused",
                    address=sock.getsockname()[0],
                    port=port,
                    protocol="tcp",
                    name=self._service.service,
                    reason=refused,
                )
            )

    def _rule(self, tenant: Tenant) -> MirrorRule:
        rule = tenant.policy.mirrors.get(self._service.service)
        if rule is None:
            raise Refused("mirror", "the sandbox may not use this mirror")
        return rule

    async def _requests(self, tenant: Tenant, wire: Wire) -> None:
        reader = HeadReader()
        while True:
            async with asyncio.timeout(self._settings.head_seconds):
                head = reader.feed(b"")
                while head is None:
                    data = await wire.receive()
                    if not data:
                        return None
                    head = reader.feed(data)
            request = parse_head(head, named=False)
            simple = request.method in ("GET", "HEAD") and request.length == 0
            answer = await self._answer(tenant, request) if simple else _text(405, "mirrors are for reading")
            if answer is None:
                return await self._pass(wire, request)
            close = request.close or not simple
            await self._send(wire, request, answer, close)
            if close:
                return None

    async def _answer(self, tenant: Tenant, request: Head) -> Answer | None:
        """None: the request is passed on as it is."""
        if self.catalogue is None:
            return None
        path = request.target[1:].partition(b"?")[0].decode("latin-1")
        here = "http://" + (request.field(b"host") or b"").decode("latin-1")
        accept = (request.field(b"accept") or b"").decode("latin-1")
        rule = self._rule(tenant)
        try:
            answer = await self.catalogue.answer(rule, path, accept, here)
            if isinstance(answer.body, Stored):
                await answer.body.begun()
        except Refused as refused:
            if refused.reason not in _STATUS:
                raise
            if refused.reason in ("before", "module"):
                tenant.log(
                    Flow(at=0, verdict="refused", port=self._service.port, protocol="tcp", name=f"{self._service.service}:{refused.name}"[:255],
                         reason=f"mirror_{refused.reason}")
                )  # fmt: skip
            return _text(_STATUS[refused.reason], refused.detail)
        return answer

    async def _send(self, wire: Wire, request: Head, answer: Answer, close: bool) -> None:
        size = await answer.body.begun() if isinstance(answer.body, Stored) else len(answer.body)
        await wire.send(_head(answer.status, {"Content-Type": answer.content_type, "Content-Length": str(size)}, close))
        if request.method == "HEAD":
            return
        if isinstance(answer.body, bytes):
            async with asyncio.timeout(self._settings.idle_seconds):
                await wire.send(answer.body)
            return
        async with aclosing(answer.body.chunks()) as chunks:
            async for data in chunks:
                async with asyncio.timeout(self._settings.idle_seconds):
                    await wire.send(data)

    async def _pass(self, wire: Wire, request: Head) -> None:
        """A plain mirror: the answer as it comes, and the end of the connection after it."""
        if _climbs(request.target):
            return await self._send(wire, request, _text(404, "a path that leads out of the mirror"), close=True)
        url = self._service.upstream.rstrip("/") + request.target.decode("latin-1")
        try:
            async with self._upstream.get(url, {"Accept-Encoding": "identity"}, self.credential) as answer:
                kept = {
                    name: answer.headers[name]
                    for name in ("Content-Type", "Content-Length", "ETag", "Last-Modified")
                    if name in answer.headers
                }
                await wire.send(_head(answer.status, kept, close=True))
                if request.method == "HEAD":
                    return None
                scrubber = Scrubber(self.credential) if self.credential else None
                async for data in answer.content.iter_chunked(1 << 18):
                    async with asyncio.timeout(self._settings.idle_seconds):
                        await wire.send(scrubber.feed(data) if scrubber else data)
                if scrubber:
                    await wire.send(scrubber.rest())
        except Refused as refused:
            await self._send(wire, request, _text(502, refused.detail), close=True)


def _climbs(target: bytes) -> bool:
    """Whether a path has a part that a client or server on the way could take for "here" or "above", written in any way."""
    path = unquote(target.partition(b"?")[0].decode("latin-1"))
    return any(part.partition(";")[0] in (".", "..") for part in re.split(r"[/\\]", path)) or "#" in path


def _head(status: int, fields: dict[str, str], close: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_WORDS.get(status, 'Answer')}",
        *(f"{name}: {value}" for name, value in fields.items()),
    ]
    if close:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _text(status: int, text: str) -> Answer:
    return Answer("text/plain; charset=utf-8", (text + "\n").encode(), status)
