"""HTTP/1.x through the relay: every request of a connection is read, checked and written anew; answers pass as they are."""

import asyncio

from dsec.gate.body import BodyReader
from dsec.gate.credentials import Scrubber
from dsec.gate.head import Head, HeadReader, parse_head, parse_status
from dsec.gate.pump import splice
from dsec.gate.refusal import Refused
from dsec.gate.relay import Connection, Relay
from dsec.gate.settings import Credential
from dsec.gate.together import together
from dsec.gate.wire import TlsWire, Wire
from dsec.model.network import NameRule

__all__ = ["exchange"]

_LINGER_SECONDS = 2.0
_SWITCHED = 101


async def exchange(relay: Relay, connection: Connection, first: bytes, sni: str) -> None:
    """Serves requests until either side ends. `sni`: the name that TLS asked for, where it ends here. Raises Refused and OSError."""
    reader = HeadReader()
    request = await _request(relay, connection, reader, first)
    if request is None:
        raise Refused("no_head", "the connection ended within a request")
    _check_host(request, sni or request.host)
    connection.name = request.host
    rule = relay.names.judge(connection.tenant, request.host, connection.port)
    credential = relay.credentials.find(rule.credential, request.host) if rule.credential else None
    if rule.credential and credential is None:
        raise Refused("credential", "the rule's credential is not for this host", name=request.host)
    with connection.tenant.held(relay.still(connection, rule)):
        upstream = await _upstream(relay, connection, rule, credential, bool(sni))
        try:
            await _Session(relay, connection, upstream, credential).run(reader, request)
        finally:
            upstream.sock.close()


def _check_host(request: Head, expected: str) -> None:
    if request.host != expected:
        raise Refused("host_changed", "a request for another host on the same connection", name=request.host)


async def _upstream(
    relay: Relay, connection: Connection, rule: NameRule, credential: Credential | None, ended_here: bool
) -> Wire:
    if credential is None or (credential.plain and not ended_here):
        return await relay.reach(connection, rule, connection.port)
    wire = await relay.reach(connection, rule, connection.port if ended_here else credential.port)
    secure = TlsWire(wire, relay.credentials.client, server_side=False, name=connection.name)
    try:
        async with asyncio.timeout(relay.settings.connect_seconds):
            await secure.handshake()
    except BaseException:
        wire.sock.close()
        raise
    return secure


async def _request(relay: Relay, connection: Connection, reader: HeadReader, first: bytes = b"") -> Head | None:
    """The next request; None when the client ends between two. The idle time bounds the wait for one, the head time the rest of it."""
    head = reader.feed(first)
    if head is None and not reader.pending:
        data = await connection.client.receive()
        if not data:
            return None
        head = reader.feed(data)
    try:
        async with asyncio.timeout(relay.settings.head_seconds):
            while head is None:
                data = await connection.client.receive()
                if not data:
                    raise Refused("no_head", "the connection ended within a request", name=connection.name)
                head = reader.feed(data)
    except TimeoutError:
        raise Refused("no_head", "no whole request in time", name=connection.name) from None
    return parse_head(head)


class _Session:
    """One connection with its upstream."""

    def __init__(self, relay: Relay, connection: Connection, upstream: Wire, credential: Credential | None) -> None:
        self._relay = relay
        self._connection = connection
        self._upstream = upstream
        self._added: tuple[tuple[bytes, bytes], ...] = ()
        self._scrubber: Scrubber | None = None
        if credential is not None:
            # An answer must not be packed, so that a secret in it is seen.
            self._added = ((credential.header.encode(), credential.value.encode()), (b"Accept-Encoding", b"identity"))
            self._scrubber = Scrubber(credential)

    async def run(self, reader: HeadReader, request: Head) -> None:
        """Everything after the first request's head was read."""
        connection = self._connection
        async with together() as group:
            watch = group.create_task(self._relay.watch(connection))
            sent: Head | None = request
            if request.upgrade:
                await self._forward(reader, request)
                sent = None
            if request.upgrade and await self._switched():
                requests = group.create_task(self._pass_on(reader.rest()))
            else:
                requests = group.create_task(self._requests(reader, sent))
            answers = group.create_task(self._answers())
            await asyncio.wait({requests, answers}, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():  # the server has ended: what the client still sends has nowhere to go
                await asyncio.wait({requests}, timeout=_LINGER_SECONDS)
                requests.cancel()
            else:
                await asyncio.wait({answers})
            watch.cancel()

    async def _requests(self, reader: HeadReader, request: Head | None) -> None:
        """Sends requests on until one is the last. `request`: the first; None where that has been sent."""
        while True:
            if request is not None:
                await self._forward(reader, request)
                if request.close:
                    return
            request = await _request(self._relay, self._connection, reader)
            if request is None:
                if not isinstance(self._upstream, TlsWire):
                    await self._upstream.end()
                return
            _check_host(request, self._connection.name)
            if request.upgrade:
                raise Refused("bad_http", "an upgrade on a connection in use", name=request.host)

    async def _forward(self, reader: HeadReader, request: Head) -> None:
        head = request.encode(self._added)
        await self._upstream.send(head)
        self._connection.sent(len(head))
        body, data = BodyReader(request.length), reader.rest()
        while not body.done:
            data = data or await self._connection.client.receive()
            if not data:
                raise ConnectionResetError("the connection ended within a body")
            count = body.feed(data)
            await self._upstream.send(data[:count])
            self._connection.sent(count)
            data = data[count:]
        reader.put_back(data)

    async def _switched(self) -> bool:
        """Whether the server takes the upgrade; its heads go to the client."""
        reader = HeadReader()
        while True:
            try:
                async with asyncio.timeout(self._relay.settings.idle_seconds):
                    head = reader.feed(b"")
                    while head is None:
                        data = await self._upstream.receive()
                        if not data:
                            raise ConnectionResetError("the server ended within its answer")
                        head = reader.feed(data)
            except TimeoutError:
                raise ConnectionResetError("no answer in time") from None
            status = parse_status(head)
            final = status >= 200 or status == _SWITCHED
            await self._to_client(head + b"\r\n\r\n" + (reader.rest() if final else b""))
            if final:
                return status == _SWITCHED

    async def _pass_on(self, data: bytes) -> None:
        while data or (data := await self._connection.client.receive()):
            await self._upstream.send(data)
            self._connection.sent(len(data))
            data = b""
        await self._upstream.end()

    async def _answers(self) -> None:
        client, upstream = self._connection.client, self._upstream
        if self._scrubber is None and type(client) is Wire and type(upstream) is Wire:
            await splice(upstream.sock, client.sock, self._relay.pipes, self._connection.received)
            return
        while data := await upstream.receive():
            await self._to_client(data)
        if self._scrubber is not None:
            await client.send(self._scrubber.rest())
        await client.end()

    async def _to_client(self, data: bytes) -> None:
        if self._scrubber is not None:
            data = self._scrubber.feed(data)
        await self._connection.client.send(data)
        self._connection.received(len(data))
