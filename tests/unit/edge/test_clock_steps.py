"""The host's clock is set forwards and back: no sandbox ends early or late, also across a restart of the edge."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from rig import SPEC, Rig, running, settle, until

from dsec.edge.tasks import TaskSet
from dsec.model.views import ListQuery, SandboxState
from dsec.testing.backend import FakeKernel
from dsec.testing.clock import VirtualClock

DAY, HOUR = 86400.0, 3600.0


@pytest.mark.parametrize("step", [DAY, -HOUR])
async def test_ends_by_time_are_counted_in_time_that_passed(rig: Rig, step: float) -> None:
    idle = await rig.create(replace(SPEC, ttl_running_stop=100.0))
    absolute = await rig.create(replace(SPEC, ttl_running_stop=None, ttl_absolute=100.0))
    await rig.advance(50.0)
    rig.clock.step(step)
    await rig.advance(49.9)
    assert set(rig.kernel.cells) == {idle.id, absolute.id}
    await rig.advance(0.2)
    await until(rig.clean)
    ends = [(await rig.call(view, "GET")).json()["end"]["end"] for view in (idle, absolute)]
    assert ends == ["idle", "expired"]


@pytest.mark.parametrize("step", [DAY, -HOUR])
async def test_a_renewal_after_a_step_gives_what_was_asked(rig: Rig, step: float) -> None:
    view = await rig.create(replace(SPEC, ttl_running_stop=10.0))
    rig.clock.step(step)
    assert (await rig.call(view, "POST", "/renew", ttl=30.0)).status == 200
    await rig.advance(29.9)
    assert rig.cell(view)
    await rig.advance(0.2)
    await until(rig.clean)


@pytest.mark.parametrize("step", [DAY, -HOUR])
async def test_a_step_while_the_edge_is_away(tmp_path: Path, step: float) -> None:
    clock, kernel = VirtualClock(), FakeKernel()
    async with TaskSet(clock) as tasks:
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            view = await rig.create(replace(SPEC, ttl_running_stop=None, ttl_absolute=100.0))
            await rig.advance(40.0)
        clock.step(step)
        clock.advance(40.0)
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            await settle()
            assert rig.cell(view)
            assert rig.node.clock.ahead() == pytest.approx(-step)
            await rig.advance(20.1)
            await until(rig.clean)
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            assert rig.node.clock.ahead() == pytest.approx(0.0), "with no sandbox left, the host's clock counts again"


@pytest.mark.parametrize("step", [DAY, -HOUR])
async def test_a_stop_that_is_tried_again_keeps_its_rhythm(tmp_path: Path, step: float) -> None:
    async with running(tmp_path, stop_patience=0.001) as rig:
        view = await rig.create()
        rig.backend.stop_failures = 1
        assert (await rig.call(view, "DELETE")).json()["state"] == "stopping"
        rig.clock.step(step)
        await rig.advance(2.0)
        await until(rig.clean)


@pytest.mark.parametrize("step", [DAY, -HOUR])
async def test_lists_and_results_hold(rig: Rig, step: float) -> None:
    first = await rig.create()
    assert (await rig.exec(first, "echo", "a", key="k")).status == 200
    rig.clock.step(step)
    await rig.advance(1.0)
    second = await rig.create()
    query = ListQuery(project="root", limit=1, states=(SandboxState.RUNNING,))
    page = await rig.node.list(query)
    assert [view.id for view in page.items] == [second.id], "newest first"
    rest = await rig.node.list(replace(query, cursor=page.next_cursor))
    assert [view.id for view in rest.items] == [first.id]
    await rig.exec(first, "echo", "a", key="k")
    assert len(rig.agent(first).requests) == 1, "a step forgets no recorded result"
    assert {view.phases["total"] for view in (first, second)} == {0.0}, "durations do not see it"


async def test_another_boot_of_the_host_ends_all_by_name(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with TaskSet(clock) as tasks:
        async with running(tmp_path, clock=clock, tasks=tasks) as rig:
            views = [await rig.create(replace(SPEC, ttl_running_stop=None)) for _ in range(3)]
        clock.step(-DAY)
        async with running(tmp_path, clock=clock, tasks=tasks, boot="boot-2") as rig:
            await until(rig.clean)
            for view in views:
                end = (await rig.call(view, "GET")).json()["end"]
                assert (end["end"], end["reason"]) == ("node_lost", "the host was rebooted")
                lost = await rig.exec(view, "true")
                assert (lost.status, lost.json()["code"], lost.json()["fields"]["end"]) == (
                    410,
                    "sandbox_lost",
                    "node_lost",
                )
            assert rig.node.clock.ahead() == 0.0
            assert (await rig.create()).id not in {view.id for view in views}
