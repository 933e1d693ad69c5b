"""The network of a sandbox: what judging every packet costs, how fast a policy changes, and whether it is kept."""

import asyncio
import itertools
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.figures import Figure, Report, machine, summary
from bench.net_create import added_by_rules, median_added
from bench.peers.bridge import bridge, why_no_bridge
from bench.relay import relay_mb_s
from bench.rootfs import make_rootfs
from dsec.kernel.network import NetFabric
from dsec.model.network import Allow, NetLimits, Policy, Protocol
from dsec.rules.netpolicy import judge
from dsec.testing.fabric import Cell, fabric_in
from dsec.testing.internet import Internet
from dsec.testing.netns import Netns, entered

__all__ = ["run"]

SERVER = "203.0.113.7"
SINK, PONG = 5001, 5002
CHUNK = 1 << 20
PROBES = 200
EVERY = NetLimits(new_flows_s=0, flows=100_000)


class Servers:
    """A process in the `world`, which has the address SERVER: it reads all that comes to one port, and sends back what comes to another, by TCP."""

    def __init__(self, world: Netns) -> None:
        with world.inside():
            sink, pong = socket.create_server((SERVER, SINK)), socket.create_server((SERVER, PONG))
        self._pid = os.fork()
        if self._pid == 0:
            threading.Thread(target=_serve, args=(pong, _echo), daemon=True).start()
            _serve(sink, _swallow)
        sink.close()
        pong.close()

    def close(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)


def _serve(listener: socket.socket, each: Callable[[socket.socket], None]) -> None:
    while True:
        line, _ = listener.accept()
        threading.Thread(target=each, args=(line,), daemon=True).start()


def _swallow(line: socket.socket) -> None:
    room = bytearray(CHUNK)
    while line.recv_into(room):
        pass
    line.close()


def _echo(line: socket.socket) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := line.recv(64):
        line.sendall(data)
    line.close()


@contextmanager
def unfiltered(fabric: NetFabric, state: Path, slot: int) -> Iterator[Netns]:
    """The same link from the same router, with no program on it."""
    own, mac = fabric.address(slot), "02:d5:ec:00:00:01"
    router = os.open(state / "network/router", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Netns("unfiltered") as place, Netns("spare") as spare:
            # The host's route to the block of slots is there once a link of it is.
            fabric.link(slot + 1, spare.fd)
            inside = Netns.ip
            with entered(router):
                here = Netns("router")
                here.fd = router
                inside(
                    here, f"link add bare address {mac} type veth peer name eth0 address {mac} netns {place.path}",
                    "link set bare arp off up", f"route add {own.v4} dev bare",
                )  # fmt: skip
            place.ip(
                "link set eth0 arp off up", f"addr add {own.v4}/32 dev eth0",
                f"route add default via {fabric.gateway_v4} dev eth0 onlink",
            )  # fmt: skip
            yield place
            fabric.unlink(slot + 1)
            here.loop.close()
    finally:
        os.close(router)


def rate(place: Netns, seconds: float) -> float:
    """Bytes a second of one TCP stream out of `place`."""

    def send() -> float:
        data, sent = bytes(CHUNK), 0
        with socket.create_connection((SERVER, SINK)) as line:
            begun = time.perf_counter()
            while time.perf_counter() - begun < seconds:
                line.sendall(data)
                sent += CHUNK
            return sent / (time.perf_counter() - begun)

    return place.call(send)


def turn_us(place: Netns, count: int) -> float:
    """Microseconds of a one-byte exchange over TCP: the median of `count`."""

    def ask() -> float:
        took = []
        with socket.create_connection((SERVER, PONG)) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(count):
                begun = time.perf_counter()
                line.sendall(b"x")
                line.recv(1)
                took.append((time.perf_counter() - begun) * 1e6)
        return statistics.median(took)

    return place.call(ask)


def probes(internet: Internet, fabric: NetFabric, slot: int) -> tuple[int, list[str]]:
    """How many of PROBES come out as the rules say: random policies against targets in and around their prefixes."""
    dice, right, wrong = random.Random(7), 0, list[str]()
    targets = ["203.0.113.7", "203.0.113.8", "203.0.113.129", "2001:db8:7::7", "2001:db8:7::8", "2001:db8:8::1"]
    ports = [7, 8]
    for port in ports:
        internet.echo(targets, port)
    networks = [
        "203.0.113.0/24",
        "203.0.113.0/25",
        "203.0.113.7/32",
        "2001:db8:7::/64",
        "2001:db8:7::7/128",
        "::/0",
        "0.0.0.0/0",
    ]
    kinds: list[Protocol] = ["tcp", "udp", "icmp", "any"]
    ways: list[Protocol] = ["tcp", "udp", "icmp"]
    matrix = list(itertools.product(targets, ports, ways))
    with Cell(fabric, slot) as cell:
        while right + len(wrong) < PROBES:
            allows = tuple(
                Allow(
                    network=dice.choice(networks),
                    protocol=dice.choice(kinds),
                    low=dice.choice([0, 7, 8]),
                    high=dice.choice([7, 8, 65535]),
                )
                for _ in range(dice.randrange(4))
            )
            allows = tuple(allow for allow in allows if allow.low <= allow.high)
            cell.allow(*allows, limits=EVERY)
            for address, port, way in dice.sample(matrix, min(10, PROBES - right - len(wrong))):
                wanted = judge(Policy(allows=allows), address, port, way) is not None
                if way == "icmp":
                    got = cell.ping(address)
                else:
                    got = cell.tcp(address, port) if way == "tcp" else cell.udp(address, port)
                if (got == "hello") == wanted:
                    right += 1
                else:
                    wrong.append(f"{way} {address} {port}: {got}, wanted {wanted}, of {allows}")
    return right, wrong


def changes_ms(fabric: NetFabric, cell: Cell, count: int) -> list[float]:
    """Milliseconds from asking for another policy of fifty rules until it is in force."""
    took = []
    for number in range(count):
        allows = [Allow(network=f"198.51.{number % 200}.{host}/32", low=443, high=443) for host in range(50)]
        begun = time.perf_counter()
        fabric.apply(cell.slot, allows, EVERY, 0)
        took.append((time.perf_counter() - begun) * 1000)
    return took


def link_ms(fabric: NetFabric, slot: int, count: int) -> tuple[list[float], list[float]]:
    """What a create with a policy does more than one without: with a link made ahead, and with none."""
    ready, bare = list[float](), list[float]()
    for number in range(count):
        for ahead, took in ((True, ready), (False, bare)):
            with Netns("created") as place:
                if ahead:
                    fabric.prepare(slot, place.fd)
                begun = time.perf_counter()
                fabric.link(slot, place.fd)
                fabric.apply(slot, [Allow(network=f"198.51.100.{number % 200}/32", low=443, high=443)], EVERY, 0)
                took.append((time.perf_counter() - begun) * 1000)
                fabric.unlink(slot)
    return ready, bare


def bridged(
    quick: bool, rounds: int, seconds: float, count: int
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Bytes a second and microseconds of a container on docker's bridge, by the peer's name; or why there is none."""
    reason = "left to the full run" if quick else why_no_bridge()
    if reason is not None:
        return {}, {}, {"docker bridge": reason}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        container, world = stack.enter_context(bridge(make_rootfs(folder / "rootfs"), SERVER))
        stack.callback(Servers(world).close)
        rates = [rate(container, seconds) for _ in range(rounds)]
        turns = [turn_us(container, count) for _ in range(rounds)]
    return {"docker bridge": max(rates) / 1e6}, {"docker bridge": statistics.median(turns)}, {}


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, rounds, seconds, count = machine(), (5 if quick else 15), (0.4 if quick else 1.0), (300 if quick else 2000)
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        internet = stack.enter_context(Internet())
        internet.add_addresses([SERVER])
        servers = Servers(internet.world)
        stack.callback(servers.close)
        fabric = stack.enter_context(fabric_in(internet, state))
        cell = stack.enter_context(Cell(fabric, 1))
        cell.allow(Allow(network=f"{SERVER}/32"), limits=EVERY)
        bare = stack.enter_context(unfiltered(fabric, state, 10))
        streams = [(rate(cell, seconds), rate(bare, seconds)) for _ in range(rounds)]
        turns = [(turn_us(cell, count), turn_us(bare, count)) for _ in range(rounds)]
        changed = changes_ms(fabric, cell, 50 if quick else 300)
        ready, made = link_ms(fabric, 30, 20 if quick else 100)
        right, wrong = probes(internet, fabric, 40)
    relayed = relay_mb_s(quick)
    bridge_rate, bridge_turn, missing = bridged(quick, rounds, seconds, count)
    whole = await asyncio.to_thread(added_by_rules, quick)
    ratio = statistics.median(ours / theirs for ours, theirs in streams)
    added = statistics.median(ours - theirs for ours, theirs in turns)
    best = max(theirs for _, theirs in streams)
    figures = [
        Figure(name="throughput_over_unfiltered", value=ratio, unit="ratio", goal=0.9, better="higher"),
        Figure(
            name="throughput", value=max(ours for ours, _ in streams) / 1e6, unit="MB/s", better="higher",
            peer="unfiltered", peer_value=best / 1e6, peers={"unfiltered": best / 1e6, **bridge_rate},
        ),
        Figure(name="relay_mb_s", value=relayed, unit="MB/s", better="higher"),
        Figure(name="added_latency_us", value=added, unit="us", goal=30),
        Figure(
            name="latency_us", value=statistics.median(ours for ours, _ in turns), unit="us", peer="unfiltered",
            peer_value=statistics.median(theirs for _, theirs in turns),
            peers={"unfiltered": statistics.median(theirs for _, theirs in turns), **bridge_turn},
        ),
        Figure(name="create_added_ms", value=median_added(whole, "create"), unit="ms", goal=1.5),
        Figure(name="stop_added_ms", value=median_added(whole, "stop"), unit="ms"),
        Figure(name="link_ms", value=summary(ready)["p50"], unit="ms"),
        Figure(name="link_without_pool_ms", value=summary(made)["p50"], unit="ms"),
        Figure(name="policy_change_ms", value=summary(changed)["p99"], unit="ms", goal=20),
        Figure(name="probes_right", value=right, unit=f"of {PROBES}", goal=PROBES, better="higher"),
    ]  # fmt: skip
    raw = {
        "streams_bytes_s": streams, "turns_us": turns, "policy_change_ms": summary(changed), "link_ahead_ms": summary(ready),
        "link_ms": summary(made), "probes_wrong": wrong,
        "node_ms": {name: summary(samples) for name, samples in whole.items()},
    }  # fmt: skip
    return Report(name="net", machine=facts, figures=figures, raw=raw, quick=quick), missing
