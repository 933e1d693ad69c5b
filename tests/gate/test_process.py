"""The gate's process: what it is allowed, how it ends, and what holds after it was started anew."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import dns.message
import dns.query
import dns.rcode
import pytest

from dsec.model.network import Policy
from dsec.testing.gatesite import BOXES, GATEWAY, Site, rule
from dsec.testing.netservices import Record
from gate.test_hello import openssl_hello

pytestmark = pytest.mark.root

SERVER = """
import asyncio, socket, sys
from pathlib import Path
from dsec.gate.client import GateProcess, GateSetup
from dsec.gate.settings import GateSettings
from dsec.kernel.clock import SystemClock

class Loopback:
    gateway_v4, gateway_v6 = "127.0.0.1", "::1"
    def socket(self, family, kind, port, transparent):
        made = socket.socket(family, kind)
        made.bind((("127.0.0.1", "::1")[family == socket.AF_INET6], 0))
        if kind == socket.SOCK_STREAM:
            made.listen()
        return made.detach()

async def main():
    gate = GateProcess(GateSetup(settings=GateSettings(nameservers=("192.0.2.9",)), cache=Path(sys.argv[1])), Loopback(), SystemClock())
    await gate.open()
    print(gate.pid, flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_is_not_root_and_has_no_capability(site: Site) -> None:
    assert site.gate.pid
    found = status(site.gate.pid)
    assert "0" not in found["Uid"].split() + found["Gid"].split()
    assert found["Groups"] == ""
    assert int(found["CapEff"], 16) == int(found["CapPrm"], 16) == int(found["CapAmb"], 16) == 0


def test_it_ends_with_a_server_that_is_killed(site: Site, tmp_path: Path) -> None:
    with site.internet.host.inside():
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True
        )
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    server.kill()
    server.communicate()
    assert site.wait_for(lambda: not Path(f"/proc/{pid}").exists() or status(pid)["State"].startswith("Z"))


@pytest.mark.leaves("the process that was started anew")
def test_after_its_death_connections_are_cut_and_every_policy_holds_again(site: Site) -> None:
    site.internet.add_addresses(["203.0.113.30"])
    site.internet.dns.answer("a.test", Record("A", "203.0.113.30"))
    site.names(rule("a.test", 8000))
    site.names(box=1)
    listener = site.internet.world.call(lambda: socket.create_server(("203.0.113.30", 8000)))
    with listener, site.connect("203.0.113.30", 8000) as client:
        client.sendall(openssl_hello("a.test"))
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(1000)
            starts, before = site.gate.starts, site.gate.pid or 0
            os.kill(before, signal.SIGKILL)
            with pytest.raises(ConnectionResetError):
                if client.recv(10) == b"":
                    raise ConnectionResetError
    # Asked of no process at all: the query waits in the socket until the next one knows every policy.
    message = dns.message.make_query("a.test", "A")
    answer = site.boxes[0].call(lambda: dns.query.udp(message, GATEWAY[0], timeout=20))
    assert [record.address for rrset in answer.answer for record in rrset] == ["203.0.113.30"]
    assert site.gate.starts > starts
    assert site.query("a.test", box=1).rcode() == dns.rcode.NXDOMAIN
    site.names()  # the channel works in both directions again
    assert site.query("a.test").rcode() == dns.rcode.NXDOMAIN


def test_an_answer_of_before_a_switch_opens_nothing_after_it(site: Site) -> None:
    site.internet.dns.answer("late.test", Record("A", "203.0.113.31"))
    site.names(rule("late.test"))
    site.answers.clear()
    site.internet.dns.delay = 0.5
    codes: list[int] = []
    asker = threading.Thread(target=lambda: codes.append(site.query("late.test").rcode()))
    site.internet.dns.forget()
    asker.start()
    try:
        site.wait_for(lambda: site.internet.dns.queries)
        site.names()
    finally:
        asker.join()
        site.internet.dns.delay = 0.0
    assert codes == [dns.rcode.NXDOMAIN]
    assert site.answers == []


def test_a_dropped_sandbox_is_served_no_more(site: Site) -> None:
    site.internet.dns.answer("a.test", Record("A", "203.0.113.30"))
    site.names(rule("a.test"), box=1)
    assert site.resolve("a.test", box=1) == ["203.0.113.30"]
    for _ in range(2):
        site.internet.host.run(site.gate.drop(BOXES[1].slot))
    with pytest.raises(ConnectionResetError):
        site.plain("203.0.113.30", b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", box=1)
    site.policy(Policy(), 1)
