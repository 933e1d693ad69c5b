"""Links by which anybody who has one sees a port of a sandbox over HTTP, for a while. Visitors and pages are both hostile.

A link's id is 80 random bits with the platform's seal: not to be guessed, and thrown away unread when forged. It may be revoked, and does not
outlive its sandbox. Pages on the API's own origin are shut into an origin of their own by a policy that browsers hold.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from dsec.edge.door import Door
from dsec.edge.journal import Journal
from dsec.edge.operations import Operations, fingerprint_of
from dsec.edge.ports import PortProxy
from dsec.model.errors import Busy, InvalidArgument, NotFound
from dsec.model.ids import RANDOM_BYTES, SandboxAddress, decode_sandbox_id, encode_sandbox_id
from dsec.model.views import PreviewSpec, PreviewView
from dsec.ports.clock import Clock
from dsec.ports.cluster import Principal
from dsec.web import Call, Socket, Stream

__all__ = ["PREVIEW_HOST", "PreviewKey", "Previews"]

PREVIEW_HOST = "dsec.preview_host"
"""In the scope of a request that came by a host name of the link's own: its origin is the sandbox's alone."""

_SECONDS_MAX = 7 * 86400.0
_LINKS_MAX = 64
_RATE, _BURST, _AT_ONCE = 50.0, 200.0, 64
_NOT_OUTWARD = frozenset(
    {b"clear-site-data", b"strict-transport-security", b"service-worker-allowed", b"public-key-pins", b"alt-svc", b"report-to", b"nel"}
)  # fmt: skip
"""What would speak for the whole origin or host."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-robots-tag", b"noindex"),
)
_SHUT_IN = (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads")


class _Visits:
    """How often a link may be asked: a bucket that fills by _RATE a second."""

    def __init__(self, now: float) -> None:
        self.left, self.at, self.now = _BURST, now, 0

    def take(self, now: float) -> None:
        self.left = min(_BURST, self.left + (now - self.at) * _RATE)
        self.at = now
        if self.left < 1 or self.now >= _AT_ONCE:
            raise Busy("this link is asked too often", retry_after=1.0, limit="preview")
        self.left -= 1


class PreviewKey:
    """Makes and opens ids of links: those of sandboxes under another letter. `edge`, `epoch`: of this start of the edge."""

    def __init__(self, edge: int, epoch: int, key: bytes, clock: Clock) -> None:
        self._edge, self._epoch, self._key, self._clock = edge, epoch & 0xFFFFFF, key, clock

    def new(self) -> str:
        """A fresh id."""
        address = SandboxAddress(self._edge, self._epoch, self._clock.random(RANDOM_BYTES))
        return "p" + encode_sandbox_id(address, self._key)[1:]

    def check(self, preview: str) -> None:
        """Raises NotFound for an id that this platform did not make."""
        try:
            decode_sandbox_id("s" + preview.removeprefix("p"), self._key)
        except NotFound as error:
            raise NotFound("no such link", what="preview") from error


class Previews:
    """Handlers of /previews and of the links themselves, called like their routes."""

    def __init__(
        self, door: Door, operations: Operations, journal: Journal, clock: Clock, proxy: PortProxy, key: PreviewKey
    ) -> None:
        self._door, self._operations, self._journal = door, operations, journal
        self._clock, self._proxy, self._key = clock, proxy, key
        self._visits: dict[str, _Visits] = {}

    async def create_preview(self, call: Call[None, PreviewSpec]) -> PreviewView:
        asked = call.body
        if not 1 <= asked.port <= 65535:
            raise InvalidArgument("1 to 65535", field="port")
        if not 1 <= asked.seconds <= _SECONDS_MAX:
            raise InvalidArgument("1 s to 7 days", field="seconds")
        with self._door.enter(call) as resident:

            async def run() -> PreviewView:
                return self._made(resident.id, asked)

            mark = fingerprint_of(asked)
            return await self._operations.once(resident, call.request_id, "preview", mark, run, PreviewView)

    def _made(self, sandbox_id: str, asked: PreviewSpec) -> PreviewView:
        now = self._clock.now()
        if len(self._journal.previews(sandbox_id, now)) >= _LINKS_MAX:
            raise Busy(f"the sandbox has its {_LINKS_MAX} links", retry_after=60.0, limit="previews")
        made = PreviewView(id=self._key.new(), sandbox_id=sandbox_id, port=asked.port, expires=now + asked.seconds)
        self._journal.keep_preview(made, now)
        return made

    async def list_previews(self, call: Call[None, None]) -> list[PreviewView]:
        with self._door.enter(call) as resident:
            return self._journal.previews(resident.id, self._clock.now())

    async def revoke_preview(self, call: Call[None, None]) -> None:
        with self._door.enter(call) as resident:
            self._journal.revoke_preview(resident.id, call.params["preview"])
        self._visits.pop(call.params["preview"], None)

    def _opened(self, call: Call[Any, Any]) -> None:
        """Turns a visit by link into a call on its sandbox's port. Raises NotFound for a link that is none, or is none any more."""
        link = call.params["preview"]
        self._key.check(link)
        found = self._journal.preview(link, self._clock.now())
        if found is None or found.sandbox_id not in self._door.lifecycle.residents:
            self._visits.pop(link, None)
            raise NotFound("no such link, or it has ended", what="preview")
        project = self._door.lifecycle.residents[found.sandbox_id].row.project
        call.principal = Principal(name="preview", project=project, permissions=frozenset())
        call.params |= {"id": found.sandbox_id, "port": str(found.port)}
        dropped = {b"service-worker"} if call.scope.get(PREVIEW_HOST) else {b"cookie", b"service-worker"}
        if not call.scope.get(PREVIEW_HOST) and call.header(b"service-worker") is not None:
            raise NotFound("no service workers on this origin", what="preview")
        call.scope["headers"] = [(key, value) for key, value in call.scope["headers"] if key not in dropped]

    @contextmanager
    def _visit(self, call: Call[Any, Any]) -> Iterator[None]:
        self._opened(call)
        now = self._clock.monotonic()
        visits = self._visits.setdefault(call.params["preview"], _Visits(now))
        visits.take(now)
        visits.now += 1
        try:
            yield
        finally:
            visits.now -= 1

    async def preview_request(self, call: Call[None, None]) -> Stream:
        chunks = self._chunks(call)
        first: Stream = await anext(chunks)
        return replace(first, chunks=chunks, headers=_outward(first.headers, bool(call.scope.get(PREVIEW_HOST))))

    async def _chunks(self, call: Call[None, None]) -> AsyncIterator[Any]:
        """First the proxy's answer, then its body: the visit lasts as long as that."""
        with self._visit(call):
            answer = await self._proxy.http_request(call)
            try:
                yield answer
                async for chunk in answer.chunks:
                    yield chunk
            finally:
                await answer.chunks.aclose()  # type: ignore[attr-defined]

    async def preview_socket(self, call: Call[None, None], socket: Socket) -> None:
        with self._visit(call):
            await self._proxy.http_socket(call, socket)


def _outward(headers: tuple[tuple[bytes, bytes], ...], own_host: bool) -> tuple[tuple[bytes, bytes], ...]:
    kept = [(key, value) for key, value in headers if key not in _NOT_OUTWARD and _keeps_cookie(key, value, own_host)]
    return (*kept, *_HEADERS) if own_host else (*kept, *_HEADERS, _SHUT_IN)


def _keeps_cookie(key: bytes, value: bytes, own_host: bool) -> bool:
    """A cookie may be set for a host of the link's own, and for that alone."""
    if key != b"set-cookie":
        return True
    names = [part.partition(b"=")[0].strip().lower() for part in value.split(b";")[1:]]
    return own_host and b"domain" not in names
