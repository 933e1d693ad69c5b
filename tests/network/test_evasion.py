"""What root in a sandbox tries to get out: nothing of it arrives, and the node goes on."""

import json

import pytest

from dsec import NetLimits, NetworkRule
from dsec.sync import Sandbox
from dsec.testing.internet import HOST
from network.place import PLAIN, PYTHON, SHARED, Place, probe

pytestmark = [pytest.mark.root, pytest.mark.slow]

OPEN4, OPEN6 = PLAIN
ECHO = {"echo": NetworkRule(cidrs=(f"{OPEN4}/32", f"{OPEN6}/128"), ports=(7,)), "a": NetworkRule(hosts=("a.test",))}

SCRIPT = r"""
import ctypes, json, os, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def tried(name):
    def run(work):
        try:
            found[name] = "ok " + str(work())
        except OSError as error:
            found[name] = os.strerror(error.errno) if error.errno else type(error).__name__
    return run
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "syscall")
    return result
@tried("packet socket")
def _(): return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300).fileno()
@tried("bpf")
def _(): return call(321, 0, ctypes.create_string_buffer(128), 128)
@tried("user namespace")
def _(): return call(272, 0x10000000)
@tried("net namespace")
def _(): return call(272, 0x40000000)
@tried("xdp socket")
def _(): return socket.socket(44, socket.SOCK_RAW, 0).fileno()
@tried("vsock")
def _(): return socket.socket(40, socket.SOCK_STREAM, 0).fileno()
def netlink(kind, body, flags=0x605):
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    link.settimeout(5)
    link.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    reply = link.recv(65536)
    code = struct.unpack("=i", reply[16:20])[0] if struct.unpack("=H", reply[4:6])[0] == 2 else 0
    if code:
        raise OSError(-code, "netlink")
    return "done"
@tried("set link down")
def _(): return netlink(16, struct.pack("=BxHiII", 0, 0, 2, 0, 1))
@tried("add address")
def _(): return netlink(20, struct.pack("=BBBBI", 2, 24, 0, 0, 2) + struct.pack("=HH4s", 8, 2, socket.inet_aton("192.0.2.2")))
@tried("add route")
def _(): return netlink(24, struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("=HH4s", 8, 5, socket.inet_aton("100.96.0.9")))
@tried("add link")
def _(): return netlink(16, struct.pack("=BxHiII", 0, 0, 0, 1, 1) + struct.pack("=HH", 16, 0x8012) + struct.pack("=HH6sxx", 10, 1, b"dummy\0"))
def sent(kind, address, protocol, data, *options):
    with socket.socket(kind, socket.SOCK_RAW, protocol) as link:
        for option in options:
            link.setsockopt(*option)
        return link.sendto(data, (address, 0))
V4, OUT4, OUT6, HOST4, HOST6, OTHER4, OTHER6 = sys.argv[1:]
for name, protocol in (("sctp", 132), ("gre", 47), ("esp", 50), ("ipip", 4), ("igmp", 2), ("udplite", 136)):
    tried(name)(lambda: sent(socket.AF_INET, OUT4, protocol, b"evade-" + name.encode()))
def ip(source, target, protocol, data, fragment=0):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(data), 7, fragment, 64, protocol, 0, socket.inet_aton(source), socket.inet_aton(target))
    return head + data
syn = struct.pack("!HHIIBBHHH", 4000, 7, 1, 0, 0x50, 2, 1000, 0, 0)
RAW = ((socket.IPPROTO_IP, socket.IP_HDRINCL, 1),)
tried("spoofed source")(lambda: sent(socket.AF_INET, OUT4, 255, ip("192.0.2.2", OUT4, 17, struct.pack("!HHHH", 1, 7, 14, 0) + b"evade!"), *RAW))
tried("first fragment")(lambda: sent(socket.AF_INET, OUT4, 255, ip(V4, OUT4, 17, struct.pack("!HHHH", 1, 7, 16, 0) + b"evade!!!", 0x2000), *RAW))
tried("later fragment")(lambda: sent(socket.AF_INET, OUT4, 255, ip(V4, OUT4, 17, b"evade-late", 0x0002), *RAW))
tried("source route")(lambda: sent(socket.AF_INET, OUT4, 255, struct.pack("!BBHHHBBH4s4s", 0x47, 0, 28 + len(syn), 7, 0, 64, 6, 0, socket.inet_aton(V4), socket.inet_aton(OUT4)) + bytes([131, 7, 4]) + socket.inet_aton("192.0.2.3") + b"\0" + syn, *RAW))
tried("v4-mapped v6")(lambda: socket.create_connection(("::ffff:192.0.2.3", 7), 5) and "connected")
tried("hop options v6")(lambda: sent(socket.AF_INET6, OUT6, 0, b"\x11\0\x01\x04\0\0\0\0evade-hop"))
for name, address in (("host v4", HOST4), ("host v6", HOST6), ("other v4", OTHER4), ("other v6", OTHER6), ("link-local", "fe80::1%eth0"), ("multicast", "ff02::1%eth0")):
    for port in (22, 53, 80, 3129):
        def reach():
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as link:
                link.settimeout(1)
                link.sendto(b"evade", socket.getaddrinfo(address, port)[0][4])
                return link.recv(100)
        tried(f"{name} udp {port}")(reach)
        tried(f"{name} tcp {port}")(lambda: socket.create_connection((address.partition("%")[0], port), 2) and "connected")
json.dump(found, sys.stdout)
"""

ARRIVES = (
    "packet socket",
    "bpf",
    "user namespace",
    "net namespace",
    "xdp socket",
    "set link down",
    "add address",
    "add route",
    "add link",
)


def attack(place: Place, box: Sandbox, other: Sandbox) -> dict[str, str]:
    mine, theirs = box.network(), other.network()
    done = box.exec([PYTHON, "-c", SCRIPT, mine.v4, OPEN4, OPEN6, *HOST, theirs.v4, theirs.v6], timeout=120)
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_root_inside_gets_nothing_out(place: Place) -> None:
    with place.box(ECHO) as box, place.box(ECHO) as other:
        place.echo.forget()
        found = attack(place, box, other)
        for name in ARRIVES:
            assert not found[name].startswith("ok"), (name, found[name])
        assert not [
            name for name, told in found.items() if ("host" in name or "other" in name) and told.startswith("ok")
        ], found
        assert found["v4-mapped v6"] != "ok connected"
        assert not [each for each in place.echo.seen if b"evade" in each[2]], "no packet of it arrived"
        assert not place.on_host.seen
        assert probe(box, ["tcp", OPEN4, 7], ["tcp", OPEN6, 7]) == ["ok hello", "ok hello"], (
            "and its own rules hold as before"
        )


def test_tunnelling_in_queries_is_bounded(place: Place) -> None:
    with place.box({"w": NetworkRule(hosts=("*.a.test",))}) as box:
        gateway = box.run_shell("cat /etc/resolv.conf", check=True).text.split()[1]
        place.internet.dns.forget()
        names = [["dns", gateway, f"{number:04x}{'d' * 50}.a.test"] for number in range(300)]
        probe(box, *names[:150])
        probe(box, *names[150:])
        assert len({query.name for query in place.internet.dns.queries}) <= 150, (
            "names by a wildcard are bounded a minute"
        )


def test_a_flood_is_its_own(place: Place) -> None:
    flood = (
        "import socket\nlinks=[socket.socket(socket.AF_INET,socket.SOCK_DGRAM) for _ in range(8)]\n"
        "while True:\n  for l in links:\n    try: l.sendto(b'x'*200,('GATE',53))\n    except OSError: pass\n"
    )
    with place.box(ECHO, network_limits=NetLimits(new_flows_s=50)) as loud, place.box(ECHO) as quiet:
        gateway = loud.run_shell("cat /etc/resolv.conf", check=True).text.split()[1]
        running = loud.start([PYTHON, "-c", flood.replace("GATE", gateway)])
        for _ in range(3):
            assert probe(quiet, ["resolve", "a.test"], ["http", SHARED[0], 80, "a.test"])[0].startswith("ok")
        running.stop()
