"""Servers of a fake internet: DNS, web and echo, each in a namespace, with a record of what was asked of it."""

import asyncio
import datetime
import ipaddress
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dsec.testing.netns import Netns

__all__ = ["Dns", "Echo", "Query", "Record", "Request", "TestCa", "Web"]

A, CNAME, TXT, AAAA = 1, 5, 16, 28
_KINDS = {"A": A, "CNAME": CNAME, "TXT": TXT, "AAAA": AAAA}
_KEPT = 10_000
_HEAD = 65_536


class Record(NamedTuple):
    """One answer. `kind`: A, AAAA, CNAME or TXT."""

    kind: str
    value: str
    ttl: int = 60


class Query(NamedTuple):
    """What a DNS server was asked. `name` in lower case without the last dot; `over`: udp or tcp."""

    name: str
    kind: int
    client: str
    over: str


class Request(NamedTuple):
    """What a web server was asked. `sni` is empty without TLS or without a name in it."""

    client: str
    sni: str
    host: str
    method: str
    path: str


class _Log:
    """A bounded list that threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[object] = []

    def add(self, item: object) -> None:
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(item)

    def take(self) -> list[object]:
        with self._lock:
            return list(self._kept)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def _packed_name(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.rstrip(".").split(".") if part) + b"\0"


def _packed(record: Record) -> bytes:
    if record.kind in ("A", "AAAA"):
        return ipaddress.ip_address(record.value).packed
    return _packed_name(record.value) if record.kind == "CNAME" else bytes([len(record.value)]) + record.value.encode()


class Dns:
    """An authoritative server for everything, on `addresses` port 53, UDP and TCP. Answers may change at any time; a name
    that has none is NXDOMAIN. CNAMEs are followed within its own answers."""

    def __init__(self, place: Netns, addresses: Iterable[str]) -> None:
        self.addresses = tuple(addresses)
        self.delay = 0.0
        self._answers: dict[str, tuple[Record, ...]] = {}
        self._log = _Log()
        self._place = place
        self._transports: list[asyncio.DatagramTransport] = []
        self._servers: list[asyncio.Server] = []

    @property
    def queries(self) -> list[Query]:
        """What it was asked so far."""
        return [item for item in self._log.take() if isinstance(item, Query)]

    def forget(self) -> None:
        """Empties `queries`."""
        self._log.clear()

    def answer(self, name: str, *records: Record) -> None:
        """From now on `name` has these records; none: it does not exist."""
        self._answers[name.rstrip(".").lower()] = records

    def start(self) -> None:
        self._place.run(self._start())

    def stop(self) -> None:
        self._place.run(self._stop())

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        for address in self.addresses:
            made, _ = await loop.create_datagram_endpoint(lambda: _DnsUdp(self), local_addr=(address, 53))
            self._transports.append(made)
            self._servers.append(await asyncio.start_server(self._tcp, address, 53))

    async def _stop(self) -> None:
        for transport in self._transports:
            transport.close()
        for server in self._servers:
            server.close()

    async def _tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = struct.unpack("!H", await reader.readexactly(2))[0]
                reply = await self.reply(await reader.readexactly(size), writer.get_extra_info("peername")[0], "tcp")
                writer.write(struct.pack("!H", len(reply)) + reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def reply(self, query: bytes, client: str, over: str) -> bytes:
        """The answer to one message."""
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
            at += 1 + query[at]
        asked, kind = ".".join(labels), struct.unpack("!H", query[at + 1 : at + 3])[0]
        self._log.add(Query(asked.lower(), kind, client, over))
        if self.delay:
            await asyncio.sleep(self.delay)
        name, found = asked.lower(), []
        known = name in self._answers and bool(self._answers[name])
        for _ in range(8):
            records = self._answers.get(name, ())
            found += [(name, record) for record in records if _KINDS[record.kind] in (kind, CNAME)]
            onward = [record.value for record in records if record.kind == "CNAME" and kind != CNAME]
            if not onward:
                break
            name = onward[0].rstrip(".").lower()
        head = query[:2] + struct.pack("!HHHHH", 0x8580 if known else 0x8583, 1, len(found), 0, 0)
        body = query[12 : at + 5]
        for owner, record in found:
            data = _packed(record)
            body += _packed_name(owner) + struct.pack("!HHIH", _KINDS[record.kind], 1, record.ttl, len(data)) + data
        return head + body


class _DnsUdp(asyncio.DatagramProtocol):
    def __init__(self, server: Dns) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        async def answer() -> None:
            self._transport.sendto(await self._server.reply(data, addr[0], "udp"), addr)

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TestCa:
    """A certificate authority that nobody else trusts. `pem`: its certificate."""

    __test__ = False

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        made = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.pem = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        day = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
            .serial_number(x509.random_serial_number()).not_valid_before(day).not_valid_after(day.replace(year=2099))
        )  # fmt: skip

    def issue(self, names: Iterable[str]) -> tuple[str, str]:
        """Certificate (with names or addresses as its subjects) and key, both PEM."""
        key, listed = ec.generate_private_key(ec.SECP256R1()), list(names)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, listed[0][:60])])
        alternatives = x509.SubjectAlternativeName([_subject(name) for name in listed])
        made = self._builder(subject, key.public_key()).add_extension(alternatives, critical=False)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(), secret.decode()

    def server_context(self, names: Iterable[str]) -> ssl.SSLContext:
        """A context that serves with a new certificate for `names`."""
        certificate, secret = self.issue(names)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            chain, key = Path(folder, "c"), Path(folder, "k")
            chain.write_text(certificate)
            key.write_text(secret)
            context.load_cert_chain(chain, key)
        return context

    def client_context(self) -> ssl.SSLContext:
        """A context that trusts this authority alone."""
        return ssl.create_default_context(cadata=self.pem)


def _subject(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Web:
    """HTTP on port 80 and HTTPS on 443 of `addresses`, with a certificate for `names`. Answers `NAME PATH` of the Host asked
    for, or the content that `pages` has for a path (of the type in `types`); keeps connections alive. `only_pages`: other paths are 404.
    `halved`: paths whose answers are cut in the middle. `sent`: bytes of bodies so far."""

    def __init__(self, place: Netns, ca: TestCa, addresses: Iterable[str], names: Iterable[str], **ports: int) -> None:
        self.addresses = tuple(addresses)
        self.pages: dict[str, bytes] = {}
        self.types: dict[str, str] = {}
        self.only_pages = False
        self.halved: set[str] = set()
        self.sent = 0
        self._place = place
        self._context = ca.server_context(names)
        self._context.sni_callback = self._named
        self._ports = (ports.get("http", 80), ports.get("https", 443))
        self._log = _Log()
        self._servers: list[asyncio.Server] = []

    @property
    def requests(self) -> list[Request]:
        """What it was asked so far."""
        return [item for item in self._log.take() if isinstance(item, Request)]

    def forget(self) -> None:
        """Empties `requests`."""
        self._log.clear()

    def start(self) -> None:
        self._place.run(self._start())

    def stop(self) -> None:
        async def close() -> None:
            for server in self._servers:
                server.close()

        self._place.run(close())

    async def _start(self) -> None:
        plain, secure = self._ports
        for address in self.addresses:
            self._servers.append(await asyncio.start_server(self._serve, address, plain, limit=_HEAD))
            self._servers.append(
                await asyncio.start_server(self._serve, address, secure, ssl=self._context, limit=_HEAD)
            )

    @staticmethod
    def _named(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.test_sni = name or ""  # type: ignore[union-attr]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[0]
        sni = getattr(writer.get_extra_info("ssl_object"), "test_sni", "")
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                fields = {
                    key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])
                }
                self._log.add(Request(client, sni, fields.get("host", ""), method, path))
                if size := int(fields.get("content-length", "0")):
                    await reader.readexactly(min(size, 1 << 24))
                known = path in self.pages or not self.only_pages
                body = self.pages.get(path, f"{fields.get('host', '')} {path}\n".encode())
                kind = f"Content-Type: {self.types[path]}\r\n" if path in self.types else ""
                head = f"HTTP/1.1 {'200 OK' if known else '404 Not Found'}\r\n{kind}Content-Length: {len(body)}\r\n\r\n".encode()
                if path in self.halved:
                    body = body[: len(body) // 2]
                writer.write(head + (b"" if method == "HEAD" else body))
                self.sent += len(body)
                if path in self.halved:
                    raise ConnectionResetError
                await writer.drain()
                if fields.get("connection") == "close":
                    writer.close()
                    return
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, OSError):
            writer.close()


class Echo:
    """Sends back what comes, by TCP and UDP, on `port` of `addresses`. `seen`: (protocol, client address, bytes) so far."""

    def __init__(self, place: Netns, addresses: Iterable[str], port: int) -> None:
        self.addresses, self.port = tuple(addresses), port
        self._place = place
        self._log = _Log()
        self._servers: list[asyncio.Server] = []
        self._transports: list[asyncio.DatagramTransport] = []
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def seen(self) -> list[tuple[str, str, bytes]]:
        return [item for item in self._log.take() if isinstance(item, tuple)]

    def forget(self) -> None:
        """Empties `seen`."""
        self._log.clear()

    def start(self) -> None:
        self._place.run(self._start())

    def stop(self) -> None:
        async def close() -> None:
            for server in self._servers:
                server.close()
            for writer in self._writers:
                writer.transport.abort()
            for transport in self._transports:
                transport.close()

        self._place.run(close())

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        for address in self.addresses:
            self._servers.append(await asyncio.start_server(self._tcp, address, self.port))
            udp = await loop.create_datagram_endpoint(
                lambda: _EchoUdp(self._log), local_addr=(address, self.port), family=_family(address)
            )
            self._transports.append(udp[0])

    async def _tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[0]
        self._writers.add(writer)
        try:
            while data := await reader.read(_HEAD):
                self._log.add(("tcp", client, data[:64]))
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


class _EchoUdp(asyncio.DatagramProtocol):
    def __init__(self, log: _Log) -> None:
        self._log = log

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._log.add(("udp", addr[0], data[:64]))
        self._transport.sendto(data, addr)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
