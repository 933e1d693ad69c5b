"""The fake internet is one: names, web, echo, the metadata address and the neighbour answer the fake host, on both families."""

import http.client
import socket
import subprocess
from collections.abc import Iterator

import pytest

from dsec.testing.internet import HOST, METADATA, NAMESERVERS, NEIGHBOUR, Internet
from dsec.testing.netservices import Record

pytestmark = pytest.mark.root


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def question(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0" + labels + b"\0\0" + bytes([kind]) + b"\0\x01"


def asked(server: str, name: str, kind: int) -> bytes:
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.settimeout(5)
        udp.sendto(question(name, kind), (server, 53))
        return udp.recv(512)


def test_names_are_answered_on_both_families_and_recorded(internet: Internet) -> None:
    internet.dns.answer("a.test", Record("CNAME", "b.test"))
    internet.dns.answer("b.test", Record("A", "203.0.113.7", 5))
    for server in NAMESERVERS:
        reply = internet.host.call(lambda server=server: asked(server, "A.test", 1))
        assert reply[3] & 15 == 0 and reply.endswith(bytes([0, 0, 0, 5, 0, 4, 203, 0, 113, 7]))
        assert internet.host.call(lambda server=server: asked(server, "no.test", 1))[3] & 15 == 3
    assert [query.name for query in internet.dns.queries] == ["a.test", "no.test"] * 2
    assert {query.client for query in internet.dns.queries} == set(HOST)


def test_web_servers_answer_by_http_and_tls(internet: Internet) -> None:
    web = internet.web(["203.0.113.7", "2001:db8:7::7"], ["a.test", "203.0.113.7"])

    def fetch() -> bytes:
        secure = http.client.HTTPSConnection("203.0.113.7", context=internet.ca.client_context(), timeout=5)
        plain = http.client.HTTPConnection("[2001:db8:7::7]", timeout=5)
        found = b""
        for connection in (secure, plain):
            connection.request("GET", "/x", headers={"Host": "a.test"})
            found += connection.getresponse().read()
            connection.close()
        return found

    assert internet.host.call(fetch) == b"a.test /x\n" * 2
    assert [(r.host, r.path) for r in web.requests] == [("a.test", "/x")] * 2


def test_metadata_and_the_neighbour_are_there(internet: Internet) -> None:
    internet.echo(NEIGHBOUR, 7, internet.neighbour)

    def reach() -> list[int]:
        ends = [(address, 80) for address in METADATA] + [(address, 7) for address in NEIGHBOUR]
        found = []
        for end in ends:
            with socket.create_connection(end, timeout=5) as connection:
                found.append(connection.getpeername()[1])
        return found

    assert internet.host.call(reach) == [80, 80, 7, 7]


def test_a_process_started_inside_has_only_its_links(internet: Internet) -> None:
    with internet.host.inside():
        shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert {line.split(": ")[1].partition("@")[0] for line in shown.splitlines()} == {"lo", "eth0"}
