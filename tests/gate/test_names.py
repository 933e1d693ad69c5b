"""The resolver's process, asked with real packets from within sandboxes: allowed names alone, and nothing of the rest reaches a server."""

import socket
import time

import dns.message
import dns.rcode
import pytest

from dsec.model.network import Allow, Policy
from dsec.testing.gatesite import BOXES, GATEWAY, Site, rule
from dsec.testing.internet import HOST
from dsec.testing.netservices import Record

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def records(site: Site) -> None:
    dns_server = site.internet.dns
    dns_server.answer("a.test", Record("A", "203.0.113.7"), Record("AAAA", "2001:db8:7::7"))
    dns_server.answer("b.test", Record("A", "203.0.113.7"))
    dns_server.answer("www.a.test", Record("CNAME", "cdn.other.test"))
    dns_server.answer("cdn.other.test", Record("A", "203.0.113.9", 5))
    dns_server.answer("secret.evil.test", Record("A", "203.0.113.66"))
    site.names(rule("a.test"), rule("www.a.test"))
    dns_server.forget()


@pytest.mark.parametrize(("tcp", "v6"), [(False, False), (True, False), (False, True), (True, True)])
def test_an_allowed_name_is_answered(site: Site, tcp: bool, v6: bool) -> None:
    assert site.resolve("a.test", tcp=tcp, v6=v6) == ["203.0.113.7"]
    assert site.resolve("a.test", "AAAA", tcp=tcp, v6=v6) == ["2001:db8:7::7"]


def test_names_are_compared_without_case_and_last_dot(site: Site) -> None:
    answer = site.query("A.TeSt.")
    assert [str(record) for record in answer.answer[0]] == ["203.0.113.7"]
    assert answer.question[0].name.to_text() == "A.TeSt."
    assert {query.name for query in site.internet.dns.queries} <= {"a.test"}


@pytest.mark.parametrize(
    "name",
    ["b.test", "evil-a.test", "x.a.test", "a.test.b.test", "secret.evil.test", "test", ".", "7.113.0.203.in-addr.arpa"],
)
@pytest.mark.parametrize("kind", ["A", "TXT", "AAAA", "ANY", "HTTPS"])
def test_other_names_do_not_exist_and_are_asked_nowhere(site: Site, name: str, kind: str) -> None:
    assert site.query(name, kind).rcode() == dns.rcode.NXDOMAIN
    assert site.internet.dns.queries == []


def test_of_an_allowed_name_only_addresses_are_told(site: Site) -> None:
    assert site.resolve("a.test", "HTTPS") == site.resolve("a.test", "SVCB") == ["NOERROR"]
    for kind in ("TXT", "MX", "ANY", "CNAME", "NS", "NULL"):
        assert site.resolve("a.test", kind) == ["REFUSED"]
    assert site.internet.dns.queries == []


def test_an_alias_is_followed_and_its_target_stays_closed(site: Site) -> None:
    site.answers.clear()
    assert site.resolve("www.a.test") == ["203.0.113.9"]
    assert site.query("cdn.other.test").rcode() == dns.rcode.NXDOMAIN
    [(slot, answer)] = site.answers
    assert (slot, answer.name, answer.addresses) == (BOXES[0].slot, "www.a.test", ("203.0.113.9",))
    assert 5 < answer.seconds <= 35  # the answer's own 5 s, and the grace


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "10.1.2.3", "192.168.0.1", "100.96.0.3", "0.0.0.0", "224.0.0.1", HOST[0],
     "::1", "fe80::1", "fd00:ec2::254", "fd96::3", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", HOST[1]],
)  # fmt: skip
def test_a_name_that_leads_to_the_host_or_a_private_network_is_not_answered(site: Site, address: str) -> None:
    kind = "AAAA" if ":" in address else "A"
    site.internet.dns.answer("a.test", Record(kind, address, 1))
    site.names(rule("a.test", 81))
    site.answers.clear()
    assert site.resolve("a.test", kind) == ["REFUSED"]
    assert site.answers == []


def test_a_private_address_is_answered_where_a_rule_opens_it_by_address(site: Site) -> None:
    site.internet.dns.answer("a.test", Record("A", "10.1.2.3"), Record("A", "127.0.0.1"))
    site.policy(Policy(names=(rule("a.test"),), allows=(Allow(network="10.1.0.0/16"), Allow(network="127.0.0.0/8"))))
    assert site.resolve("a.test") == ["10.1.2.3"]


def test_answers_of_one_sandbox_are_no_answers_for_another(site: Site) -> None:
    site.names(box=1)
    assert site.resolve("a.test") == ["203.0.113.7"]
    assert site.query("a.test", box=1).rcode() == dns.rcode.NXDOMAIN
    site.names(rule("a.test"), box=1)
    site.internet.dns.forget()
    site.query("a.test", box=1)
    assert [query.name for query in site.internet.dns.queries] == ["a.test"]  # not out of the other's answers


def test_a_switch_of_rules_holds_for_the_next_query(site: Site) -> None:
    assert site.resolve("a.test") == ["203.0.113.7"]
    site.names(rule("b.test"))
    assert site.query("a.test").rcode() == dns.rcode.NXDOMAIN
    assert site.resolve("b.test") == ["203.0.113.7"]


def test_refusals_are_told(site: Site) -> None:
    site.flows.clear()
    site.query("secret.evil.test", "TXT")
    flow = site.told("dns_name")
    assert (flow.name, flow.port) == ("secret.evil.test", 53)
    assert abs(flow.at - time.time()) < 60


def test_the_gateways_own_names_and_those_of_the_group(site: Site) -> None:
    site.policy(Policy(group="7", aliases=("web",)))
    site.policy(Policy(group="7", aliases=("db",)), box=1)
    assert site.resolve("mirror.dsec.internal") == [GATEWAY[0]]
    assert site.resolve("db") == [BOXES[1].v4]
    assert site.resolve("db.dsec.internal", "AAAA") == [BOXES[1].v6]
    site.policy(Policy(group="8", aliases=("db",)), box=1)
    assert site.query("db").rcode() == dns.rcode.NXDOMAIN


def test_data_does_not_flow_out_in_names_below_a_wildcard(site: Site) -> None:
    site.internet.dns.answer("x.wild.test", Record("A", "203.0.113.7"))
    site.names(rule("*.wild.test"))
    assert site.resolve("x.wild.test") == ["203.0.113.7"]
    assert site.query("wild.test").rcode() == dns.rcode.NXDOMAIN
    assert site.query("a" * 60 + "." + "b" * 60 + ".wild.test").rcode() == dns.rcode.REFUSED
    assert site.query("a.b.c.d.e.f.wild.test").rcode() == dns.rcode.REFUSED
    codes = [site.query(f"n{number}.wild.test").rcode() for number in range(80)]
    assert 50 < codes.count(dns.rcode.NXDOMAIN) < 60  # that many were asked upstream, the rest were not
    assert codes[-1] == dns.rcode.REFUSED
    assert len({query.name for query in site.internet.dns.queries}) <= 60
    assert site.resolve("x.wild.test") == ["203.0.113.7"]  # what is known goes on


def test_garbage_gets_no_more_than_a_refusal(site: Site) -> None:
    def send(data: bytes) -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.3)
            sock.sendto(data, (GATEWAY[0], 53))
            try:
                return sock.recv(2000)
            except TimeoutError:
                return b""

    def each() -> list[bytes]:
        good = site_query("a.test")
        return [
            send(data)
            for data in (
                b"",
                b"x",
                b"\0" * 12,
                good[:-1],
                good + b"tail",
                bytes([0, 0, 0x84]) + good[3:],
                good[:4] + b"\0\2" + good[6:],
            )
        ]

    for answer in site.boxes[0].call(each):
        assert answer == b"" or (len(answer) == 12 and answer[3] & 15 in (1, 5))
    assert site.resolve("a.test") == ["203.0.113.7"]


def site_query(name: str) -> bytes:
    return dns.message.make_query(name, "A").to_wire()


def test_a_burst_of_queries_is_refused_and_others_are_served_meanwhile(site: Site) -> None:
    site.names(rule("b.test"), box=1)

    def flood() -> int:
        data = site_query("a.test")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.0)
            for _ in range(4000):
                sock.sendto(data, (GATEWAY[0], 53))
        return 1

    site.boxes[0].call(flood)
    assert site.resolve("b.test", box=1) == ["203.0.113.7"]
    assert len(site.internet.dns.queries) <= 40  # what may be under way at once, and the other one


def test_of_a_flood_of_refusals_the_number_is_told(site: Site) -> None:
    site.flows.clear()

    def ask() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(5)
            for number in range(330):
                sock.sendto(site_query(f"n{number}.evil.test"), (GATEWAY[0], 53))
                sock.recv(600)
        return 1

    site.boxes[0].call(ask)
    site.wait_for(
        lambda: site.query("last.evil.test") and [flow for flow in site.refused() if flow.name == "last.evil.test"]
    )
    told = [flow for flow in site.refused() if flow.reason in ("dns_name", "dns_queries")]
    missing = sum(int(flow.name) for flow in site.refused() if flow.reason == "unlogged")
    assert missing > 0
    assert len(told) + missing >= 331  # nothing is lost without a trace
