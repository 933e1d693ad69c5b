"""What the relay carries: one TCP stream under a name rule, from a server of the fake internet into a sandbox's namespace."""

import subprocess
import sys
import tempfile
from pathlib import Path

from dsec.model.network import NameRule, Policy
from dsec.testing.gatesite import Site, site_of
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
    """MB a second through the relay, best of three. Makes a fake internet of its own; needs root."""
    size = QUICK_SIZE if quick else SIZE
    with tempfile.TemporaryDirectory(prefix="bench-") as made, site_of(Path(made) / "cache") as site:
        site.internet.add_addresses([ADDRESS])
        site.internet.dns.answer("bench.test", Record("A", ADDRESS))
        site.policy(Policy(names=(NameRule(pattern="bench.test", ports=((80, 80),)),)))
        server = _program(site.internet.world, _SERVER, ADDRESS, str(size))
        try:
            assert server.stdout is not None
            server.stdout.readline()
            return max(_stream(site, size) for _ in range(3))
        finally:
            server.kill()
            server.communicate()


def _stream(site: Site, size: int) -> float:
    client = _program(site.boxes[0], _CLIENT, ADDRESS, str(size))
    out, _ = client.communicate(timeout=300)
    if client.returncode:
        raise RuntimeError("the stream through the relay ended early")
    return float(out) / MB
