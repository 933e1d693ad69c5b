"""A node's end of the network for tests: a router with a gateway, bare sandboxes behind it, and the gate's process on the fake host."""

import asyncio
import contextlib
import http.client
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import dns.message
import dns.query
import dns.rcode

from dsec.gate.client import GateProcess, GateSetup
from dsec.gate.settings import Credential, GateSettings, MirrorService
from dsec.kernel.clock import SystemClock
from dsec.model.network import Address, Flow, NameRule, NetworkAnswer, Policy
from dsec.ports.network import SlotFlow
from dsec.testing.internet import NAMESERVERS, Internet
from dsec.testing.netns import Netns

__all__ = ["BOXES", "GATEWAY", "Site", "rule", "site_of"]

GATEWAY = ("100.96.0.1", "fd96::1")
# The highest is a benchmark's.
MOST_BOXES = 60
BOXES = [Address(slot=n, v4=f"100.96.0.{n + 1}", v6=f"fd96::{n + 1:x}") for n in range(1, MOST_BOXES + 1)]
IPV6_TRANSPARENT = 75
REDIRECT = """
table inet gate {
  chain pre {
    type filter hook prerouting priority mangle
    ip daddr != 100.96.0.0/24 meta l4proto tcp tproxy ip to 100.96.0.1:3129 meta mark set 1 accept
    ip6 daddr != { fd96::/64, fe80::/10 } meta l4proto tcp tproxy ip6 to [fd96::1]:3129 meta mark set 1 accept
  }
}
"""
_T = TypeVar("_T")


def rule(pattern: str, *ports: int, **more: object) -> NameRule:
    return NameRule(pattern=pattern, ports=tuple((port, port) for port in ports or (80, 443)), **more)  # type: ignore[arg-type]


class Router:
    """The part of the fabric that the gate needs, made by hand: sockets within a namespace of its own."""

    gateway_v4, gateway_v6 = GATEWAY

    def __init__(self, place: Netns) -> None:
        self.place = place

    def socket(self, family: int, kind: int, port: int, transparent: bool) -> int:
        v6 = family == socket.AF_INET6
        with self.place.inside():
            made = socket.socket(family, kind)
        if transparent:
            made.setsockopt(
                *((socket.IPPROTO_IPV6, IPV6_TRANSPARENT) if v6 else (socket.IPPROTO_IP, socket.IP_TRANSPARENT)), 1
            )
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((GATEWAY[v6], port))
        if kind == socket.SOCK_STREAM:
            made.listen(512)
        return made.detach()


class Site:
    """Everything together. `flows` and `answers`: what the gate has told so far."""

    def __init__(self, internet: Internet, router: Netns, boxes: list[Netns], setup: GateSetup) -> None:
        self.internet = internet
        self.boxes = boxes
        self.flows: list[SlotFlow] = []
        self.answers: list[tuple[int, NetworkAnswer]] = []
        self.gate = GateProcess(setup, Router(router), SystemClock())  # type: ignore[arg-type]
        self.gate.on_flow = self.flows.append

        async def answer(slot: int, found: NetworkAnswer) -> None:
            self.answers.append((slot, found))

        self.gate.on_answer = answer

    def policy(self, policy: Policy, box: int = 0) -> None:
        self.internet.host.run(self.gate.set_policy(BOXES[box].slot, BOXES[box], policy))

    def names(self, *rules: NameRule, box: int = 0) -> None:
        self.policy(Policy(names=rules), box)

    def query(
        self, name: str, kind: str = "A", *, box: int = 0, tcp: bool = False, v6: bool = False
    ) -> dns.message.Message:
        """One query, as a program in the sandbox sends it."""
        message = dns.message.make_query(name, kind)
        ask = dns.query.tcp if tcp else dns.query.udp
        return self.boxes[box].call(lambda: ask(message, GATEWAY[v6], timeout=5))

    def resolve(self, name: str, kind: str = "A", **more: bool) -> list[str]:
        """Addresses that a query gives; the name of the return code in a list when there is none."""
        answer = self.query(name, kind, **more)
        found = [record.address for rrset in answer.answer for record in rrset]
        return found or [dns.rcode.to_text(answer.rcode())]

    def connect(self, address: str, port: int, box: int = 0) -> socket.socket:
        return self.boxes[box].call(lambda: socket.create_connection((address, port), timeout=5))

    def plain(self, address: str, data: bytes, port: int = 80, box: int = 0) -> bytes:
        """Sends `data`, ends its side, and reads all. Raises ConnectionResetError for a refusal."""
        with self.connect(address, port, box) as sock:
            sock.sendall(data)
            return read_all(sock)

    def get(self, address: str, host: str, path: str = "/", box: int = 0) -> bytes:
        return self.plain(
            address, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), box=box
        )

    def tls(self, address: str, sni: str | None, host: str, port: int = 443, box: int = 0) -> bytes:
        """The body of a request over TLS. Raises OSError for a refusal."""
        context = self.internet.ca.client_context()
        context.check_hostname = sni is not None
        if sni is None:
            context.verify_mode = ssl.CERT_NONE
        with self.connect(address, port, box) as sock, context.wrap_socket(sock, server_hostname=sni) as tls:
            tls.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = http.client.HTTPResponse(tls)
            answer.begin()
            return answer.read()

    def refused(self, box: int = 0) -> list[Flow]:
        return [event.flow for event in self.flows if event.slot == BOXES[box].slot and event.flow.verdict == "refused"]

    def told(self, reason: str, box: int = 0) -> Flow:
        """The newest refusal for that reason, once there is one. Raises TimeoutError."""
        return self.wait_for(lambda: [flow for flow in self.refused(box) if flow.reason == reason])[-1]

    def wait_for(self, true: Callable[[], _T], seconds: float = 5.0) -> _T:
        """What `true` gives once it gives something; for what the gate tells a moment later."""

        async def wait() -> _T:
            async with asyncio.timeout(seconds):
                while not (found := true()):  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.01)
                return found

        return asyncio.run(wait())


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


@contextlib.contextmanager
def site_of(
    cache: Path,
    settings: GateSettings | None = None,
    services: tuple[MirrorService, ...] = (),
    credentials: tuple[Credential, ...] = (),
    internet: Internet | None = None,
    count: int = 2,
) -> Iterator[Site]:
    """A site with `count` sandboxes; a context manager. Needs root."""
    with contextlib.ExitStack() as stack:
        internet = internet or stack.enter_context(Internet())
        router = stack.enter_context(Netns("router"))
        boxes = [stack.enter_context(Netns(f"box{box.slot}")) for box in BOXES[:count]]
        _connect(router, boxes)
        setup = GateSetup(
            settings=settings or GateSettings(nameservers=NAMESERVERS[:1]), cache=cache, services=services, credentials=credentials,
            forbidden=("100.96.0.0/24", "fd96::/64"),
        )  # fmt: skip
        site = Site(internet, router, boxes, setup)
        internet.host.run(site.gate.open())
        stack.callback(lambda: internet.host.run(site.gate.close()))
        yield site


def _connect(router: Netns, boxes: list[Netns]) -> None:
    """A link a sandbox, as the fabric makes them; no bridge, whose own netfilter would undo tproxy."""
    router.ip(
        "rule add fwmark 1 lookup 100",
        "route add local default dev lo table 100",
        "route add local ::/0 dev lo table 100",
    )
    for address, box in zip(BOXES, boxes, strict=False):
        link = f"b{address.slot}"
        router.ip(
            f"link add {link} type veth peer name eth0 netns {box.path}", f"link set {link} up",
            f"addr add {GATEWAY[0]}/32 dev {link}", f"addr add {GATEWAY[1]}/128 dev {link} nodad",
            f"route add {address.v4} dev {link}", f"route add {address.v6} dev {link}",
        )  # fmt: skip
        box.ip(
            f"addr add {address.v4}/32 dev eth0", f"addr add {address.v6}/128 dev eth0 nodad", "link set eth0 up",
            f"route add {GATEWAY[0]} dev eth0", f"route add {GATEWAY[1]} dev eth0",
            f"route add default via {GATEWAY[0]}", f"route add default via {GATEWAY[1]}",
        )  # fmt: skip
    with router.inside():
        subprocess.run(["ip", "-6", "rule", "add", "fwmark", "1", "lookup", "100"], check=True, timeout=10)
        subprocess.run(["nft", "-f", "-"], input=REDIRECT, text=True, check=True, timeout=10)
