"""What users are told of rules, tried from inside a real sandbox on the fake host: rows NE1 to NE4, switches, groups, the log."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dsec
from dsec import NetLimits, NetworkRule
from dsec.kernel import nettables
from dsec.kernel.clock import SystemClock
from dsec.kernel.errors import KernelError
from dsec.kernel.network import FabricSettings, NetFabric
from dsec.testing.netns import Netns
from dsec.testing.netservices import Record
from network.place import MOVING, PLAIN, PROBES, PYTHON, SHARED, Place, probe, timed

pytestmark = pytest.mark.root

V4, V6 = SHARED
OPEN4, OPEN6 = PLAIN
FAST = 3.0
A = {"mine": NetworkRule(hosts=("a.test",), ports=(80, 443))}
ECHO = {"echo": NetworkRule(cidrs=(f"{OPEN4}/32", f"{OPEN6}/128"), ports=(7,))}


def refused(told: str) -> bool:
    """Refused at once: by a reset, or as prohibited."""
    return told in ("Connection refused", "Permission denied", "No route to host", "Connection reset by peer")


def test_none_is_loopback_alone(place: Place) -> None:
    with place.box() as box:
        assert box.network().rules is None
        assert probe(box, ["tcp", OPEN4, 7], ["tcp", OPEN6, 7], ["listens", 80]) == [
            "Network is unreachable", "Network is unreachable", "ok 80",
        ]  # fmt: skip
        assert sorted(box.run_shell("ls /sys/class/net", check=True).text.split()) == ["lo"]
        with pytest.raises(dsec.Unsupported):
            box.set_network_rules(ECHO)


def test_addresses_ports_and_protocols(place: Place) -> None:
    rules = {"echo": NetworkRule(cidrs=(f"{OPEN4}/32", f"{OPEN6}/128"), ports=(7,), protocols=("tcp",))}
    with place.box(rules) as box:
        view = box.network()
        assert view.rules == rules and {a.network for a in view.allows} == {f"{OPEN4}/32", f"{OPEN6}/128"}
        found = timed(
            box, ["tcp", OPEN4, 7], ["tcp", OPEN6, 7], ["udp", OPEN4, 7], ["udp", OPEN6, 7], ["tcp", OPEN4, 8], ["tcp", V4, 80],
            ["tcp", V6, 80], ["ping", OPEN4], ["tcp", "169.254.169.254", 80], ["tcp", "fd00:ec2::254", 80], ["tcp", view.v4, 7],
        )  # fmt: skip
        told = [outcome for outcome, _ in found]
        assert told[:2] == ["ok hello", "ok hello"], told
        assert all(refused(outcome) for outcome in told[2:10]), told
        assert max(seconds for _, seconds in found) < FAST, found


def test_names_resolver_and_files(place: Place) -> None:
    with place.box(A, hostname="worker") as box:
        view = box.network()
        text = box.run_shell("cat /etc/hosts /etc/resolv.conf /etc/hostname; hostname", check=True).text
        assert f"{view.v4}\tworker" in text and f"{view.v6}\tworker" in text and "old" not in text
        assert text.endswith("worker\nworker\n") and text.count("nameserver ") == 2
        found = probe(
            box, ["resolve", "a.test"], ["resolve", "A.TEST."], ["resolve", "b.test"], ["resolve", "localhost"]
        )
        assert found[:2] == [f"ok {V6} {V4}" if V6 < V4 else f"ok {V4} {V6}"] * 2, found
        assert found[2].startswith("gaierror") and found[3].startswith("ok ")
        assert probe(box, ["http", V4, 80, "a.test"], ["tls", V4, 443, "a.test", None, place.internet.ca.pem]) == [
            "ok HTTP/1.1 200 OK a.test /", "ok HTTP/1.1 200 OK a.test /",
        ]  # fmt: skip


def test_allowing_one_name_of_a_shared_address(place: Place) -> None:
    """NE2 and NE3: a.test and b.test share an address."""
    with place.box(A) as box:
        assert probe(box, ["resolve", "a.test"])[0].startswith("ok ")
        place.web.forget()
        good = probe(
            box, ["tls", V4, 443, "a.test"], ["tls", V6, 443, "a.test"], ["http", V4, 80, "a.test"], ["http", V6, 80, "A.TEST"],
        )  # fmt: skip
        assert all(told.startswith("ok HTTP/1.1 200") for told in good), good
        bad = timed(
            box, ["tls", V4, 443, "b.test"], ["tls", V4, 443, None], ["tls", V4, 443, "evil-a.test"], ["tls", V6, 443, "b.test"],
            ["http", V4, 80, "b.test"], ["http", V6, 80, "b.test"], ["http", V4, 80, V4], ["tcp", V4, 22], ["tcp", V4, 443, "junk\r\n\r\n"],
            ["udp", V4, 443], ["udp", V6, 443], ["http", V4, 80, "x.a.test"], ["http", V4, 443, "a.test"],
        )  # fmt: skip
        assert not any(told.startswith("ok HTTP/1.1 200") or told == "timeout" for told, _ in bad), bad
        names = {request.sni or request.host.lower() for request in place.web.requests}
        assert names == {"a.test"}, "the server behind saw nothing else"


def test_a_name_that_moves_and_cnames(place: Place) -> None:
    fresh = MOVING
    with place.box({"m": NetworkRule(hosts=("m.test", "*.deep.test"))}) as box:
        place.points("m.test", fresh[0], ttl=1)
        assert probe(box, ["resolve", "m.test"]) == [f"ok {fresh[0]}"]
        assert probe(box, ["http", fresh[0], 80, "m.test"])[0].startswith("ok HTTP")
        assert refused(probe(box, ["http", fresh[1], 80, "m.test"])[0])
        place.points("m.test", fresh[1], ttl=1)
        time.sleep(1.5)
        assert probe(box, ["resolve", "m.test"]) == [f"ok {fresh[1]}"]
        assert probe(box, ["http", fresh[1], 80, "m.test"])[0].startswith("ok HTTP")
        place.internet.dns.answer("c.deep.test", Record("CNAME", "m.test", 1))
        assert probe(box, ["resolve", "c.deep.test"], ["resolve", "deep.test"])[0] == f"ok {fresh[1]}"
        place.points("in.deep.test", "169.254.169.254", "127.0.0.1", "192.0.2.2", "10.1.2.3")
        probe(box, ["resolve", "in.deep.test"])
        assert not any(
            told.startswith("ok") for told in probe(box, ["tcp", "169.254.169.254", 80], ["tcp", "10.1.2.3", 80])
        )
        assert {request.host for request in place.moving.requests} == {"m.test"}


def test_dns_goes_nowhere_else(place: Place) -> None:
    """NE4."""
    with place.box(A | {"all": NetworkRule(cidrs=("198.51.100.0/24",), ports=(80,))}) as box:
        place.internet.dns.forget()
        gateway = box.run_shell("cat /etc/resolv.conf", check=True).text.split()[1]
        found = probe(
            box, ["dns", gateway, "a.test"], ["dns", gateway, "a.test", 28, "tcp"], ["dns", gateway, "secret.evil.test"],
            ["dns", gateway, "secret.evil.test", 16], ["dns", gateway, "a.test", 16], ["dns", gateway, "x.a.test"],
            ["dns", "198.51.100.53", "secret.evil.test"], ["dns", "198.51.100.53", "secret.evil.test", 1, "tcp"], ["tcp", "198.51.100.53", 853],
        )  # fmt: skip
        assert found[0] == "ok rcode=0 answers=1" and found[1] == "ok rcode=0 answers=1", found
        assert found[2:4] == ["ok rcode=3 answers=0"] * 2 and found[5] == "ok rcode=3 answers=0", found
        assert "answers=1" not in found[4]
        assert all(refused(told) for told in found[6:]), found
        assert {query.name for query in place.internet.dns.queries} == {"a.test"}


def test_a_switch_takes_established_flows(place: Place) -> None:
    phases = {"setup": ECHO | A, "agent": ECHO, "test": {}}
    with place.box(network_phases=phases) as box:
        assert (box.network().phase, box.network().phases) == ("setup", ("setup", "agent", "test"))
        box.start([PYTHON, "-c", PROBES], stdin=json.dumps([["held", OPEN4, 7, "/tmp/mark"]]).encode())
        until(lambda: box.run_shell("cat /tmp/mark").text == "alive")
        assert box.set_phase("agent").rules == ECHO
        box.run_shell("rm /tmp/mark", check=True)
        until(lambda: box.run_shell("cat /tmp/mark").text == "alive")
        assert probe(box, ["resolve", "a.test"])[0].startswith("gaierror")
        box.set_phase("test")
        box.run_shell("rm -f /tmp/mark", check=True)
        assert refused(probe(box, ["tcp", OPEN4, 7])[0])
        time.sleep(0.5)
        assert box.run_shell("cat /tmp/mark").text != "alive", "the flow that there was is cut"
        assert box.network().allows == ()
        assert box.set_network_rules(ECHO).phase is None
        assert probe(box, ["tcp", OPEN4, 7]) == ["ok hello"]
        with pytest.raises(dsec.InvalidArgument):
            box.set_network_rules({"nope": True})
        assert probe(box, ["tcp", OPEN4, 7]) == ["ok hello"], "what is refused changes nothing"
    place.end_flows()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.1)


def test_groups_by_project_and_name(place: Place) -> None:
    with (
        place.box(network_group="g", aliases=["db"]) as db,
        place.box(network_group="g") as web,
        place.box(network_group="h") as other,
        place.box({}) as alone,
    ):
        mine = db.network()
        db.start([PYTHON, "-c", PROBES], stdin=json.dumps([["serves", 5432]]).encode())
        until(lambda: probe(db, ["tcp", "127.0.0.1", 5432]) == ["ok hello"])
        assert set(probe(web, ["tcp", mine.v4, 5432], ["tcp", mine.v6, 5432])) == {"ok hello"}
        assert mine.v4 in probe(web, ["resolve", "db"])[0]
        for stranger in (other, alone):
            assert all(refused(told) for told in probe(stranger, ["tcp", mine.v4, 5432], ["tcp", mine.v6, 5432]))
            assert not probe(stranger, ["resolve", "db"])[0].startswith("ok")


def test_the_log_names_what_was_tried(place: Place) -> None:
    with place.box(ECHO | A) as box:
        probe(box, ["tcp", OPEN4, 7], ["tcp", V4, 22], ["resolve", "a.test"])
        probe(box, ["http", V4, 80, "a.test"], ["http", V4, 80, "b.test"])
        until(lambda: any(flow.ended for flow in box.net_log(verdict="allowed")))
        log = box.net_log()
        refusals = [(flow.address, flow.port, flow.protocol) for flow in log if flow.verdict == "refused"]
        assert (V4, 22, "tcp") in refusals
        echoed = [flow for flow in log if flow.address == OPEN4 and flow.verdict == "allowed"]
        assert echoed and echoed[0].comm.startswith("python"), log
        assert any(flow.name == "b.test" and flow.verdict == "refused" for flow in log), log
        assert box.network().counts.refused >= 2
        assert len(box.net_log(limit=1)) == 1


def test_limits_hold(place: Place) -> None:
    limits = NetLimits(flows=4, new_flows_s=50)
    with place.box(ECHO, network_limits=limits) as box:
        assert box.network().limits == limits
        holding = [["held", OPEN4, 7, f"/tmp/m{number}"] for number in range(4)]
        box.start([PYTHON, "-c", PROBES], stdin=json.dumps(holding).encode())
        until(lambda: box.run_shell("cat /tmp/m*").text == "alive" * 4)
        assert refused(probe(box, ["tcp", OPEN4, 7])[0]), "a fifth at once"
    place.end_flows()
    with place.box(ECHO, network_limits=NetLimits(ingress_bytes_s=1 << 20, egress_bytes_s=1 << 20)) as box:
        assert probe(box, ["tcp", OPEN4, 7]) == ["ok hello"]


@pytest.mark.leaves("the node that all tests here share, started anew")
def test_kill_9_changes_nothing_inside(place: Place) -> None:
    box = place.box(network_phases={"one": ECHO | A, "two": ECHO})
    box.set_phase("two")
    before = box.network()
    place.restart()
    with place.client.get(box.id) as again:
        view = again.network()
        assert (view.rules, view.phase, view.refused, set(view.allows)) == (ECHO, "two", "", set(before.allows))
        assert probe(again, ["tcp", OPEN4, 7], ["tcp", V4, 80])[0] == "ok hello"
        assert refused(probe(again, ["tcp", V4, 80])[0])
        again.set_phase("one")
        assert probe(again, ["resolve", "a.test"])[0].startswith("ok")
        assert probe(again, ["http", V4, 80, "a.test"])[0].startswith("ok HTTP")


def test_a_host_without_nft_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nettables, "_PATH", "/nonexistent")
    with Netns("bare") as bare:
        fabric = NetFabric(tmp_path, FabricSettings(), SystemClock(), bare.fd)
        with pytest.raises(KernelError, match="nft"):
            fabric.open()
        fabric.close(False)
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line]
