"""The relay: transparent connections on the node, let through by the name that TLS or HTTP asks for, and never decrypted.

A listener gets connections whose own address (getsockname) is the one that the sandbox wanted. The name alone says where they go: it is
resolved here, so an address that the sandbox invented is of no use to it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dsec.gate.credentials import Credentials
from dsec.gate.hello import HelloReader
from dsec.gate.names import Names
from dsec.gate.pump import Pipes, readable, splice
from dsec.gate.refusal import Refused
from dsec.gate.settings import GateSettings
from dsec.gate.tenants import Tenant, Tenants
from dsec.gate.together import together
from dsec.gate.wire import TlsWire, Wire, connect
from dsec.model.network import Flow, NameRule
from dsec.rules.netpolicy import rule_for

__all__ = ["Connection", "Relay", "accept"]

_ACCEPTS = 32
_TLS_FIRST = b"\x16"

Http = Callable[["Relay", "Connection", bytes, str], Awaitable[None]]


@dataclass
class Connection:
    """One connection of a tenant: where it wanted to go, what it asked for, what it has moved."""

    tenant: Tenant
    client: Wire
    address: str
    port: int
    name: str = ""
    out: int = field(default=0, init=False)
    into: int = field(default=0, init=False)
    last: float = field(default=0.0, init=False)
    begun: float = field(default_factory=lambda: asyncio.get_running_loop().time(), init=False)

    def sent(self, count: int) -> None:
        """Bytes of the sandbox's went on."""
        self.out += count
        self.last = asyncio.get_running_loop().time()

    def received(self, count: int) -> None:
        """Bytes for the sandbox went on."""
        self.into += count
        self.last = asyncio.get_running_loop().time()

    def flow(self, reason: str = "", name: str = "") -> Flow:
        return Flow(
            at=0, verdict="refused" if reason else "allowed", address=self.address, port=self.port, protocol="tcp",
            reason=reason, name=name or self.name, bytes_out=self.out, bytes_in=self.into,
        )  # fmt: skip


class Relay:
    """Serves relayed connections. `http` speaks HTTP/1.x on one (dsec.gate.exchange)."""

    def __init__(
        self, tenants: Tenants, names: Names, settings: GateSettings, credentials: Credentials, http: Http
    ) -> None:
        self._tenants = tenants
        self.names = names
        self.settings = settings
        self.credentials = credentials
        self.pipes = Pipes()
        self._http = http

    async def serve(self, listeners: list[socket.socket]) -> None:
        """Serves until cancelled; then closes the listeners."""
        try:
            async with together() as group:
                for listener in listeners:
                    group.create_task(accept(listener, self._tenants, self.settings.connections, self._handle))
        finally:
            self.pipes.close()

    async def _handle(self, tenant: Tenant, sock: socket.socket) -> None:
        address, port = sock.getsockname()[:2]
        connection = Connection(tenant, Wire(sock), address, port)
        loop, reason, name = asyncio.get_running_loop(), "cut", ""
        connection.last = loop.time()
        try:
            await self._relay(connection)
            reason = ""
        except Refused as refused:
            reason, name = refused.reason, refused.name
        except OSError:
            reason = "" if connection.out else "broken"
        finally:
            if reason:
                connection.client.reset()
            tenant.log(connection.flow(reason, name), loop.time() - connection.begun)

    async def _relay(self, connection: Connection) -> None:
        first = await self._first(connection)
        if first[:1] == _TLS_FIRST:
            await self._tls(connection, first)
        elif b"A" <= first[:1] <= b"Z" or first[:1] == b"\r":
            await self._http(self, connection, first, "")
        else:
            raise Refused("unknown_protocol", "neither TLS nor HTTP/1")

    async def _first(self, connection: Connection) -> bytes:
        try:
            async with asyncio.timeout(self.settings.head_seconds):
                first = await connection.client.receive()
        except TimeoutError:
            raise Refused("no_head", "the connection does not say which host it wants") from None
        if not first:
            raise Refused("no_head", "the connection ended before it said which host it wants")
        return first

    async def _tls(self, connection: Connection, first: bytes) -> None:
        reader, kept = HelloReader(), [first]
        name = reader.feed(first)
        try:
            async with asyncio.timeout(self.settings.head_seconds):
                while name is None:
                    data = await connection.client.receive()
                    if not data:
                        raise Refused("no_head", "the connection ended within its ClientHello")
                    kept.append(data)
                    name = reader.feed(data)
        except TimeoutError:
            raise Refused("no_head", "no whole ClientHello in time") from None
        connection.name = name
        rule = self.names.judge(connection.tenant, name, connection.port)
        hello = b"".join(kept)
        credential = self.credentials.find(rule.credential, name) if rule.credential else None
        context = self.credentials.server(credential) if credential else None
        if rule.credential and context is None:
            raise Refused("credential", "the operator gave no certificate to end TLS for this host", name=name)
        with connection.tenant.held(self.still(connection, rule)):
            if context is not None:
                await self._ended_here(connection, hello, context, name)
                return
            upstream = await self.reach(connection, rule, connection.port)
            try:
                await upstream.send(hello)
                connection.sent(len(hello))
                await self.join(connection, upstream)
            finally:
                upstream.sock.close()

    async def _ended_here(self, connection: Connection, hello: bytes, context: object, name: str) -> None:
        wire = TlsWire(Wire(connection.client.sock, hello), context, server_side=True, name=name)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(self.settings.head_seconds):
                await wire.handshake()
        except TimeoutError:
            raise Refused("no_head", "no TLS handshake in time") from None
        connection.client = wire
        await self._http(self, connection, await self._first(connection), name)

    def still(self, connection: Connection, rule: NameRule) -> Callable[[object], bool]:
        """Whether a new policy lets this connection go on."""

        def allowed(policy: object) -> bool:
            now = rule_for(policy, connection.name, connection.port, "tcp")  # type: ignore[arg-type]
            return now is not None and now.credential == rule.credential

        return allowed

    async def reach(self, connection: Connection, rule: NameRule, port: int) -> Wire:
        """A connection to the host that `connection.name` names now. Raises Refused: `lookup`, `rebinding`, `unreachable`."""
        first, second = (6, 4) if ":" in connection.address else (4, 6)
        found: list[str] = []
        problem: Refused | None = None
        for family in (first, second):
            try:
                found += (await self.names.find(connection.tenant, connection.name, rule, family)).addresses
            except Refused as refused:
                problem = refused
        if not found:
            raise problem or Refused("lookup", "the name has no address", name=connection.name)
        # The very address that the sandbox chose, if it is one of the name's.
        found.sort(key=lambda address: address != connection.address)
        return Wire(await connect(tuple(found), port, self.settings.connect_seconds))

    async def join(self, connection: Connection, upstream: Wire) -> None:
        """Moves bytes both ways until both ends have ended, or nothing moves for the idle time."""
        async with together() as group:
            watch = group.create_task(self.watch(connection))
            ways = [
                group.create_task(_quiet(splice(connection.client.sock, upstream.sock, self.pipes, connection.sent))),
                group.create_task(
                    _quiet(splice(upstream.sock, connection.client.sock, self.pipes, connection.received))
                ),
            ]
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):  # broken: the other way has nowhere to go
                for task in ways:
                    task.cancel()
            await asyncio.wait(ways)
            watch.cancel()

    async def watch(self, connection: Connection) -> None:
        """Raises OSError when nothing has moved for the idle time."""
        loop, idle = asyncio.get_running_loop(), self.settings.idle_seconds
        while (left := connection.last + idle - loop.time()) > 0:  # noqa: ASYNC110 - time itself is awaited
            await asyncio.sleep(left)
        raise TimeoutError("nothing moved for the idle time")


async def _quiet(way: Awaitable[None]) -> bool:
    """Whether this direction broke instead of ending."""
    try:
        await way
    except OSError:
        return True
    return False


async def accept(
    listener: socket.socket, tenants: Tenants, most: int, handle: Callable[[Tenant, socket.socket], Awaitable[None]]
) -> None:
    """Accepts for as long as it is not cancelled; each connection is `handle`d within the tenant's bound, and closed after it."""
    listener.setblocking(False)
    try:
        while True:
            await readable(listener)
            for _ in range(_ACCEPTS):
                try:
                    sock, peer = listener.accept()
                except BlockingIOError:
                    break
                except OSError:
                    await asyncio.sleep(0.1)  # out of descriptors, or the peer has gone: no event tells when to go on
                    break
                _admit(sock, peer[0], tenants, most, handle)
            await asyncio.sleep(0)
    finally:
        listener.close()


def _admit(
    sock: socket.socket,
    peer: str,
    tenants: Tenants,
    most: int,
    handle: Callable[[Tenant, socket.socket], Awaitable[None]],
) -> None:
    sock.setblocking(False)
    tenant = tenants.at(peer)

    async def work() -> None:
        assert tenant is not None
        try:
            with tenant.held(lambda _: True):
                await handle(tenant, sock)
        finally:
            sock.close()

    if tenant is not None and tenants.serve(tenant, "connection", most, work):
        return
    address, port = sock.getsockname()[:2]
    if tenant is not None:
        tenant.log(Flow(at=0, verdict="refused", address=address, port=port, protocol="tcp", reason="connections"))
    Wire(sock).reset()
    sock.close()
