"""What the kernel lets pass, tried with real packets from a namespace with all of root's power in it."""

import socket
import struct
import time
from collections.abc import Iterator

import pytest

from dsec.kernel.errors import KernelError
from dsec.kernel.network import NetFabric
from dsec.model.network import Allow, NetLimits
from dsec.testing.fabric import Cell, cells, connect, fabric_in, until
from dsec.testing.internet import HOST, METADATA, NEIGHBOUR, Internet

pytestmark = pytest.mark.root

WEB = ("203.0.113.7", "2001:db8:7::7")
OTHER = ("203.0.113.8", "2001:db8:7::8")
PORT = 7


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet() as made:
        made.echo([*WEB, *OTHER], PORT)
        made.echo([*WEB], 8)
        yield made


@pytest.fixture(scope="module")
def fabric(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetFabric]:
    with fabric_in(internet, tmp_path_factory.mktemp("fabric")) as made:
        yield made


@pytest.fixture
def cell(fabric: NetFabric) -> Iterator[Cell]:
    fabric.drain()
    fabric.sweep()
    with cells(fabric, [7]) as (made,):
        yield made


def reached(cell: Cell, addresses: tuple[str, ...], port: int = PORT) -> set[str]:
    """Which ways lead there."""
    found = set()
    for address in addresses:
        ways = {
            "tcp": cell.tcp(address, port) == "hello",
            "udp": cell.udp(address, port) == "hello",
            "icmp": cell.ping(address) == "hello",
        }
        found |= {way + ("6" if ":" in address else "4") for way, worked in ways.items() if worked}
    return found


def test_nothing_is_reached_without_a_rule_and_refusals_are_fast(cell: Cell) -> None:
    took = []
    for address in WEB * 5:
        begun = time.monotonic()
        assert cell.tcp(address, PORT) == "Connection refused"
        took.append(time.monotonic() - begun)
        assert cell.udp(address, PORT) in ("No route to host", "Permission denied")
        assert cell.ping(address) in ("No route to host", "Permission denied", "prohibited 13", "prohibited 1")
    assert sorted(took)[len(took) // 2] < 0.1


def test_a_rule_opens_its_prefix_protocol_and_ports_alone(cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.7/32", protocol="tcp", low=7, high=7))
    assert reached(cell, WEB) == {"tcp4"}
    assert (reached(cell, OTHER), reached(cell, WEB, 8)) == (set(), set())
    cell.allow(Allow(network="2001:db8:7::/64", protocol="udp", low=7, high=7))
    assert (reached(cell, WEB), reached(cell, OTHER)) == ({"udp6"}, {"udp6"})
    cell.allow(Allow(network="203.0.113.0/24", protocol="icmp"), Allow(network="2001:db8::/32", protocol="icmp"))
    assert reached(cell, WEB) == {"icmp4", "icmp6"}
    cell.allow(*(Allow(network=prefix, protocol="any") for prefix in ("0.0.0.0/0", "::/0")))
    assert reached(cell, WEB) == {f"{way}{family}" for way in ("tcp", "udp", "icmp") for family in "46"}


def test_a_longer_prefix_inherits_what_a_shorter_one_allows(cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.0/24", low=7, high=7), Allow(network="203.0.113.7/32", low=8, high=8))
    assert (reached(cell, WEB[:1]), reached(cell, WEB[:1], 8)) == ({"tcp4"}, {"tcp4"})
    assert (reached(cell, OTHER[:1]), reached(cell, OTHER[:1], 8)) == ({"tcp4"}, set())


def test_what_is_in_force_reads_back_as_it_was_given(fabric: NetFabric, cell: Cell) -> None:
    given = (
        Allow(network="203.0.113.0/24", low=7, high=7),
        Allow(network="203.0.113.7/32", protocol="udp", low=8, high=9),
        Allow(network="2001:db8::/32", protocol="icmp"),
        Allow(network="203.0.113.7/32", low=443, high=443, via="relay"),
    )
    cell.allow(*given)
    assert set(fabric.allowed(cell.slot)) == set(given)
    answer = Allow(network="203.0.113.9/32", low=80, high=80)
    fabric.permit(cell.slot, [answer], 60)
    assert set(fabric.allowed(cell.slot)) == {*given, answer}
    cell.allow()
    assert fabric.allowed(cell.slot) == ()


def test_too_many_rules_of_one_prefix_are_refused_and_nothing_is_open(fabric: NetFabric, cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.7/32"))
    with pytest.raises(KernelError):
        cell.allow(*(Allow(network="203.0.113.7/32", low=port, high=port) for port in range(100)))
    assert reached(cell, WEB) == set()


def test_an_answers_addresses_are_open_for_their_time(fabric: NetFabric, cell: Cell) -> None:
    cell.allow()
    fabric.permit(cell.slot, [Allow(network="203.0.113.7/32", low=7, high=7)], 0.3)
    assert cell.tcp(WEB[0], PORT) == "hello"
    until(lambda: cell.tcp(WEB[0], PORT) == "Connection refused")
    fabric.sweep()
    assert fabric.allowed(cell.slot) == ()


@pytest.mark.parametrize("address", [*HOST, "127.0.0.1", "::1", "::ffff:203.0.113.7", "::ffff:127.0.0.1", *METADATA, "100.100.100.200",
                                     "fe80::1", "169.254.1.1", "224.0.0.1", "255.255.255.255", "0.0.0.0", "64:ff9b::cb00:7107"])  # fmt: skip
def test_no_rule_opens_the_host_or_what_stands_for_it(internet: Internet, cell: Cell, address: str) -> None:
    cell.allow(*(Allow(network=prefix, protocol="any") for prefix in ("0.0.0.0/0", "::/0")))
    listener = internet.host.call(lambda: socket.create_server(("::", 80), family=socket.AF_INET6, dualstack_ipv6=True))
    internet.metadata.forget()
    with listener:
        said = cell.tcp(address, 80, b"GET / HTTP/1.0\r\n\r\n", 0.3)
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert not said.startswith("HTTP") and internet.metadata.requests == []


def test_the_hosts_neighbour_is_reached_by_a_rule_alone(internet: Internet, cell: Cell) -> None:
    echo = internet.echo(NEIGHBOUR, 9, internet.neighbour)
    assert reached(cell, NEIGHBOUR, 9) == set()
    cell.allow(Allow(network=f"{NEIGHBOUR[0]}/32", protocol="tcp"))
    assert reached(cell, NEIGHBOUR, 9) == {"tcp4"}
    # Under the host's address, not the sandbox's own.
    assert {client for _, client, _ in echo.seen} == {HOST[0]}
    echo.stop()


def test_sandboxes_see_each_other_within_a_group_alone(fabric: NetFabric) -> None:
    with cells(fabric, [1, 2, 3]) as (a, b, c):
        everywhere = [Allow(network=prefix, protocol="any") for prefix in ("0.0.0.0/0", "::/0")]
        for one, group in ((a, 5), (b, 5), (c, 6)):
            one.allow(*everywhere, group=group)
        listeners = [b.call(lambda end=end, kind=kind: socket.create_server((end, 80), family=kind))
                     for end, kind in ((b.v4, socket.AF_INET), (b.v6, socket.AF_INET6))]  # fmt: skip
        try:
            for end in (b.v4, b.v6):
                assert a.call(lambda end=end: connect(end, 80, b"x", 0.2)) == "timeout"  # connected; nobody answers
                assert c.tcp(end, 80) == "Connection refused"
                assert (a.ping(end), c.ping(end) == "hello") == ("hello", False)
            b.allow(*everywhere, group=6)
            assert (a.tcp(b.v4, 80), c.call(lambda: connect(b.v4, 80, b"x", 0.2))) == ("Connection refused", "timeout")
            b.allow(*everywhere)
            assert (a.tcp(b.v4, 80), c.tcp(b.v4, 80)) == ("Connection refused", "Connection refused")
        finally:
            for listener in listeners:
                listener.close()


def test_a_switch_cuts_what_it_no_longer_allows_and_nothing_else(
    internet: Internet, fabric: NetFabric, cell: Cell
) -> None:
    # Of its own: the far end of a cut connection is told nothing, and stays open until it is stopped.
    echo = internet.echo(["203.0.113.9"], 7)
    both = [Allow(network=f"{address}/32", low=7, high=7) for address in (WEB[0], echo.addresses[0])]
    cell.allow(*both)
    lines = [
        cell.call(lambda end=end: socket.create_connection((end, 7), timeout=2)) for end in (WEB[0], echo.addresses[0])
    ]
    for line in lines:
        line.sendall(b"a")
        assert line.recv(1) == b"a"
    cell.allow(both[0])
    lines[0].sendall(b"b")
    assert lines[0].recv(1) == b"b"
    lines[1].sendall(b"b")
    with pytest.raises(ConnectionResetError):
        lines[1].recv(1)
    for line in lines:
        line.close()
    told = {(event.flow.address, event.flow.reason) for event in fabric.drain() if event.flow.verdict == "refused"}
    assert told == {(echo.addresses[0], "no longer allowed")}
    echo.stop()


def test_no_packet_slips_through_while_policies_change(internet: Internet, fabric: NetFabric, cell: Cell) -> None:
    """Two policies in turn: what both allow never fails, what neither allows never passes."""
    echo = internet.echo(["203.0.113.20"], 20)
    always, never = Allow(network="203.0.113.7/32", protocol="udp"), ("203.0.113.20", 20)
    for turn in range(60):
        cell.allow(always, Allow(network=f"203.0.113.{30 + turn}/32"))
        assert cell.udp(WEB[0], PORT) == "hello"
        assert cell.udp(*never, seconds=0.05) != "hello"
    assert echo.seen == []
    echo.stop()


def test_flows_are_bounded_and_come_free_again(fabric: NetFabric, cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.7/32"), limits=NetLimits(flows=5, new_flows_s=0))
    lines = [cell.call(lambda: socket.create_connection((WEB[0], 7), timeout=2)) for _ in range(5)]
    assert cell.tcp(WEB[0], PORT) == "Connection refused"
    assert [event.flow.reason for event in fabric.drain() if event.flow.verdict == "refused"] == ["too many flows"]
    for line in lines:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        line.close()
    until(lambda: bool(fabric.sweep()), 8)
    assert cell.tcp(WEB[0], PORT) == "hello"


def test_new_flows_a_second_are_bounded(fabric: NetFabric, cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.7/32", protocol="udp"), limits=NetLimits(new_flows_s=10))
    said = [cell.udp(WEB[0], PORT) for _ in range(20)]
    assert 10 <= said.count("hello") <= 14


def test_bytes_a_second_are_bounded(cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.7/32"), limits=NetLimits(egress_bytes_s=500_000))
    with cell.call(lambda: socket.create_connection((WEB[0], 7), timeout=5)) as line:
        begun, sent = time.monotonic(), 0
        while time.monotonic() - begun < 1.5:
            line.sendall(bytes(10_000))
            sent += len(line.recv(65536))
    assert 100_000 < sent < 1.5 * 500_000 + 400_000


def test_flows_are_recorded_with_bytes_process_and_command(fabric: NetFabric, cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.7/32"))
    assert cell.tcp(WEB[0], PORT) == "hello"
    assert cell.tcp(OTHER[0], PORT) == "Connection refused"
    told = {event.flow.verdict: event for event in fabric.drain()}
    assert {verdict: (e.slot, e.flow.address, e.flow.port, e.flow.comm[:6]) for verdict, e in told.items()} == {
        "allowed": (cell.slot, WEB[0], 7, "python"), "refused": (cell.slot, OTHER[0], 7, "python"),
    }  # fmt: skip
    assert abs(told["allowed"].flow.at - time.time()) < 5 and told["allowed"].flow.pid
    ended: list[object] = []
    until(lambda: ended.extend(fabric.sweep()) or ended, 8)
    assert ended[0].flow.bytes_out > 5 and ended[0].flow.bytes_in > 5  # type: ignore[attr-defined]


def test_a_flow_whose_place_another_takes_is_recorded_with_its_bytes(fabric: NetFabric, cell: Cell) -> None:
    """The same ends, again at once: no sweep saw the first of them."""

    def ask() -> None:
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.bind(("", 40123))
            line.settimeout(5)
            line.connect((WEB[0], PORT))
            line.sendall(b"hello")
            assert line.recv(10) == b"hello"

    cell.allow(Allow(network="203.0.113.7/32"))
    cell.call(ask)
    cell.call(ask)
    begun, over, again = [event.flow for event in fabric.drain()]
    assert (begun.ended, again.ended, over.verdict) == (None, None, "allowed")
    assert abs(over.at - begun.at) < 1e-3 and over.ended is not None and over.ended > over.at
    assert over.bytes_out > 5 and over.bytes_in > 5
