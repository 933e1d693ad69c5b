"""What the relay carries: one TCP stream under a name rule, from a server of the fake internet into a sandbox's namespace."""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from dsec.gate.client import GateProcess, GateSetup
from dsec.gate.settings import GateSettings
from dsec.kernel.clock import SystemClock
from dsec.model.network import Allow, NameRule, NetworkAnswer, Policy
from dsec.testing.fabric import Cell, fabric_in
from dsec.testing.internet import NAMESERVERS, Internet
from dsec.testing.netns import Netns
from dsec.testing.netservices import Record

__all__ = ["relay_mb_s"]

MB = 1_000_000
SIZE, QUICK_SIZE = 4_000 * MB, 500 * MB
ADDRESS = "203.0.113.90"
_SERVER = """
import os, socket, sys
size, blob = int(sys.argv[2]), os.memfd_create("blob")
os.truncate(blob, 1 << 26)
listener = socket.create_server((sys.argv[1], 80))
print("ready", flush=True)
while True:
    sock, _ = listener.accept()
    with sock:
        while b"\\r\\n\\r\\n" not in sock.recv(65536):
            pass
        sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % size)
        left = size
        while left:
            left -= os.sendfile(sock.fileno(), blob, 0, min(left, 1 << 26))
"""
_CLIENT = """
import socket, sys, time
size, room = int(sys.argv[2]), bytearray(1 << 20)
sock = socket.create_connection((sys.argv[1], 80), timeout=60)
sock.sendall(b"GET / HTTP/1.1\\r\\nHost: bench.test\\r\\n\\r\\n")
begin, got = time.perf_counter(), 0
while got < size:
    count = sock.recv_into(room)
    if not count:
        sys.exit("the stream ended early")
    got += count
print(got / (time.perf_counter() - begin))
"""


def _program(place: Netns, text: str, *words: str) -> "subprocess.Popen[str]":
    with place.inside():
        return subprocess.Popen([sys.executable, "-c", text, *words], stdout=subprocess.PIPE, text=True)


def relay_mb_s(quick: bool) -> float:
    """MB a second from a server through the relay to a sandbox's link, judged by the kernel, best of three. Makes a fake internet of its own."""
    size = QUICK_SIZE if quick else SIZE
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        internet = stack.enter_context(Internet())
        fabric = stack.enter_context(fabric_in(internet, folder / "run"))
        cell = stack.enter_context(Cell(fabric, 1))
        cell.allow(Allow(network=f"{ADDRESS}/32", low=80, high=80, via="relay"))
        setup = GateSetup(settings=GateSettings(nameservers=NAMESERVERS[:1]), cache=folder / "cache")
        gate = GateProcess(setup, fabric, SystemClock())
        gate.on_answer = _opened
        internet.host.run(gate.open())
        stack.callback(lambda: internet.host.run(gate.close()))
        policy = Policy(names=(NameRule(pattern="bench.test", ports=((80, 80),)),))
        internet.host.run(gate.set_policy(1, fabric.address(1), policy))
        internet.add_addresses([ADDRESS])
        internet.dns.answer("bench.test", Record("A", ADDRESS))
        server = _program(internet.world, _SERVER, ADDRESS, str(size))
        stack.callback(server.communicate)
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        return max(_stream(cell, size) for _ in range(3))


async def _opened(slot: int, answer: NetworkAnswer) -> None:
    """The address is allowed already."""


def _stream(place: Netns, size: int) -> float:
    client = _program(place, _CLIENT, ADDRESS, str(size))
    out, _ = client.communicate(timeout=300)
    if client.returncode:
        raise RuntimeError("the stream through the relay ended early")
    return float(out) / MB
