"""The resolver: DNS over UDP and TCP on sockets that are given to it. Source: RFC 1035, RFC 7766, RFC 8482, RFC 9460.

Names that are not allowed do not exist (NXDOMAIN): every C library ends at once on that, while some wait for a time-out on REFUSED.
Nothing but addresses of allowed names is ever asked for upstream.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from dsec.gate.hostname import hostname
from dsec.gate.limits import Bucket
from dsec.gate.names import LONGEST_TTL, Names
from dsec.gate.refusal import Refused
from dsec.gate.settings import GATEWAY_NAMES, RESOLVER_PORT, GateSettings
from dsec.gate.tenants import Tenant, Tenants
from dsec.model.network import Flow

__all__ = ["Resolver"]

_LONGEST_QUERY = 1024
_LONGEST_UDP = 1232
_PLAIN_UDP = 512
_TCP_CONNECTIONS = 8
_TCP_IDLE_SECONDS = 10.0
_LOCAL_TTL = 5
_LOCAL_SUFFIX = ".dsec.internal"
_FAMILIES = {dns.rdatatype.A: 4, dns.rdatatype.AAAA: 6}
# Answered as "nothing of that kind": they would lead clients past the name check (ECH keys, other ports, other names).
_EMPTY = frozenset({dns.rdatatype.HTTPS, dns.rdatatype.SVCB})
_BURST_SECONDS = 4


class Resolver:
    """Answers queries of tenants. `gateway`: the node's end of every link, v4 and v6."""

    def __init__(self, tenants: Tenants, names: Names, settings: GateSettings, gateway: tuple[str, str]) -> None:
        self._tenants = tenants
        self._names = names
        self._settings = settings
        self._gateway = gateway

    async def serve(self, udp: list[socket.socket], tcp: list[socket.socket]) -> None:
        """Serves until cancelled; then closes the sockets."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.DatagramTransport] = []
        servers: list[asyncio.Server] = []
        try:
            for sock in udp:
                transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=sock)
                ends.append(transport)
            for sock in tcp:
                servers.append(await asyncio.start_server(self._accept, sock=sock, limit=_LONGEST_QUERY * 2))
            await loop.create_future()
        finally:
            for transport in ends:
                transport.close()
            for server in servers:
                server.close()

    def receive(self, data: bytes, source: str, reply: Callable[[bytes], None]) -> None:
        """One datagram; answers by `reply`, at once or later. Unknown senders get nothing."""
        tenant = self._tenants.at(source)
        if tenant is None or len(data) > _LONGEST_QUERY:
            return

        async def work() -> None:
            reply(await self.answer(tenant, data, "udp"))

        if not self._free(tenant) or not self._tenants.serve(tenant, "query", self._settings.queries_at_once, work):
            self._over(tenant, "udp")
            reply(_refused_at_once(data))

    def _over(self, tenant: Tenant, over: str) -> None:
        tenant.log(
            Flow(
                at=0,
                verdict="refused",
                address=self._gateway[0],
                port=RESOLVER_PORT,
                protocol=over,
                reason="dns_queries",
            )
        )

    def _free(self, tenant: Tenant) -> bool:
        if tenant.queries is None:
            tenant.queries = Bucket(self._settings.queries_s, self._settings.queries_s * _BURST_SECONDS)
        return tenant.queries.take(asyncio.get_running_loop().time())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tenant = self._tenants.at(writer.get_extra_info("peername")[0])
        if tenant is None or not self._tenants.serve(
            tenant, "dns connection", _TCP_CONNECTIONS, lambda: self._stream(tenant, reader, writer)
        ):
            writer.transport.abort()

    async def _stream(self, tenant: Tenant, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with tenant.held(lambda _: True):
                while True:
                    async with asyncio.timeout(_TCP_IDLE_SECONDS):
                        length = int.from_bytes(await reader.readexactly(2), "big")
                        if not 0 < length <= _LONGEST_QUERY:
                            return
                        data = await reader.readexactly(length)
                    if self._free(tenant):
                        answer = await self.answer(tenant, data, "tcp")
                    else:
                        self._over(tenant, "tcp")
                        answer = _refused_at_once(data)
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    async with asyncio.timeout(_TCP_IDLE_SECONDS):
                        await writer.drain()
        except (asyncio.IncompleteReadError, TimeoutError):
            return
        finally:
            writer.transport.abort()

    async def answer(self, tenant: Tenant, data: bytes, over: str) -> bytes:
        """The message that answers `data`; empty when it is no query."""
        try:
            query = dns.message.from_wire(data, ignore_trailing=False)
        except dns.exception.DNSException:
            return _refused_at_once(data, dns.rcode.FORMERR)
        if query.flags & dns.flags.QR or query.opcode() != dns.opcode.QUERY or len(query.question) != 1:
            return _refused_at_once(data)
        message = dns.message.make_response(query, recursion_available=True)
        name = query.question[0].name.to_text()
        try:
            await self._fill(tenant, query, message)
        except Refused as refused:
            message.set_rcode(_rcode(refused.reason))
            tenant.log(
                Flow(
                    at=0, verdict="refused", address=self._gateway[0], port=RESOLVER_PORT, protocol=over,
                    name=(refused.name or name)[:255], reason=f"dns_{refused.reason}",
                )
            )  # fmt: skip
        most = 65535 if over == "tcp" else min(max(query.payload, _PLAIN_UDP), _LONGEST_UDP)
        try:
            return message.to_wire(max_size=most)
        except dns.exception.TooBig:
            message.answer.clear()
            message.flags |= dns.flags.TC
            return message.to_wire(max_size=most)

    async def _fill(self, tenant: Tenant, query: dns.message.Message, message: dns.message.Message) -> None:
        question = query.question[0]
        if question.rdclass != dns.rdataclass.IN:
            raise Refused("kind")
        name = hostname(b".".join(question.name.labels))
        if (addresses := self._local(tenant, name)) is not None:
            if (family := _FAMILIES.get(question.rdtype)) is not None:
                _add(message, question, [a for a in addresses if (":" in a) == (family == 6)], _LOCAL_TTL)
            return
        rule = self._names.judge(tenant, name)
        if question.rdtype in _EMPTY:
            return
        if question.rdtype not in _FAMILIES:
            raise Refused(
                "kind", f"only addresses are answered, not {dns.rdatatype.to_text(question.rdtype)}", name=name
            )
        found = await self._names.find(tenant, name, rule, _FAMILIES[question.rdtype])
        if not found.exists:
            message.set_rcode(dns.rcode.NXDOMAIN)
        _add(message, question, list(found.addresses), min(found.ttl, LONGEST_TTL))

    def _local(self, tenant: Tenant, name: str) -> list[str] | None:
        """Addresses of the node's own names and of the tenant's group; None for other names."""
        if name in GATEWAY_NAMES:
            return list(self._gateway)
        peers = self._tenants.peer(tenant, name.removesuffix(_LOCAL_SUFFIX))
        if not peers:
            return None
        return [address for peer in peers for address in (peer.address.v4, peer.address.v6)]


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._full = False

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        def reply(answer: bytes) -> None:
            # What a sandbox does not fetch is dropped, never kept: replies are bounded by the socket's buffer.
            if answer and not self._full and not self._transport.is_closing():
                self._transport.sendto(answer, addr)

        self._resolver.receive(data, addr[0], reply)


def _add(message: dns.message.Message, question: dns.rrset.RRset, addresses: list[str], ttl: int) -> None:
    if addresses:
        message.answer.append(dns.rrset.from_text_list(question.name, ttl, "IN", question.rdtype, addresses))


def _rcode(reason: str) -> dns.rcode.Rcode:
    if reason in ("name", "bad_name", "address"):
        return dns.rcode.NXDOMAIN
    return dns.rcode.SERVFAIL if reason == "lookup" else dns.rcode.REFUSED


def _refused_at_once(data: bytes, code: int = dns.rcode.REFUSED) -> bytes:
    """A bare header, without reading the rest; nothing for what is itself an answer."""
    if len(data) < 12 or data[2] & 0x80:
        return b""
    return data[:2] + (0x8000 | code).to_bytes(2, "big") + bytes(8)
