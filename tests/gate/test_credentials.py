"""Secrets that are added on the way: the server gets them, the sandbox never does, and no other host does."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.gate.credentials import Credentials, Scrubber
from dsec.gate.settings import Credential, GateSettings, MirrorService
from dsec.model.errors import InvalidArgument
from dsec.model.network import MirrorRule, Policy
from dsec.testing.gatesite import GATEWAY, Site, read_all, rule, site_of
from dsec.testing.internet import NAMESERVERS, Internet
from dsec.testing.netns import Netns
from dsec.testing.netservices import Record, TestCa

SECRET = "tok-5f3a9c2e71"
ADDRESS = "203.0.113.40"
SERVICE = MirrorService(service="own", kind="plain", port=3150, upstream="https://api.test/base", credential="api")


class EchoOfHeads:
    """A TLS server that answers every request with its own head, which is what a careless server may do."""

    def __init__(self, place: Netns, ca: TestCa, names: list[str], port: int = 443) -> None:
        self.heads: list[bytes] = []
        self._context = ca.server_context(names)
        self._listener = place.call(lambda: socket.create_server((ADDRESS, port)))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(5)
            try:
                with sock, self._context.wrap_socket(sock, server_side=True) as tls:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += tls.recv(4096)
                    self.heads.append(head)
                    # In two pieces, the secret cut in the middle.
                    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(head) + head
                    cut = answer.find(SECRET.encode()) + 5
                    tls.sendall(answer[:cut])
                    tls.sendall(answer[cut:])
                    tls.unwrap()
            except (OSError, ValueError):
                continue


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("credentials")
    with Internet() as internet:
        certificate, key = internet.ca.issue(["ended.test"])
        (folder / "ca.pem").write_text(internet.ca.pem)
        (folder / "cert.pem").write_text(certificate)
        (folder / "key.pem").write_text(key)
        value = f"Bearer {SECRET}"
        credentials = (
            Credential(name="api", hosts=("api.test",), value=value),
            Credential(
                name="ended",
                hosts=("ended.test",),
                value=value,
                certificate=str(folder / "cert.pem"),
                key=str(folder / "key.pem"),
            ),
        )
        settings = GateSettings(nameservers=NAMESERVERS[:1], head_seconds=2.0, idle_seconds=5.0)
        before = os.environ.get("SSL_CERT_FILE")
        os.environ["SSL_CERT_FILE"] = str(folder / "ca.pem")
        try:
            with site_of(folder / "cache", settings, (SERVICE,), credentials, internet) as made:
                yield made
        finally:
            os.environ.pop("SSL_CERT_FILE")
            if before is not None:
                os.environ["SSL_CERT_FILE"] = before


@pytest.fixture
def server(site: Site) -> Iterator[EchoOfHeads]:
    site.internet.add_addresses([ADDRESS])
    for name in ("api.test", "ended.test", "other.test"):
        site.internet.dns.answer(name, Record("A", ADDRESS))
    site.flows.clear()
    made = EchoOfHeads(site.internet.world, site.internet.ca, ["api.test", "ended.test", "other.test"])
    yield made
    made.close()


@pytest.mark.root
def test_a_request_in_the_clear_goes_on_by_tls_with_the_secret(site: Site, server: EchoOfHeads) -> None:
    site.names(rule("api.test", 80, credential="api"))
    answer = site.plain(
        ADDRESS, b"GET /x HTTP/1.1\r\nHost: api.test\r\nauthorization: mine\r\nAccept-Encoding: gzip\r\n\r\n"
    )
    assert f"Authorization: Bearer {SECRET}".encode() in server.heads[0]
    assert b"mine" not in server.heads[0]
    assert b"gzip" not in server.heads[0]
    assert b"200 OK" in answer
    assert SECRET.encode() not in answer
    assert b"Bearer " + b"*" * len(SECRET) in answer
    assert all(SECRET not in str(flow) for flow in site.flows)


@pytest.mark.root
def test_tls_that_ends_at_the_gate_gets_the_secret_too(site: Site, server: EchoOfHeads) -> None:
    site.names(rule("ended.test", 443, credential="ended"))
    answer = site.tls(ADDRESS, "ended.test", "ended.test")
    assert f"Authorization: Bearer {SECRET}".encode() in server.heads[0]
    assert SECRET.encode() not in answer
    with pytest.raises((OSError, ValueError)):
        site.tls(ADDRESS, "ended.test", "other.test")  # another Host within
    assert len(server.heads) == 1


@pytest.mark.root
def test_no_other_host_gets_it(site: Site, server: EchoOfHeads) -> None:
    site.names(
        rule("api.test", 80, credential="api"), rule("other.test", 80, credential="api"), rule("ended.test", 443)
    )
    with pytest.raises(ConnectionResetError):
        site.get(ADDRESS, "other.test")
    assert site.told("credential")
    with pytest.raises(ConnectionResetError):
        site.plain(ADDRESS, b"TRACE / HTTP/1.1\r\nHost: api.test\r\n\r\n")
    site.names(rule("api.test", 443, credential="api"), rule("ended.test", 443))
    with pytest.raises(OSError):  # nobody can add it there, so it is not silently left out
        site.tls(ADDRESS, "api.test", "api.test")
    site.tls(ADDRESS, "ended.test", "ended.test")  # a rule without the credential: not decrypted, nothing added
    assert [SECRET.encode() in head for head in server.heads] == [False]


@pytest.mark.root
def test_a_server_that_the_host_does_not_trust_gets_nothing(site: Site) -> None:
    site.internet.add_addresses([ADDRESS])
    site.internet.dns.answer("api.test", Record("A", ADDRESS))
    site.names(rule("api.test", 80, credential="api"))
    impostor = EchoOfHeads(site.internet.world, TestCa(), ["api.test"])
    try:
        with pytest.raises(ConnectionResetError):
            site.get(ADDRESS, "api.test")
    finally:
        impostor.close()
    assert impostor.heads == []
    assert site.told("tls")


@pytest.mark.root
def test_a_plain_mirror_adds_it_for_its_upstream(site: Site, server: EchoOfHeads) -> None:
    site.policy(Policy(mirrors={"own": MirrorRule(kind="plain", port=SERVICE.port)}))

    def ask() -> bytes:
        with socket.create_connection((GATEWAY[0], SERVICE.port), timeout=5) as sock:
            sock.sendall(b"GET /x HTTP/1.1\r\nHost: mirror.dsec.internal\r\nConnection: close\r\n\r\n")
            return read_all(sock)

    answer = site.boxes[0].call(ask)
    assert server.heads[0].startswith(b"GET /base/x HTTP/1.1")
    assert f"Authorization: Bearer {SECRET}".encode() in server.heads[0]
    assert b"200" in answer
    assert SECRET.encode() not in answer


@given(
    st.lists(st.sampled_from([b"tok-", SECRET.encode(), b"5f3a9c2e71", b"x", b"tok-5f3a9c2e7", b"\n"]), max_size=12),
    st.integers(1, 20),
)
def test_the_secret_is_blotted_out_however_it_is_cut(parts: list[bytes], step: int) -> None:
    stream, scrubber = b"".join(parts), Scrubber(Credential(name="x", hosts=("x.test",), value=f"Bearer {SECRET}"))
    out = b"".join(scrubber.feed(stream[at : at + step]) for at in range(0, len(stream), step)) + scrubber.rest()
    assert out == stream.replace(SECRET.encode(), b"*" * len(SECRET))


def test_values_that_cannot_be_sent_safely_are_refused(tmp_path: Path) -> None:
    for value in ("a\r\nX: y12345678", "short", "", "caf\xe9-12345678"):
        with pytest.raises(InvalidArgument):
            Credentials([Credential(name="x", hosts=("x.test",), value=value)])
    with pytest.raises(InvalidArgument):
        Credentials(
            [Credential(name="x", hosts=("x.test",), value="long-enough-1", certificate=str(tmp_path / "none"))]
        )
    assert "long-enough-1" not in repr(Credential(name="x", hosts=("x.test",), value="long-enough-1"))
