"""A whole edge on fakes, driven at random: creates cut short, troubled starts and stops, deaths, time, restarts; nothing leaks."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dsec.edge.tasks import TaskSet
from dsec.model.errors import DSecError
from dsec.model.views import ListQuery, SandboxState
from dsec.testing.backend import FakeKernel, Trouble
from dsec.testing.clock import VirtualClock
from unit.edge.rig import SPEC, Rig, running, settle, until

STEP = st.one_of(
    st.tuples(st.just("create"), st.integers(0, 25), st.sampled_from([None, "a", "b"])),
    st.tuples(st.just("create"), st.integers(0, 25), st.none()),
    st.tuples(st.just("troubled"), st.sampled_from(list(Trouble)), st.sampled_from([None, "a"])),
    st.tuples(st.just("stop"), st.integers(0, 5), st.none()),
    st.tuples(st.just("die"), st.integers(0, 5), st.none()),
    st.tuples(st.just("stuck"), st.integers(1, 3), st.none()),
    st.tuples(st.just("advance"), st.floats(0, 40), st.none()),
    st.tuples(st.just("exec"), st.integers(0, 5), st.sampled_from([None, "x"])),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


async def take(rig: Rig, step: tuple[str, object, str | None]) -> None:
    kind, value, key = step
    living = list(rig.kernel.cells)
    if kind == "troubled" and isinstance(value, Trouble):
        rig.backend.start_troubles.append(value)
        value = 25
    if kind in ("create", "troubled") and isinstance(value, int):
        spec = replace(SPEC, ttl_running_stop=30.0, labels={"key": key or ""})
        task = asyncio.ensure_future(rig.create(spec, key=key and f"{key}-{rig.node.lifecycle.memory_committed}"))
        await settle(value)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif kind == "stuck" and isinstance(value, int):
        rig.backend.stop_failures += value
    elif kind == "advance" and isinstance(value, float):
        await rig.advance(value)
    elif living and isinstance(value, int):
        sandbox_id = living[value % len(living)]
        path = f"/v1/sandboxes/{sandbox_id}"
        if kind == "stop":
            await rig.client.request("DELETE", path)
        elif kind == "die":
            rig.kernel.cells[sandbox_id].die()
        else:
            headers = {"Idempotency-Key": key} if key else {}
            answer = await rig.client.request("POST", path + "/exec", json={"argv": ["true"]}, headers=headers)
            assert answer.status in (200, 410, 500), answer.body
    await settle(5)


async def scenario(steps: list[tuple[str, object, str | None]], directory: Path) -> None:
    clock, kernel = VirtualClock(), FakeKernel()
    owed = "in the kernel, but nobody owes its undo"
    parts: list[list[tuple[str, object, str | None]]] = [[]]
    for step in steps:
        if step[0] == "restart":
            parts.append([])
        else:
            parts[-1].append(step)
    async with TaskSet(clock) as tasks:
        for part in parts:
            async with running(directory, kernel=kernel, clock=clock, tasks=tasks, stop_patience=0.001) as rig:
                for step in part:
                    await take(rig, step)
                    assert set(kernel.cells) <= set(rig.node.lifecycle.residents), owed
        async with running(directory, kernel=kernel, clock=clock, tasks=tasks, stop_patience=0.001) as rig:
            try:
                await rig.node.stop_all()
            except DSecError as error:
                raise AssertionError("a stop raised") from error
            await rig.advance(60.0)
            await until(rig.clean)
            page = await rig.node.list(ListQuery(project="root", limit=1000))
            assert all(view.state is SandboxState.GONE and view.end is not None for view in page.items)
            assert rig.node.lifecycle.memory_committed == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, min_size=5, max_size=25))
def test_nothing_leaks_whatever_happens(steps: list[tuple[str, object, str | None]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(scenario(steps, Path(directory)))
