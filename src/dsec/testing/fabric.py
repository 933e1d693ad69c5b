"""A fabric on the fake host, and sandboxes on it that are bare namespaces: what is in one has all of root's power there."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from dsec.kernel.clock import SystemClock
from dsec.kernel.network import FabricSettings, NetFabric
from dsec.model.network import Allow, NetLimits
from dsec.testing.internet import Internet
from dsec.testing.netns import Netns

# Seconds. Long, since the machine may be busy: what is refused answers at once.
SOON = 4.0
__all__ = ["Cell", "cells", "checksum", "connect", "datagram", "fabric_in", "until"]

LIMITS = NetLimits()


class Cell(Netns):
    """A namespace with a link: the place of a sandbox, with an attacker who holds every capability in it."""

    def __init__(self, fabric: NetFabric, slot: int) -> None:
        super().__init__(f"cell{slot}")
        self.fabric, self.slot = fabric, slot
        self.v4, self.v6 = fabric.address(slot).v4, fabric.address(slot).v6

    def __enter__(self) -> "Cell":
        super().__enter__()
        self.fabric.link(self.slot, self.fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fabric.unlink(self.slot)
        super().__exit__(kind, value, trace)

    def allow(self, *allows: Allow, limits: NetLimits = LIMITS, group: int = 0) -> None:
        self.fabric.apply(self.slot, allows, limits, group)

    def tcp(self, address: str, port: int, say: bytes = b"hello", seconds: float = SOON) -> str:
        """What came of a connection: its answer, or the name of the error."""
        return self.call(lambda: connect(address, port, say, seconds))

    def udp(self, address: str, port: int, say: bytes = b"hello", seconds: float = SOON) -> str:
        return self.call(lambda: datagram(address, port, say, seconds))

    def ping(self, address: str, seconds: float = SOON) -> str:
        return self.call(lambda: echo(address, seconds))


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def outcome(error: OSError) -> str:
    return "timeout" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)


def connect(address: str, port: int, say: bytes, seconds: float) -> str:
    with socket.socket(family(address), socket.SOCK_STREAM) as link:
        link.settimeout(seconds)
        try:
            link.connect((address, port))
            link.sendall(say)
            return link.recv(65536).decode("latin-1")
        except OSError as error:
            return outcome(error)


def datagram(address: str, port: int, say: bytes, seconds: float) -> str:
    with socket.socket(family(address), socket.SOCK_DGRAM) as link:
        link.settimeout(seconds)
        try:
            link.connect((address, port))
            link.send(say)
            return link.recv(65536).decode("latin-1")
        except OSError as error:
            return outcome(error)


def checksum(data: bytes) -> bytes:
    padded = data + b"\0" * (len(data) % 2)
    total = sum(int.from_bytes(padded[at : at + 2], "big") for at in range(0, len(padded), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")


def echo(address: str, seconds: float) -> str:
    six = ":" in address
    kind = socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP
    with socket.socket(family(address), socket.SOCK_RAW, kind) as link:
        link.settimeout(seconds)
        try:
            link.connect((address, 0))
            body = bytes([128 if six else 8, 0, 0, 0]) + os.getpid().to_bytes(4, "big")[2:] + b"\0\1hello"
            link.send(body if six else body[:2] + checksum(body) + body[4:])
            while True:
                reply = link.recv(2048)
                head = reply if six else reply[20:]
                if head[0] in (129, 0):
                    return "hello"
                if head[0] in (1, 3):
                    return f"prohibited {head[1]}"
        except OSError as error:
            return outcome(error)


@contextmanager
def fabric_in(internet: Internet, state: Path) -> Iterator[NetFabric]:
    """A fabric whose host is the fake one; removed whole at the end."""
    made = NetFabric(state, FabricSettings(), SystemClock(), host=internet.host.fd)
    try:
        made.open()
        yield made
    finally:
        made.close(keep=False)


@contextmanager
def cells(fabric: NetFabric, slots: Sequence[int]) -> Iterator[list[Cell]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Cell(fabric, slot)) for slot in slots]


def until(what: Callable[[], object], seconds: float = 5.0) -> None:
    """Waits for something that the kernel announces to nobody."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
