"""The edge's part of networks, on fakes of fabric and gate that keep what is in force."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dsec.edge.network.netlog import NetLog
from dsec.model.errors import InvalidArgument, PermissionDenied, Unavailable, Unsupported
from dsec.model.network import Flow, NetLimits, NetworkRule, NetworkView
from dsec.testing.backend import FakeKernel, Trouble
from dsec.testing.network import FakeFabric, FakeGate
from unit.edge.rig import SPEC, Rig, running

MINE = NetworkRule(hosts=("a.test",), ports=(443,))
NET = NetworkRule(cidrs=("203.0.113.0/24",), ports=(80,))
PHASES = {"setup": {"pypi": True, "mine": MINE}, "agent": {"mine": MINE, "net": NET}, "test": {}}


async def view_of(rig: Rig, box: Any) -> NetworkView:
    answer = await rig.call(box, "GET", "/network")
    assert answer.status == 200, answer.json()
    return msgspec.convert(answer.json(), NetworkView)


async def put(rig: Rig, box: Any, key: str | None = None, **change: Any) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    return await rig.call(box, "PUT", "/network", json=msgspec.to_builtins(change), headers=headers)


async def test_what_is_asked_is_in_force_and_read_back(tmp_path: Path) -> None:
    fabric, gate = FakeFabric(), FakeGate()
    async with running(tmp_path, network=(fabric, gate)) as rig:
        rules = {"pypi": NetworkRule(before="2024-05-01"), "debian": True, "npm": False, "mine": MINE, "net": (NET,)}
        limits = NetLimits(egress_bytes_s=1 << 20, flows=10, new_flows_s=5)
        box = await rig.create(replace(SPEC, network_rules=rules, network_limits=limits))
        view = await view_of(rig, box)
        assert (view.rules, view.limits, view.refused) == (rules, limits, "")
        assert set(view.allows) == set(fabric.views[0]) and fabric.limits[0] == limits
        assert ("203.0.113.0/24", 80, 80) in {(a.network, a.low, a.high) for a in view.allows}
        assert gate.policies[0].mirrors["pypi"].before == 1714521600.0
        assert [rule.pattern for rule in view.names] == ["a.test", "deb.test"]
        resident = rig.node.lifecycle.residents[box.id]
        assert resident.surroundings.env["PIP_INDEX_URL"] == "http://100.96.0.1:3141/simple/"
        await rig.call(box, "DELETE")
        assert rig.clean() and not fabric.views and not gate.policies


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"network_rules": {"nope": True}}, InvalidArgument, "network_rules.nope"),
        ({"network_rules": {"npm": True}}, Unsupported, "network_rules.npm"),
        ({"network_phases": {"a": {}, "b": {"npm": True}}}, Unsupported, "network_phases.b.npm"),
        (
            {"network_rules": {"x": NetworkRule(cidrs=("169.254.169.254/32",))}},
            InvalidArgument,
            "network_rules.x.cidrs",
        ),
        ({"network_rules": {"x": NetworkRule(cidrs=("100.96.0.0/16",))}}, InvalidArgument, "network_rules.x.cidrs"),
        ({"network_rules": {}, "network_phases": {"a": {}}}, InvalidArgument, "network_phases"),
        ({"network_phases": {"a": {}}, "network_phase": "b"}, InvalidArgument, "network_phase"),
        ({"aliases": ("db",)}, InvalidArgument, "aliases"),
        ({"network_rules": {}, "network_limits": NetLimits(flows=0)}, InvalidArgument, "network_limits.flows"),
        ({"network_rules": {}, "network_limits": NetLimits(flows=16385)}, InvalidArgument, "network_limits.flows"),
        (
            {"network_rules": {}, "network_limits": NetLimits(new_flows_s=10_001)},
            InvalidArgument,
            "network_limits.new_flows_s",
        ),
        *(
            ({"network_rules": {"x": NetworkRule(cidrs=(cidr,))}}, InvalidArgument, "network_rules.x.cidrs")
            for cidr in (
                "168.63.129.16/32",
                "192.0.0.192",
                "fd20:ce::254",
                "64:ff9b::a9fe:a9fe",
                "2002:a9fe::/32",
                "2001::/48",
            )
        ),
        *(
            ({"network_rules": {"x": NetworkRule(hosts=(host,))}}, InvalidArgument, "network_rules.x.hosts")
            for host in ("0x7f000001", "1.2.3.4", "a.0x7f", "a.1", "*.1")
        ),
        (
            {"network_rules": {"x": NetworkRule(hosts=("a.test",), ports=tuple(range(1, 18, 2)))}},
            InvalidArgument,
            "network_rules.x",
        ),
    ],
)
async def test_refusals_at_create(tmp_path: Path, change: Any, error: Any, field: str) -> None:
    fabric = FakeFabric()
    async with running(tmp_path, network=(fabric, FakeGate())) as rig:
        with pytest.raises(error) as refused:
            await rig.create(replace(SPEC, **change))
        assert (refused.value.fields.get("field") or refused.value.fields.get("feature")) == field
        assert rig.clean() and not fabric.views


async def test_a_host_without_a_fabric_refuses_by_name_and_runs_the_rest(tmp_path: Path) -> None:
    fabric = FakeFabric()
    fabric.broken = "this kernel has no tcx"
    async with running(tmp_path, network=(fabric, FakeGate())) as rig:
        with pytest.raises(Unsupported, match="no tcx"):
            await rig.create(replace(SPEC, network_rules={"pypi": True}))
        box = await rig.create(replace(SPEC, network_rules={"pypi": False}))
        answer = await put(rig, box, rules={"pypi": True})
        assert (answer.status, answer.json()["code"]) == (422, "unsupported") and "no tcx" in answer.json()["detail"]


async def test_what_was_kept_for_the_living_goes_when_they_have_ended(tmp_path: Path) -> None:
    fabric, kernel = FakeFabric(), FakeKernel()
    async with running(tmp_path, network=(fabric, FakeGate()), kernel=kernel) as rig:
        box = await rig.create(replace(SPEC, network_rules={"pypi": True}))
    fabric.broken = "a kernel of another time"
    async with running(tmp_path, network=(fabric, FakeGate()), kernel=kernel) as rig:
        assert fabric.views
        assert (await rig.call(box, "DELETE")).status == 200
        fabric.views[99] = ()
    assert not fabric.views


async def test_a_node_whose_networks_are_off_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, why_not="networks are turned off here (network.enabled)") as rig:
        with pytest.raises(Unsupported, match=r"networks are turned off here \(network.enabled\)"):
            await rig.create(replace(SPEC, network_rules={"pypi": True}))


async def test_none_is_for_good(tmp_path: Path) -> None:
    async with running(tmp_path, network=(FakeFabric(), FakeGate())) as rig:
        box = await rig.create()
        assert (await view_of(rig, box)).rules is None
        answer = await put(rig, box, rules={"pypi": True})
        assert (answer.status, answer.json()["code"]) == (422, "unsupported")
        assert (await rig.call(box, "GET", "/network/log")).json() == []


async def test_phases_switch_both_judges(tmp_path: Path) -> None:
    fabric, gate = FakeFabric(), FakeGate()
    async with running(tmp_path, network=(fabric, gate)) as rig:
        box = await rig.create(replace(SPEC, network_phases=PHASES))
        view = await view_of(rig, box)
        assert (view.phase, view.phases, view.rules) == ("setup", ("setup", "agent", "test"), PHASES["setup"])
        assert await gate.resolve(0, "a.test", ["198.51.100.7"])
        opened = fabric.permits[0]
        assert [(a.network, a.via) for a in opened] == [("198.51.100.7/32", "relay")]
        assert (await put(rig, box, phase="agent")).json()["phase"] == "agent"
        assert fabric.permits[0] == opened, "an answer that both phases allow stays"
        assert "pypi" not in gate.policies[0].mirrors
        old = gate.policies[0].names[0]
        assert (await put(rig, box, phase="test")).status == 200
        assert fabric.allowed(0) == () and gate.policies[0].names == ()
        with pytest.raises(PermissionDenied):
            await gate.resolve(0, "a.test", ["198.51.100.7"], old)
        assert fabric.allowed(0) == (), "an answer that comes late opens nothing"
        wrong = await put(rig, box, phase="later")
        assert (wrong.status, wrong.json()["fields"]["field"]) == (400, "phase")
        both = await put(rig, box, phase="agent", rules={})
        assert both.status == 400
        one = await put(rig, box, key="k", rules={"net": NET})
        assert one.json() == (await put(rig, box, key="k", rules={"net": NET})).json()
        assert (await put(rig, box, key="k", rules={})).status == 409


async def test_wrong_rules_change_nothing(tmp_path: Path) -> None:
    fabric = FakeFabric()
    async with running(tmp_path, network=(fabric, FakeGate())) as rig:
        box = await rig.create(replace(SPEC, network_rules={"net": NET}))
        before = fabric.allowed(0)
        for wrong in ({"nope": True}, {"npm": True}, {"x": NetworkRule(hosts=("*",))}):
            assert (await put(rig, box, rules=wrong)).status in (400, 422)
        view = await view_of(rig, box)
        assert (fabric.allowed(0), view.rules, view.refused) == (before, {"net": NET}, "")


@pytest.mark.parametrize("part", ["fabric", "gate"])
async def test_a_switch_that_fails_shuts_everything(tmp_path: Path, part: str) -> None:
    fabric, gate, kernel = FakeFabric(), FakeGate(), FakeKernel()
    async with running(tmp_path, network=(fabric, gate), kernel=kernel) as rig:
        box = await rig.create(replace(SPEC, network_rules={"mine": MINE}))
        (fabric if part == "fabric" else gate).failures = 1
        failed = await put(rig, box, rules={"mine": MINE, "net": NET})
        assert (failed.status, failed.json()["code"]) == (503, "unavailable")
        view = await view_of(rig, box)
        assert view.refused and view.allows == () and gate.policies[0].names == ()
        assert view.rules == {"mine": MINE, "net": NET}
    async with running(tmp_path, network=(fabric, gate), kernel=kernel) as rig:
        view = await view_of(rig, box)
        assert view.refused and view.allows == (), "it stays shut over a restart"
        opened = await put(rig, box, rules={"net": NET})
        assert opened.status == 200 and opened.json()["refused"] == ""
        assert [allow.network for allow in fabric.allowed(0)] == ["203.0.113.0/24"]


async def test_a_restart_puts_the_journals_rules_in_force(tmp_path: Path) -> None:
    fabric, gate, kernel = FakeFabric(), FakeGate(), FakeKernel()
    async with running(tmp_path, network=(fabric, gate), kernel=kernel) as rig:
        box = await rig.create(replace(SPEC, network_phases=PHASES, network_group="g", aliases=("db",)))
        other = await rig.create(replace(SPEC, network_rules={"net": NET}))
        await put(rig, box, phase="agent")
        view, number = await view_of(rig, box), fabric.groups[0]
    fabric.views[0] = ()  # as if the switch had not come through
    fabric.views[77] = ()  # of nobody
    gate = FakeGate()
    async with running(tmp_path, network=(fabric, gate), kernel=kernel) as rig:
        assert (await view_of(rig, box)) == view and fabric.groups[0] == number
        assert gate.policies[0].aliases == ("db",) and gate.policies[0].group == str(number)
        assert 77 not in fabric.views and (await view_of(rig, other)).rules == {"net": NET}
        assert rig.node.lifecycle.residents[box.id].surroundings.env["PIP_INDEX_URL"]
    del fabric.views[0]
    async with running(tmp_path, network=(fabric, FakeGate()), kernel=kernel) as rig:
        assert "link was not there" in (await view_of_missing(rig, box))


async def view_of_missing(rig: Rig, box: Any) -> str:
    """Why it is shut; the maps of a link that is gone cannot be read."""
    known = rig.node.networks._journal.network(box.id)
    assert known is not None
    return known.refused


async def test_groups_are_told_apart_by_project(tmp_path: Path) -> None:
    fabric = FakeFabric()
    async with running(tmp_path, network=(fabric, FakeGate())) as rig:
        spec = replace(SPEC, network_group="task-17")
        for project in ("root/team", "root/team", "root/other"):
            await rig.create(spec, project=project)
        await rig.create(replace(SPEC, network_group="task-18"))
        await rig.create(replace(SPEC, network_rules={}))
        first, same, foreign, other, none = (fabric.groups[slot] for slot in range(5))
        assert first == same != 0 and none == 0 and len({first, foreign, other}) == 3


@pytest.mark.parametrize("trouble", [Trouble.CLEAN, Trouble.PARTS])
async def test_a_failed_start_leaves_no_link(tmp_path: Path, trouble: Trouble) -> None:
    fabric, gate = FakeFabric(), FakeGate()
    async with running(tmp_path, network=(fabric, gate)) as rig:
        rig.backend.start_troubles.append(trouble)
        with pytest.raises(Exception, match="planted"):
            await rig.create(replace(SPEC, network_rules={"net": NET}))
        gate.failures = 1
        with pytest.raises(Unavailable, match="planted"):
            await rig.create(replace(SPEC, network_rules={"net": NET}))
        assert rig.clean() and not fabric.views and not gate.policies and rig.node.networks.counts()[0] == 0


async def test_the_log_tells_flows_and_counts(tmp_path: Path) -> None:
    fabric, gate = FakeFabric(), FakeGate()
    async with running(tmp_path, network=(fabric, gate)) as rig:
        box = await rig.create(replace(SPEC, network_rules={"mine": MINE}))
        await gate.resolve(0, "a.test", ["198.51.100.7"])
        now = rig.clock.now()
        begun = Flow(
            at=now + 1, verdict="allowed", address="198.51.100.7", port=443, protocol="tcp", pid=7, comm="curl"
        )
        fabric.tell(0, replace(begun, at=now - 1, address="192.0.2.66", comm="of the slot's last tenant"))
        fabric.tell(0, replace(begun, at=now - 1, address="192.0.2.66", ended=now - 0.5), ended=True)
        fabric.tell(0, begun)
        fabric.tell(
            0, Flow(at=now + 2, verdict="refused", address="192.0.2.9", port=22, protocol="tcp", reason="no rule")
        )
        fabric.tell(5, begun)
        log = msgspec.convert((await rig.call(box, "GET", "/network/log")).json(), list[Flow])
        assert [(flow.verdict, flow.name, flow.comm) for flow in log] == [
            ("allowed", "a.test", "curl"),
            ("refused", "", ""),
        ]
        fabric.tell(0, replace(begun, ended=now + 3, bytes_out=10, bytes_in=20, comm="", pid=None), ended=True)
        log = msgspec.convert((await rig.call(box, "GET", "/network/log", verdict="allowed")).json(), list[Flow])
        assert [(flow.ended, flow.bytes_in, flow.comm, flow.pid) for flow in log] == [(now + 3, 20, "curl", 7)]
        counts = (await view_of(rig, box)).counts
        assert (counts.allowed, counts.refused, counts.bytes_out, counts.bytes_in) == (1, 1, 10, 20)
        await rig.call(box, "DELETE")
        assert rig.node.networks.counts()[1] == counts, "counts of the node do not fall"


def test_the_log_is_bounded() -> None:
    log = NetLog(10)
    for number in range(10000):
        log.named(f"192.0.2.{number}", "x")
        log.add(Flow(at=float(number), verdict="refused", address="192.0.2.1"))
    assert [flow.at for flow in log.read()] == [float(number) for number in range(9990, 10000)]
    assert log.counts.refused == 10000


MANY = tuple(f"11.{number // 256}.{number % 256}.0/24" for number in range(64))
PORTS = tuple(range(1, 128, 2))


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({f"r{n}": (NetworkRule(cidrs=MANY, ports=PORTS, protocols=("tcp", "udp")),) * 64 for n in range(64)}, "2048"),
        ({f"r{n}": (NetworkRule(hosts=("a.test",) * 64),) * 64 for n in range(64)}, "1024"),
        ({f"r{n}": NetworkRule(cidrs=MANY, ports=PORTS[:8], protocols=("tcp", "udp")) for n in range(24)}, "2048"),
        ({f"r{n}": NetworkRule(cidrs=tuple(f"11.{n}.{m}.0/24" for m in range(64))) for n in range(31)}, ""),
    ],
)
async def test_large_rules_cost_the_node_neither_time_nor_memory(tmp_path: Path, rules: Any, complaint: str) -> None:
    async with running(tmp_path, network=(FakeFabric(), FakeGate())) as rig:
        tracemalloc.start()
        began = time.process_time()
        try:
            box = await rig.create(replace(SPEC, network_rules=rules))
        except InvalidArgument as error:
            assert complaint and complaint in str(error)
        else:
            assert not complaint and len((await view_of(rig, box)).allows) == 31 * 64
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most < 64 << 20
        assert time.process_time() - began < 5
