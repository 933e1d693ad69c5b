"""The relay, tried from within sandboxes with real connections: two names share one address, and only the allowed one is reached."""

import socket
import struct
import threading

import pytest

from dsec.gate.settings import GateSettings
from dsec.model.network import Policy
from dsec.testing.gatesite import Site, read_all, rule, site_of
from dsec.testing.internet import NAMESERVERS
from dsec.testing.netns import Netns
from dsec.testing.netservices import Record, Web
from gate.test_hello import hello, openssl_hello, records, server_name

pytestmark = pytest.mark.root
SHARED = ("203.0.113.7", "2001:db8:7::7")
SETTINGS = GateSettings(nameservers=NAMESERVERS[:1], head_seconds=1.0, idle_seconds=2.0, connections=20)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with site_of(tmp_path_factory.mktemp("cache"), SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def web(site: Site) -> Web:
    return site.internet.web(SHARED, ["a.test", "b.test"])


@pytest.fixture(scope="module")
def other(site: Site) -> Web:
    return site.internet.web(["203.0.113.8"], ["a.test"])


@pytest.fixture(autouse=True)
def ready(site: Site, web: Web) -> None:
    for name in ("a.test", "b.test"):
        site.internet.dns.answer(name, Record("A", SHARED[0]), Record("AAAA", SHARED[1]))
    site.names(rule("a.test"))
    site.flows.clear()
    web.forget()


@pytest.mark.parametrize("address", SHARED)
def test_an_allowed_name_is_reached_by_http_and_tls(site: Site, web: Web, address: str) -> None:
    assert site.get(address, "a.test", "/x").endswith(b"a.test /x\n")
    assert site.tls(address, "a.test", "a.test") == b"a.test /\n"
    assert [(request.sni, request.host) for request in web.requests] == [("", "a.test"), ("a.test", "a.test")]
    flows = site.wait_for(lambda: [e.flow for e in site.flows if e.flow.verdict == "allowed"])
    assert flows[0].name == "a.test"
    assert flows[0].bytes_out > 40
    assert flows[0].bytes_in > 40


@pytest.mark.parametrize("host", ["A.TEST", "a.test.", "A.tEsT.:80"])
def test_names_are_compared_in_one_form(site: Site, web: Web, host: str) -> None:
    assert b"200 OK" in site.get(SHARED[0], host)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n", "name"),
        (b"GET / HTTP/1.1\r\nHost: evil-a.test\r\n\r\n", "name"),
        (b"GET / HTTP/1.1\r\nHost: x.a.test\r\n\r\n", "name"),
        (b"GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", "bad_http"),
        (b"GET / HTTP/1.1\r\nHost: 203.0.113.7\r\n\r\n", "address"),
        (b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n", "no_host"),
        (b"GET / HTTP/1.0\r\n\r\n", "no_host"),
        (b"CONNECT b.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n", "method"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "bad_http"),
        (b"SSH-2.0-x\r\n", "no_head"),
        (b"\0\0\0\1", "unknown_protocol"),
        (
            b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "bad_http",
        ),
        (openssl_hello("b.test"), "name"),
        (openssl_hello(None), "no_sni"),
        (records(hello((0xFE0D, b"\0"), server_name(b"a.test"))), "ech"),
        (openssl_hello("a.test")[:50], "no_head"),
    ],
)
def test_whatever_does_not_name_an_allowed_host_is_reset_and_told(site: Site, web: Web, data: bytes, why: str) -> None:
    with pytest.raises(ConnectionResetError):
        site.plain(SHARED[0], data)
    assert site.told(why)
    assert web.requests == []


def test_a_name_on_a_port_that_is_not_its_own_is_reset(site: Site) -> None:
    with pytest.raises(ConnectionResetError):
        site.plain(SHARED[0], b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", port=22)
    assert site.told("port")


def test_the_address_that_a_sandbox_makes_up_does_not_count(site: Site, web: Web) -> None:
    assert b"200 OK" in site.get("203.0.113.200", "a.test")
    assert web.requests[0].host == "a.test"


def test_each_request_of_a_kept_connection_is_checked(site: Site, web: Web) -> None:
    def send() -> bytes:
        with socket.create_connection((SHARED[0], 80), timeout=5) as sock:
            sock.sendall(
                b"POST /1 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhelloGET /2 HTTP/1.1\r\nHost: a.test\r\n\r\n"
            )
            while (got := sock.recv(1 << 16, socket.MSG_PEEK)).count(b"200 OK") != 2:
                assert got
            sock.sendall(b"GET /3 HTTP/1.1\r\nHost: b.test\r\n\r\n")
            return read_all(sock)

    with pytest.raises(ConnectionResetError):
        site.boxes[0].call(send)
    assert [request.path for request in web.requests] == ["/1", "/2"]
    assert site.told("host_changed")


def test_a_name_is_followed_when_its_address_changes(site: Site, web: Web, other: Web) -> None:
    site.internet.dns.answer("a.test", Record("A", SHARED[0], 1))
    site.names(rule("a.test", 80))
    assert b"200 OK" in site.get(SHARED[0], "a.test")
    site.internet.dns.answer("a.test", Record("A", "203.0.113.8", 1))

    def moved() -> bool:
        site.get(SHARED[0], "a.test")
        return bool(other.requests)

    assert site.wait_for(moved)
    web.forget()
    site.get(SHARED[0], "a.test")
    assert web.requests == []


def test_a_name_that_leads_to_a_private_address_is_not_connected(site: Site) -> None:
    site.internet.dns.answer("a.test", Record("A", "192.0.2.2"), Record("AAAA", "::1"))  # the host's own
    site.names(rule("a.test", 80))
    with pytest.raises(ConnectionResetError):
        site.get(SHARED[0], "a.test")
    assert site.told("rebinding")


class Peer:
    """A server that a test speaks by hand, on a port of its own."""

    def __init__(self, place: Netns, port: int) -> None:
        self._listener = place.call(lambda: socket.create_server((SHARED[0], port)))
        self._listener.settimeout(5)

    def accept(self) -> socket.socket:
        sock, _ = self._listener.accept()
        sock.settimeout(5)
        return sock

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peer(site: Site):  # type: ignore[no-untyped-def]
    made = Peer(site.internet.world, 8000)
    site.names(rule("a.test", 80, 443, 8000))
    yield made
    made.close()


def test_a_web_socket_passes_once_the_server_agrees_and_not_before(site: Site, peer: Peer) -> None:
    asked = b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with site.connect(SHARED[0], 8000) as client:
        client.sendall(asked)
        with peer.accept() as server:
            assert b"Upgrade: websocket" in server.recv(1000)
            server.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\nhi")
            assert client.recv(1000).endswith(b"\r\n\r\nhi")
            client.sendall(b"\x81\x00 any bytes \xff")
            assert server.recv(1000) == b"\x81\x00 any bytes \xff"
    with site.connect(SHARED[0], 8000) as client:
        client.sendall(asked)
        with peer.accept() as server:
            server.recv(1000)
            server.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            assert b"200 OK" in client.recv(1000)
            client.sendall(b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                client.recv(1000)
            assert server.recv(1000) == b""


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(site: Site, peer: Peer) -> None:
    with site.connect(SHARED[0], 8000) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        with peer.accept() as server:
            assert server.recv(1000).endswith(b"\r\n\r\n")
            server.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(b"hello")
            assert server.recv(100) == b"hello"
    with site.connect(SHARED[0], 8000) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhe")
        with peer.accept() as server:  # an upload that stops is idle as everything else
            assert read_all(server).endswith(b"\r\n\r\nhe")


def test_large_transfers_arrive_whole_both_ways_and_ends_are_passed_on(site: Site, peer: Peer) -> None:
    first, blob = openssl_hello("a.test"), bytes(range(256)) * (16 << 12)

    def serve() -> None:
        with peer.accept() as server:
            got = read_all(server)
            server.sendall(got)

    thread = threading.Thread(target=serve)
    thread.start()

    def talk() -> bytes:
        with socket.create_connection((SHARED[0], 8000), timeout=10) as sock:
            sock.sendall(first + blob)
            sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    assert site.boxes[0].call(talk) == first + blob
    thread.join()
    flow = site.wait_for(lambda: [e.flow for e in site.flows if e.flow.port == 8000])[-1]
    assert (flow.bytes_out, flow.bytes_in) == (len(first + blob),) * 2


def test_a_switch_of_rules_cuts_what_is_no_longer_allowed_and_nothing_else(site: Site, peer: Peer) -> None:
    def begin() -> tuple[socket.socket, socket.socket]:
        client = site.connect(SHARED[0], 8000)
        client.sendall(openssl_hello("a.test"))
        server = peer.accept()
        assert server.recv(1000)
        return client, server

    client, server = begin()
    with client, server:
        site.names(rule("a.test", 8000), rule("c.test"))
        client.sendall(b"still")
        assert server.recv(100) == b"still"
        site.policy(Policy())
        with pytest.raises(ConnectionResetError):
            client.recv(100)
        assert site.told("cut")


def test_an_idle_connection_is_cut(site: Site, peer: Peer) -> None:
    with site.connect(SHARED[0], 8000) as client:
        client.sendall(openssl_hello("a.test"))
        with peer.accept() as server:
            assert read_all(client) == b""
            assert server.recv(1000)
            assert server.recv(1000) == b""


def test_silent_and_slow_clients_are_cut_after_the_head_time(site: Site, web: Web) -> None:
    with site.connect(SHARED[0], 80) as client:
        with pytest.raises(ConnectionResetError):
            client.recv(100)
        assert site.told("no_head")
    with site.connect(SHARED[0], 80) as client, pytest.raises((ConnectionResetError, BrokenPipeError)):
        for _ in range(100):
            client.sendall(b"GET"[:1])
            client.settimeout(0.05)
            try:
                client.recv(1)
            except TimeoutError:
                continue
    assert web.requests == []


def test_connections_of_one_sandbox_are_bounded_and_others_are_served(site: Site, web: Web) -> None:
    site.names(rule("a.test"), box=1)
    held = [site.connect(SHARED[0], 80) for _ in range(SETTINGS.connections)]
    try:
        assert site.wait_for(lambda: _refused(site), 3)
        assert site.told("connections")
        assert b"200 OK" in site.get(SHARED[0], "a.test", box=1)
    finally:
        for sock in held:
            sock.close()
    assert site.wait_for(lambda: _served(site))


def _refused(site: Site) -> bool:
    try:
        with site.connect(SHARED[0], 80) as sock:
            sock.settimeout(0.2)
            return sock.recv(1) == b"x"
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def _served(site: Site) -> bool:
    try:
        return b"200 OK" in site.get(SHARED[0], "a.test")
    except ConnectionResetError:
        return False


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_floods_leave_memory_and_others_alone(site: Site, web: Web) -> None:
    assert site.gate.pid
    site.names(rule("a.test"), box=1)
    before = resident(site.gate.pid)

    def flood() -> None:
        for number in range(1500):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.connect((SHARED[0], 80))
                try:
                    sock.sendall(b"\x16\x03\x01\x40\x00" + bytes(4000) if number % 2 else b"X" * 5000)
                except ConnectionError:
                    continue

    site.boxes[0].call(flood)
    assert b"200 OK" in site.get(SHARED[0], "a.test", box=1)
    assert resident(site.gate.pid) - before < 32 << 20
