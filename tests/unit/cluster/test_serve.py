"""Listening: loopback in clear, TLS beyond it, a clean end."""

import asyncio
import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509

from dsec.cluster.serve import ServerSettings, is_loopback, open_listener, parse_address, serve
from dsec.cluster.tls import fingerprint_of, own_certificate
from dsec.model.errors import InvalidArgument, Unavailable, Unsupported
from unit.cluster.fakes import RealClock

CLOCK = RealClock()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:0", ("::1", 0)), ("h:65535", ("h", 65535))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", ":1", "1", "h:", "h:65536", "h:-1", "::1:80", "h:²"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) == local


def test_plain_http_beyond_loopback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="TLS"):
        open_listener(ServerSettings(listen="0.0.0.0:0", tls="off"), tmp_path, CLOCK)


def test_a_taken_port_is_said_so(tmp_path: Path) -> None:
    first = open_listener(ServerSettings(listen="127.0.0.1:0"), tmp_path, CLOCK)
    with first.socket, pytest.raises(Unavailable, match="cannot listen"):
        open_listener(ServerSettings(listen=first.url.removeprefix("http://")), tmp_path, CLOCK)


@pytest.mark.parametrize(
    ("listen", "tls", "scheme"),
    [("127.0.0.1:0", "auto", "http"), ("127.0.0.1:0", "on", "https"), ("0.0.0.0:0", "auto", "https")],
)
async def test_served_and_stopped(tmp_path: Path, listen: str, tls: Any, scheme: str) -> None:
    settings = ServerSettings(listen=listen, tls=tls, stop_patience=1.0)
    listener = open_listener(settings, tmp_path / "tls", CLOCK)
    stop, ready = asyncio.Event(), asyncio.Event()
    trust = ssl.create_default_context(cafile=listener.certificate.cert) if listener.certificate else True
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(serve(hello, listener, settings, stop, ready.set))
        await ready.wait()
        async with aiohttp.ClientSession() as client:
            async with client.get(listener.url, ssl=trust) as answer:
                assert await answer.text() == scheme
            if scheme == "https":
                assert listener.certificate is not None
                assert listener.fingerprint == fingerprint_of(listener.certificate.cert)
                pin = aiohttp.Fingerprint(bytes.fromhex(str(listener.fingerprint).replace(":", "")))
                async with client.get(listener.url, ssl=pin) as answer:
                    assert answer.status == 200
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await client.get(listener.url)
        stop.set()


async def test_requests_under_way_do_not_hold_the_end_for_ever(tmp_path: Path) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    settings = ServerSettings(listen="127.0.0.1:0", stop_patience=1.0)
    listener = open_listener(settings, tmp_path, CLOCK)
    stop, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(serve(slow, listener, settings, stop, ready.set))
        await ready.wait()
        async with aiohttp.ClientSession() as client:
            request = group.create_task(client.get(listener.url))
            await asyncio.sleep(0.05)
            stop.set()
            with pytest.raises(aiohttp.ClientError):
                (await request).raise_for_status()


def test_the_own_certificate_is_kept_and_renewed_for_a_new_name(tmp_path: Path) -> None:
    first = own_certificate(tmp_path, "10.1.2.3", CLOCK)
    text = first.cert.read_bytes()
    assert first.key.stat().st_mode & 0o777 == 0o600
    assert own_certificate(tmp_path, "10.1.2.3", CLOCK).cert.read_bytes() == text
    renewed = own_certificate(tmp_path, "node.example.org", CLOCK).cert.read_bytes()
    assert renewed != text
    names = (
        x509.load_pem_x509_certificate(renewed).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    )
    assert "node.example.org" in names.get_values_for_type(x509.DNSName)


def test_a_certificate_for_all_addresses_names_the_hosts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect(("192.0.2.1", 9))
        mine = ipaddress.ip_address(way.getsockname()[0])
    cert = own_certificate(tmp_path, "0.0.0.0", CLOCK).cert.read_bytes()
    names = x509.load_pem_x509_certificate(cert).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert mine in names.get_values_for_type(x509.IPAddress)
    monkeypatch.setattr("dsec.cluster.tls._addresses", lambda host: [])
    assert own_certificate(tmp_path, "0.0.0.0", CLOCK).cert.read_bytes() == cert, "clients hold it"


def test_certificate_and_key_come_together() -> None:
    with pytest.raises(InvalidArgument):
        ServerSettings(tls_cert="/x")
