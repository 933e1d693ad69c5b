"""Links over their lives: the server killed and followed by another, slots used again and again, and nothing left at the end."""

import errno
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dsec.kernel import netmaps
from dsec.kernel.clock import SystemClock
from dsec.kernel.conntrack import forget_sources
from dsec.kernel.errors import KernelError
from dsec.kernel.network import FabricSettings, NetFabric
from dsec.model.network import Allow, NetLimits
from dsec.testing.fabric import Cell, cells, fabric_in, until
from dsec.testing.internet import HOST, Internet
from dsec.testing.netns import Netns

pytestmark = pytest.mark.root

OPEN, BARRED, FLOWING = "203.0.113.7", "203.0.113.8", "203.0.113.61"
SERVER = """
import sys, time
from pathlib import Path
from dsec.kernel.clock import SystemClock
from dsec.kernel.network import FabricSettings, NetFabric
from dsec.model.network import Allow, NetLimits
fabric = NetFabric(Path(sys.argv[1]), FabricSettings(), SystemClock(), host=int(sys.argv[2]))
fabric.open()
for slot, fd in ((5, int(sys.argv[3])), (6, int(sys.argv[4]))):
    fabric.link(slot, fd)
    fabric.apply(slot, [Allow(network="203.0.113.7/32"), Allow(network="2001:db8::/32", protocol="udp", low=5, high=9)], NetLimits(), 0)
fabric.permit(5, [Allow(network="203.0.113.9/32", low=80, high=80)], 3600)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet() as made:
        made.echo([OPEN, BARRED], 7)
        yield made


def counts(fabric: NetFabric) -> dict[str, int]:
    return {
        name: len(fabric._maps[name].entries()) for name in ("boxes", "meters", "swept", "groups", "rules", "flows")
    }


def test_sizes_of_shared_records_are_those_of_the_programs(internet: Internet, tmp_path: Path) -> None:
    with fabric_in(internet, tmp_path) as fabric:
        assert {name: made.sizes() for name, made in fabric._maps.items()} == netmaps.SIZES


def test_a_killed_server_goes_on_enforcing_and_the_next_takes_over(internet: Internet, tmp_path: Path) -> None:
    with ExitStack() as stack:
        live, dead = (stack.enter_context(Netns(name)) for name in ("live", "dead"))
        fds = (internet.host.fd, live.fd, dead.fd)
        argv = [sys.executable, "-c", SERVER, str(tmp_path), *map(str, fds)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=fds) as server:
            try:
                assert server.stdout is not None
                assert select.select([server.stdout], [], [], 60)[0]
                assert server.stdout.readline() == b"ready\n"
                line = live.call(lambda: socket.create_connection((OPEN, 7), timeout=5))
            finally:
                server.send_signal(signal.SIGKILL)
        next_one = NetFabric(tmp_path, FabricSettings(), SystemClock(), host=internet.host.fd)
        probe = Cell(next_one, 5)
        probe.fd = live.fd
        stack.callback(lambda: next_one.close(keep=False))
        with line:
            line.sendall(b"still here")
            assert line.recv(100) == b"still here"
        assert (probe.tcp(OPEN, 7), probe.tcp(BARRED, 7)) == ("hello", "Connection refused")
        dead.ip("link del eth0")
        next_one.open()
        assert (next_one.adopt(5), next_one.adopt(6), next_one.linked()) == (True, False, {5})
        assert set(next_one.allowed(5)) == {
            Allow(network="203.0.113.7/32"), Allow(network="2001:db8::/32", protocol="udp", low=5, high=9),
            Allow(network="203.0.113.9/32", low=80, high=80),
        }  # fmt: skip
        assert (probe.tcp(OPEN, 7), probe.tcp(BARRED, 7)) == ("hello", "Connection refused")
        next_one.apply(5, [Allow(network=f"{BARRED}/32")], NetLimits(), 0)
        assert (probe.tcp(OPEN, 7), probe.tcp(BARRED, 7)) == ("Connection refused", "hello")
        assert {event.slot for event in next_one.drain()} >= {5}
        next_one.unlink(5)
        next_one.sweep()
        assert set(counts(next_one).values()) == {0}


def test_a_server_that_died_after_cutting_leaves_nothing_for_the_next(internet: Internet, tmp_path: Path) -> None:
    """The namespace lives on, so nothing but the next server removes the link."""
    with fabric_in(internet, tmp_path) as fabric, cells(fabric, [5, 6]) as (cut, kept):
        for cell in (cut, kept):
            cell.allow(Allow(network=f"{OPEN}/32"), group=3)
        fabric.cut(5)
        assert (cut.tcp(OPEN, 7, seconds=0.3), cut.tcp(kept.v4, 7, seconds=0.3)) == ("timeout", "timeout")
        assert fabric._index(5) != 0
        fabric.close(keep=True)
        fabric.open()
        assert (fabric._index(5), fabric.linked(), fabric.adopt(6)) == (0, frozenset({6}), True)
        assert {name: count for name, count in counts(fabric).items() if name != "flows"} == {
            "boxes": 1, "meters": 1, "swept": 1, "groups": 1, "rules": 1,
        }  # fmt: skip
        assert kept.tcp(OPEN, 7) == "hello"


@contextmanager
def held(internet: Internet) -> Iterator[None]:
    """A server at FLOWING, which forgets at the end what nobody told it of."""
    echo = internet.echo([FLOWING], 7)
    try:
        yield
    finally:
        echo.stop()


class Refusing:
    """One of the kernel's maps that refuses what is named in `ways`."""

    def __init__(self, real: object, *ways: str) -> None:
        self._real, self._ways = real, ways

    def __getattr__(self, name: str) -> object:
        if name in self._ways:
            return self._refuse
        return getattr(self._real, name)

    def _refuse(self, *_: object) -> None:
        raise OSError(errno.ENOMEM, "map", "refused")


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("rules", ("put",)),
        ("boxes", ("put",)),
        ("boxes", ("put", "remove")),
        ("groups", ("put",)),
        ("groups", ("put", "remove")),
    ],
)
def test_a_switch_that_the_kernel_refuses_leaves_nothing_reached(
    internet: Internet, tmp_path: Path, name: str, ways: tuple[str, ...]
) -> None:
    with fabric_in(internet, tmp_path) as fabric, cells(fabric, [5, 6]) as (cell, mate):
        for each in (cell, mate):
            each.allow(Allow(network=f"{OPEN}/32"), Allow(network=f"{FLOWING}/32"), group=3)
        with held(internet), cell.call(lambda: socket.create_connection((FLOWING, 7), timeout=5)) as line:
            real = fabric._maps[name]
            fabric._maps[name] = Refusing(real, *ways)  # type: ignore[assignment]
            with pytest.raises(KernelError):
                fabric.apply(5, [Allow(network=f"{BARRED}/32")], NetLimits(), 4)
            fabric._maps[name] = real
            line.settimeout(0.5)
            with pytest.raises(OSError):
                line.sendall(b"hello")
                assert line.recv(10) == b""
                raise ConnectionResetError
        for address in (OPEN, BARRED, mate.v4):
            assert cell.tcp(address, 7, seconds=0.5) != "hello"
        assert mate.tcp(OPEN, 7) == "hello"
        if ways == ("put",):
            fabric.apply(5, [Allow(network=f"{BARRED}/32")], NetLimits(), 0)
            assert (cell.tcp(BARRED, 7), cell.tcp(OPEN, 7)) == ("hello", "Connection refused")


def test_a_server_that_keeps_leaves_links_in_force(internet: Internet, tmp_path: Path) -> None:
    with fabric_in(internet, tmp_path) as fabric, cells(fabric, [5]) as (cell,):
        cell.allow(Allow(network=f"{OPEN}/32"))
        fabric.close(keep=True)
        assert (cell.tcp(OPEN, 7), cell.tcp(BARRED, 7)) == ("hello", "Connection refused")
        fabric.open()
        assert fabric.adopt(5)


def test_opening_and_closing_leave_the_host_as_it_was(internet: Internet, tmp_path: Path) -> None:
    def seen() -> list[str]:
        shown = []
        with internet.host.inside():
            for words in (["nft", "list", "ruleset"], ["ip", "-o", "link"], ["ip", "route"], ["ip", "-6", "route"]):
                shown.append(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        paths = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/eth0/accept_ra")
        return shown + [internet.host.call(lambda p=path: Path("/proc/sys/net", p).read_text()) for path in paths]

    before = seen()
    with fabric_in(internet, tmp_path) as fabric, cells(fabric, [1]):
        assert seen() != before
    assert seen() == before
    assert not any(path.is_mount() for path in tmp_path.rglob("*"))


def test_packets_are_as_large_as_the_hosts_way_out_takes(internet: Internet, tmp_path: Path) -> None:
    def size(place: Netns) -> str:
        with place.inside():
            shown = subprocess.run(["ip", "-o", "link", "show", "eth0"], capture_output=True, text=True, check=True)
        return shown.stdout.partition(" mtu ")[2].split()[0]

    assert size(internet.host) == "1500"
    internet.host.ip("link set eth0 mtu 1400")
    try:
        with fabric_in(internet, tmp_path) as fabric, cells(fabric, [1]) as (cell,):
            assert size(cell) == "1400"
            cell.allow(Allow(network=f"{OPEN}/32"))
            assert cell.tcp(OPEN, 7, b"x" * 5000).startswith("xxx")
    finally:
        internet.host.ip("link set eth0 mtu 1500")


def test_two_nodes_share_a_host(internet: Internet, tmp_path: Path) -> None:
    """In either order of leaving: forwarding ends with the last."""
    with fabric_in(internet, tmp_path / "b") as two, fabric_in(internet, tmp_path / "a") as one:
        with cells(one, [3]) as (a,), cells(two, [300]) as (b,):
            a.allow(Allow(network="0.0.0.0/0"))
            b.allow(Allow(network=f"{OPEN}/32"))
            assert (a.tcp(OPEN, 7), b.tcp(OPEN, 7)) == ("hello", "hello")
            assert (a.tcp(b.v4, 7), b.tcp(a.v4, 7)) == ("Connection refused", "Connection refused")
        two.close(keep=False)
        with cells(one, [4]) as (c,):
            c.allow(Allow(network=f"{OPEN}/32"))
            assert c.tcp(OPEN, 7) == "hello"


@pytest.mark.parametrize("address", [FLOWING, "2001:db8:7::61"])
def test_the_host_forgets_the_connections_of_a_tenant_that_is_gone(
    internet: Internet, tmp_path: Path, address: str
) -> None:
    """The next one has the same address, uses the same port, and is answered."""
    echo = internet.echo([address], 9)

    def ask() -> socket.socket:
        line = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        line.settimeout(10)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(("", 40124))
        line.connect((address, 9))
        line.sendall(b"hello")
        assert line.recv(10) == b"hello"
        return line

    try:
        with fabric_in(internet, tmp_path) as fabric:
            both = [fabric.address(9).v4, fabric.address(9).v6]
            for _ in range(2):
                with cells(fabric, [9, 10]) as (cell, other):
                    for each in (cell, other):
                        each.allow(Allow(network=f"{address}/{128 if ':' in address else 32}"))
                    cell.call(ask).close()
                    other.call(ask).close()
                    fabric.unlink(9)
                    assert forget_sources(internet.host.fd, both) == 0
                    assert forget_sources(internet.host.fd, [other.v4, other.v6]) == 1
    finally:
        echo.stop()


def spout(place: Netns, address: str, port: int) -> socket.socket:
    """A server that accepts, for the test to pour from."""
    return place.call(lambda: socket.create_server((address, port)))


def overheard(cell: Netns) -> list[bytes]:
    """All that comes in by the link, without a packet sent."""

    def listen() -> list[bytes]:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as link:
            link.bind(("eth0", 3))
            link.settimeout(0.02)
            found = []
            try:
                while True:
                    data, end = link.recvfrom(2048)
                    if end[2] != socket.PACKET_OUTGOING:
                        found.append(data)
            except TimeoutError:
                return found

    return cell.call(listen)


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_slots_next_tenant_inherits_nothing(internet: Internet, tmp_path: Path, times: int) -> None:
    """Each tenant is cut off in the middle of a download that goes on; the next one listens to all that reaches him."""
    internet.add_addresses(["203.0.113.50"])
    with spout(internet.world, "203.0.113.50", 50) as server, fabric_in(internet, tmp_path) as fabric:
        pouring: list[socket.socket] = []
        for turn in range(times):
            with Netns("tenant") as tenant:
                fabric.link(9, tenant.fd)
                if turn % 10 == 0:
                    assert fabric.allowed(9) == ()
                assert overheard(tenant) == []
                fabric.apply(9, [Allow(network="203.0.113.50/32")], NetLimits(), 0)
                line = tenant.call(lambda: socket.create_connection(("203.0.113.50", 50), timeout=30))
                far, end = server.accept()
                assert end[0] == HOST[0]
                far.setblocking(False)
                far.send(bytes(1 << 20))
                assert line.recv(1000)
                fabric.unlink(9)
                line.close()
            pouring.append(far)
            for old in pouring[:-2]:
                old.close()
            del pouring[:-2]
        for old in pouring:
            old.close()
        fabric.sweep()
        assert set(counts(fabric).values()) == {0}
        until(lambda: fabric.linked() == frozenset())
