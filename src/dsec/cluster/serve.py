"""The HTTP server: where it listens, with which certificate, and how it ends."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvicorn
from msgspec import Struct

from dsec.cluster.connection import BoundedProtocol, BoundedSocketProtocol
from dsec.cluster.tls import Certificate, fingerprint_of, own_certificate
from dsec.model.errors import InvalidArgument, Unavailable, Unsupported
from dsec.model.settings import check_positive, setting
from dsec.ports.clock import Clock
from dsec.ports.cluster import Asgi

__all__ = ["Listener", "ServerSettings", "is_loopback", "open_listener", "parse_address", "serve"]

_BACKLOG = 4096
_WEBSOCKET_MESSAGE = 1 << 21


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server."""

    listen: str = setting("127.0.0.1:7380", "HOST:PORT to listen on; [HOST]:PORT for IPv6; port 0 takes a free one")
    tls: Literal["auto", "on", "off"] = setting("auto", "auto: TLS beyond loopback; on: always; off: loopback only")
    tls_cert: str | None = setting(
        None, "PEM file of the certificate chain; none: self-signed, made at the first start"
    )
    tls_key: str | None = setting(None, "PEM file of the certificate's key")
    keep_alive: float = setting(75.0, "seconds that an idle connection is kept")
    stop_patience: float = setting(5.0, "seconds that requests under way are given when the server stops")

    def __post_init__(self) -> None:
        check_positive(self, "keep_alive", "stop_patience")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("tls_cert and tls_key are given together", field="server.tls_cert")


class Listener(Struct, frozen=True, kw_only=True):
    """A bound socket. `url` is what clients on this host use; `fingerprint` of the certificate, None without TLS."""

    socket: socket.socket
    url: str
    certificate: Certificate | None
    fingerprint: str | None
    own: bool


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT. Raises InvalidArgument."""
    host, sign, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        sign = ""
    if not sign or not host or not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise InvalidArgument(f"{text!r} is not HOST:PORT", field="server.listen")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True for an address that only this host can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_listener(settings: ServerSettings, folder: Path, clock: Clock) -> Listener:
    """Bind the address and find the certificate; `folder` keeps a self-signed one.

    Raises Unsupported for plain HTTP beyond loopback, Unavailable where the address cannot be bound.
    """
    host, port = parse_address(settings.listen)
    secure = settings.tls == "on" or (settings.tls == "auto" and not is_loopback(host))
    if not secure and not is_loopback(host):
        raise Unsupported(
            f"plain HTTP on {host}: API keys would cross the network in clear; use TLS", setting="server.tls"
        )
    certificate, own = None, False
    if secure and settings.tls_cert is not None and settings.tls_key is not None:
        certificate = Certificate(Path(settings.tls_cert), Path(settings.tls_key))
    elif secure:
        certificate, own = own_certificate(folder, host, clock), True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {settings.listen}: {error.strerror or error}", setting="server.listen"
        ) from error
    bound.setblocking(False)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    if host in ("0.0.0.0", "::"):
        shown = "localhost"
    return Listener(
        socket=bound,
        url=f"{'https' if secure else 'http'}://{shown}:{bound.getsockname()[1]}",
        certificate=certificate,
        fingerprint=fingerprint_of(certificate.cert) if certificate else None,
        own=own,
    )


class _Server(uvicorn.Server):
    """Signals are the caller's, and so is the news that it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


async def serve(
    app: Asgi, listener: Listener, settings: ServerSettings, stop: asyncio.Event, ready: Callable[[], None]
) -> None:
    """Serve `app` until `stop` is set; requests under way then have `stop_patience` seconds. `ready` is called once."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws=BoundedSocketProtocol,
        ws_max_size=_WEBSOCKET_MESSAGE,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(settings.keep_alive),
        timeout_graceful_shutdown=max(1, round(settings.stop_patience)),
        ssl_certfile=listener.certificate.cert if listener.certificate else None,
        ssl_keyfile=listener.certificate.key if listener.certificate else None,
    )
    server = _Server(config, ready)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listener.socket]))
        stopping = group.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        stopping.cancel()
