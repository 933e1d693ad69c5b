"""An attacker with every capability of the namespace at the end of the link: packets of his own making, addresses, routes, devices."""

import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel.network import NetFabric
from dsec.model.network import Allow, NetLimits
from dsec.rules.netpolicy import FORBIDDEN
from dsec.testing.fabric import Cell, cells, checksum, fabric_in, until
from dsec.testing.internet import Internet
from dsec.testing.netservices import Echo

pytestmark = pytest.mark.root

TARGET = ("203.0.113.7", "2001:db8:7::7")
BARRED = ("203.0.113.8", "2001:db8:7::8")
PORT = 7
OWN_FLOWS, SHARED_FLOWS = 64, 1 << 17
ETH_IP, ETH_IPV6, ETH_ARP, ETH_VLAN, ETH_LLC = 0x0800, 0x86DD, 0x0806, 0x8100, 0x88CC
MAC = bytes.fromhex("02d5ec000001")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


@pytest.fixture(scope="module")
def fabric(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetFabric]:
    with fabric_in(internet, tmp_path_factory.mktemp("fabric")) as made:
        yield made


@pytest.fixture(scope="module")
def echo(internet: Internet) -> Echo:
    return internet.echo([*TARGET, *BARRED], PORT)


@pytest.fixture
def cell(fabric: NetFabric, echo: Echo) -> Iterator[Cell]:
    fabric.drain()
    echo.forget()
    with cells(fabric, [11]) as (made,):
        made.allow(*(Allow(network=f"{end}/{128 if ':' in end else 32}", protocol="udp") for end in TARGET))
        yield made


def udp(payload: bytes, port: int = PORT) -> bytes:
    return struct.pack("!HHHH", 40000, port, 8 + len(payload), 0) + payload


def v4(
    source: str, to: str, body: bytes, *, flags: int = 0, protocol: int = 17, options: bytes = b"", more: int = 0
) -> bytes:
    size = 20 + len(options) + len(body) + more
    head = struct.pack("!BBHHHBBH", 0x45 + len(options) // 4, 0, size, 1, flags, 64, protocol, 0)
    head += socket.inet_aton(source) + socket.inet_aton(to) + options
    return head[:10] + checksum(head) + head[12:] + body


def v6(source: str, to: str, body: bytes, following: int = 17) -> bytes:
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, to)
    if following == 17:
        pseudo = ends + struct.pack("!IxxxB", len(body), 17) + body
        body = body[:6] + (checksum(pseudo)) + body[8:]
    return struct.pack("!IHBB", 6 << 28, len(body), following, 64) + ends + body


def throw(cell: Cell, kind: int, *packets: bytes) -> None:
    """Onto the link as they are."""

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as link:
            link.bind(("eth0", 0))
            for packet in packets:
                link.send(MAC + MAC + struct.pack("!H", kind) + packet)

    cell.call(send)


def arrived(echo: Echo, cell: Cell) -> set[bytes]:
    """What the far end saw, when a last honest packet has come after all others."""
    assert cell.udp(TARGET[0], PORT, b"last") == "last"
    return {data for _, _, data in echo.seen} - {b"last"}


def reasons(fabric: NetFabric) -> set[str]:
    return {event.flow.reason for event in fabric.drain() if event.flow.verdict == "refused"}


def test_an_honest_packet_of_his_own_making_passes(fabric: NetFabric, echo: Echo, cell: Cell) -> None:
    """So that the refusals below are none of this test's own mistakes."""
    throw(cell, ETH_IP, v4(cell.v4, TARGET[0], udp(b"four")))
    throw(cell, ETH_IPV6, v6(cell.v6, TARGET[1], udp(b"six")))
    until(lambda: {data for _, _, data in echo.seen} == {b"four", b"six"})


def test_false_source_addresses_do_not_leave(fabric: NetFabric, echo: Echo, cell: Cell) -> None:
    sibling = fabric.address(12)
    throw(
        cell,
        ETH_IP,
        *(v4(source, TARGET[0], udp(b"x")) for source in (sibling.v4, "192.0.2.2", "8.8.8.8", "127.0.0.1")),
    )
    throw(cell, ETH_IPV6, *(v6(source, TARGET[1], udp(b"x")) for source in (sibling.v6, "2001:db8:2::2", "::1")))
    assert arrived(echo, cell) == set()
    assert reasons(fabric) == {"false source address"}


def test_fragments_do_not_leave(fabric: NetFabric, echo: Echo, cell: Cell) -> None:
    whole = udp(b"fragmented, in two parts")
    throw(cell, ETH_IP, v4(cell.v4, TARGET[0], whole[:16], flags=0x2000), v4(cell.v4, TARGET[0], whole[16:], flags=2))
    piece = struct.pack("!BBHI", 17, 0, 1, 7) + whole[:16]
    throw(
        cell, ETH_IPV6, v6(cell.v6, TARGET[1], piece, 44), v6(cell.v6, TARGET[1], piece[:2] + b"\0\x10" + piece[4:], 44)
    )
    assert arrived(echo, cell) == set()
    assert reasons(fabric) == {"fragment"}


@pytest.mark.parametrize(
    "header", [0, 43, 60, 51, 135], ids=["hop-by-hop", "routing", "destination", "authentication", "mobility"]
)
def test_extension_headers_do_not_leave(fabric: NetFabric, echo: Echo, cell: Cell, header: int) -> None:
    throw(cell, ETH_IPV6, v6(cell.v6, TARGET[1], bytes([17, 0, 1, 4, 0, 0, 0, 0]) + udp(b"hidden"), header))
    assert arrived(echo, cell) == set()
    assert reasons(fabric) == {"protocol"}


@pytest.mark.parametrize("protocol", [2, 4, 33, 41, 47, 50, 132, 255])
def test_other_protocols_do_not_leave(fabric: NetFabric, echo: Echo, cell: Cell, protocol: int) -> None:
    inner = v4(cell.v4, BARRED[0], udp(b"tunnelled"))
    throw(cell, ETH_IP, v4(cell.v4, TARGET[0], inner, protocol=protocol))
    assert arrived(echo, cell) == set()
    assert reasons(fabric) == {"protocol"}


def test_options_and_false_lengths_do_not_leave(fabric: NetFabric, echo: Echo, cell: Cell) -> None:
    # Loose source routing by way of the target to the barred one.
    route = b"\x83\x07\x04" + socket.inet_aton(BARRED[0]) + b"\0"
    throw(cell, ETH_IP, v4(cell.v4, TARGET[0], udp(b"x"), options=route), v4(cell.v4, TARGET[0], udp(b"x"), more=100))
    throw(cell, ETH_IP, b"\x45", v4(cell.v4, TARGET[0], b""), b"\x60" + v4(cell.v4, TARGET[0], udp(b"x"))[1:])
    throw(cell, ETH_IPV6, v6(cell.v6, TARGET[1], b""), b"\x45" + v6(cell.v6, TARGET[1], udp(b"x"))[1:])
    assert arrived(echo, cell) == set()
    assert reasons(fabric) <= {"malformed", "false source address"}


def test_nothing_but_ip_leaves_the_link(fabric: NetFabric, internet: Internet, echo: Echo, cell: Cell) -> None:
    arp = (
        struct.pack("!HHBBH", 1, ETH_IP, 6, 4, 1)
        + MAC
        + socket.inet_aton(cell.v4)
        + bytes(6)
        + socket.inet_aton(TARGET[0])
    )
    inside = v4(cell.v4, BARRED[0], udp(b"tagged"))
    for kind, frame in (
        (ETH_ARP, arp),
        (ETH_VLAN, b"\0\1\x08\0" + inside),
        (ETH_LLC, b"x" * 60),
        (0x88F7, inside),
        (0x0600, inside),
    ):
        throw(cell, kind, frame)
    assert arrived(echo, cell) == set()


def test_addresses_routes_and_devices_of_his_own_are_of_no_use(fabric: NetFabric, echo: Echo, cell: Cell) -> None:
    sibling = fabric.address(12)
    cell.ip(
        f"addr add {sibling.v4}/32 dev eth0", f"addr add {sibling.v6}/128 dev eth0 nodad", "addr add 10.0.0.1/24 dev eth0",
        "route add 192.0.2.0/24 dev eth0", "link add v0 type veth peer name v1", "link set v0 up", "link set eth0 promisc on",
        "neigh replace 100.96.0.9 lladdr 02:00:00:00:00:09 dev eth0",
    )  # fmt: skip

    def from_other() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.settimeout(0.2)
            line.bind((sibling.v4, 0))
            line.sendto(b"x", (TARGET[0], PORT))
            try:
                return line.recv(100).decode()
            except OSError as error:
                return type(error).__name__

    assert cell.call(from_other) == "TimeoutError"
    assert cell.udp("192.0.2.2", PORT) != "hello"
    assert arrived(echo, cell) == set()


def test_the_link_cut_and_made_anew_from_inside_leads_nowhere(fabric: NetFabric, echo: Echo, cell: Cell) -> None:
    cell.ip(
        "link set eth0 down", "link set eth0 address 02:00:00:00:00:77", "link set eth0 mtu 9000", "link set eth0 up"
    )
    assert cell.tcp(BARRED[0], PORT, seconds=0.3) != "hello"
    cell.ip(
        "link del eth0",
        "link add eth0 type veth peer name elsewhere",
        "link set eth0 up",
        f"addr add {cell.v4}/32 dev eth0",
    )
    assert cell.udp(TARGET[0], PORT, seconds=0.2) != "hello"
    fabric.unlink(cell.slot)
    fabric.unlink(cell.slot)


def test_nothing_comes_in_unasked(fabric: NetFabric, internet: Internet, cell: Cell) -> None:
    got: list[bytes] = []

    def listen() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((cell.v4, 5000))
        made.settimeout(0.3)
        return made

    def shout() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.sendto(b"hello", (cell.v4, 5000))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as line:
            line.settimeout(0.2)
            assert line.connect_ex((cell.v4, 5000)) != 0

    with cell.call(listen) as line:
        internet.host.call(shout)
        with pytest.raises(TimeoutError):
            got.append(line.recv(100))
    assert got == []


def test_only_errors_about_his_own_flows_come_in(fabric: NetFabric, internet: Internet, cell: Cell) -> None:
    """A port that nobody listens at says so; a smaller path too."""
    cell.allow(Allow(network="203.0.113.0/24", protocol="any"))
    assert cell.udp(TARGET[0], 9999) == "Connection refused"
    internet.add_addresses(["203.0.113.99"])
    internet.world.ip("route add 203.0.113.98/32 via 192.0.2.3 mtu lock 1300")

    def path() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, do
            line.connect(("203.0.113.98", 9))
            for _ in range(20):
                try:
                    line.send(bytes(1400))
                except OSError:
                    break
                until(lambda: True)
            return line.getsockopt(socket.IPPROTO_IP, 14)  # IP_MTU

    until(lambda: cell.call(path) == 1300)


def test_an_error_that_quotes_eight_bytes_comes_in_for_a_known_flow_alone(
    fabric: NetFabric, internet: Internet, cell: Cell
) -> None:
    cell.allow(Allow(network="203.0.113.0/24"))
    with (
        cell.call(lambda: socket.create_connection((TARGET[0], PORT), timeout=5)) as line,
        cell.call(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_IP))) as ear,
    ):
        ear.bind(("eth0", ETH_IP))
        ear.settimeout(2)
        port = line.getsockname()[1]

        def complain(about: int) -> None:
            quoted = v4(cell.v4, TARGET[0], struct.pack("!HHI", about, PORT, 0), protocol=6, more=12)
            body = struct.pack("!BBHHH", 3, 4, 0, 0, 1200) + quoted
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as link:
                link.sendto(body[:2] + checksum(body) + body[4:], (cell.v4, 0))

        internet.host.call(lambda: complain(port + 1))
        internet.host.call(lambda: complain(port))
        frame = ear.recv(2048)
        assert struct.unpack("!H", frame[14 + 20 + 8 + 20 :][:2]) == (port,)


def test_the_relay_is_not_to_be_called(fabric: NetFabric, cell: Cell) -> None:
    """Only what the hook sends there arrives, under the address that it had."""
    with socket.socket(fileno=fabric.socket(socket.AF_INET, socket.SOCK_STREAM, 3129, True)) as relay:
        cell.allow(Allow(network="0.0.0.0/0"), Allow(network=f"{BARRED[0]}/32", low=443, high=443, via="relay"))
        assert cell.tcp(fabric.gateway_v4, 3129) == "Connection refused"
        cell.allow(Allow(network=f"{BARRED[0]}/32", low=443, high=443, via="relay"))
        with cell.call(lambda: socket.create_connection((BARRED[0], 443), timeout=5)) as line:
            relay.settimeout(5)
            served, end = relay.accept()
            with served:
                assert (served.getsockname(), end) == ((BARRED[0], 443), line.getsockname())
                served.sendall(b"from the relay")
                assert line.recv(100) == b"from the relay"
        assert cell.udp(BARRED[0], 443) != "hello"
        assert cell.tcp(BARRED[0], 80) == "Connection refused"


def test_the_programs_and_the_rules_forbid_the_same(fabric: NetFabric, cell: Cell) -> None:
    """Of each forbidden prefix the first and the last address, and their neighbours outside."""
    cell.allow(*(Allow(network=prefix, protocol="any") for prefix in ("0.0.0.0/0", "::/0")))
    forbidden = [ipaddress.ip_network(text) for text in FORBIDDEN]
    inside, outside = set(), set()
    for network in forbidden:
        first, last = int(network.network_address), int(network.broadcast_address)
        kind = type(network.network_address)
        inside |= {kind(first), kind(last)}
        near = {kind(n) for n in (first - 1, last + 1) if 0 <= n < 1 << network.max_prefixlen}
        outside |= {a for a in near if not any(a in other for other in (*forbidden, fabric._v4, fabric._v6))}
    assert {str(a) for a in outside} >= {"1.0.0.0", "168.63.129.17", "0:0:0:1::", "2003::", "fd20:ce::255"}
    for address in inside | outside:
        if isinstance(address, ipaddress.IPv4Address):
            throw(cell, ETH_IP, v4(cell.v4, str(address), udp(b"x")))
        else:
            throw(cell, ETH_IPV6, v6(cell.v6, str(address), udp(b"x")))
    begun: set[str] = set()

    def told() -> bool:
        begun.update(seen.flow.address for seen in fabric.drain() if seen.flow.verdict == "allowed")
        return begun >= {str(a) for a in outside}

    until(told)
    assert begun.isdisjoint(str(a) for a in inside)


def test_one_sandbox_cannot_take_the_flows_of_all(fabric: NetFabric, internet: Internet) -> None:
    """Where what all share is as good as used up, each still has its own."""
    fabric.sweep()
    shared = fabric._maps["shared"]
    before = shared.get(bytes(4))
    assert before is not None
    released = int.from_bytes(shared.get(b"\1\0\0\0") or b"", "little")
    with cells(fabric, [21, 22]) as (greedy, modest):
        try:
            shared.put(bytes(4), (released + SHARED_FLOWS - 5).to_bytes(8, "little"))
            for each, most in ((greedy, OWN_FLOWS + 5), (modest, OWN_FLOWS)):
                each.allow(Allow(network="203.0.113.0/24", protocol="udp"), limits=NetLimits(new_flows_s=10_000))
                for port in range(1, 121):
                    throw(each, ETH_IP, v4(each.v4, TARGET[0], struct.pack("!HHHH", port, PORT, 9, 0) + b"x"))
                until(lambda slot=each.slot, most=most: flows_of(fabric, slot) == most)  # type: ignore[misc]
        finally:
            shared.put(bytes(4), (released + 5).to_bytes(8, "little"))
    fabric.sweep()
    assert shared.get(bytes(4)) == shared.get(b"\1\0\0\0"), "what has ended is given back"


def test_flows_that_a_dying_server_removed_are_counted_anew(fabric: NetFabric, cell: Cell) -> None:
    cell.allow(Allow(network="203.0.113.0/24", protocol="udp"), limits=NetLimits(flows=20, new_flows_s=10_000))

    def fill(first: int) -> None:
        packets = [struct.pack("!HHHH", port, PORT, 9, 0) + b"x" for port in range(first, first + 40)]
        throw(cell, ETH_IP, *(v4(cell.v4, TARGET[0], packet) for packet in packets))

    fill(1)
    until(lambda: flows_of(fabric, cell.slot) == 20)
    mine = fabric._linked[cell.slot].ifindex.to_bytes(4, "little")
    for key in [key for key, _ in fabric._maps["flows"].entries() if key[:4] == mine][:7]:
        fabric._maps["flows"].remove(key)
    fill(100)
    assert flows_of(fabric, cell.slot) == 13, "nobody said that there is room"
    fabric._ledger.recount()
    fill(200)
    until(lambda: flows_of(fabric, cell.slot) == 20)


def flows_of(fabric: NetFabric, slot: int) -> int:
    ifindex = fabric._linked[slot].ifindex
    return sum(key[:4] == ifindex.to_bytes(4, "little") for key, _ in fabric._maps["flows"].entries())


def test_the_host_does_not_remember_a_silent_connection_for_days(
    fabric: NetFabric, internet: Internet, cell: Cell
) -> None:
    cell.allow(*(Allow(network=f"{end}/{128 if ':' in end else 32}") for end in TARGET))
    left: dict[str, int] = {}
    for end in TARGET:
        with cell.call(lambda end=end: socket.create_connection((end, PORT), timeout=5)):  # type: ignore[misc]
            lines = internet.host.call(lambda: Path("/proc/thread-self/net/nf_conntrack").read_text()).splitlines()
            kept = [
                line.split()
                for line in lines
                if f"src={cell.v6 if ':' in end else cell.v4}" in line or "ESTABLISHED" in line
            ]
            left |= {words[0]: int(words[4]) for words in kept if "ESTABLISHED" in words}
    assert left.keys() == {"ipv4", "ipv6"} and max(left.values()) <= 3700, left
