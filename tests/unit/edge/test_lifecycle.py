"""Creation, cancellation, deletion, ends by time and by death, restarts: on a fake kernel, seeing what is left in it."""

import asyncio
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from rig import PRINCIPAL, SPEC, Rig, running, settle, until

from dsec.edge.tasks import TaskSet
from dsec.model.errors import (
    Busy,
    Conflict,
    ImageUnavailable,
    InvalidArgument,
    NotFound,
    RuntimeFailure,
    Unavailable,
    Unsupported,
)
from dsec.model.outcome import End
from dsec.model.views import ListQuery, SandboxState
from dsec.testing.backend import FakeKernel, Trouble
from dsec.testing.clock import VirtualClock


async def test_create_and_stop(rig: Rig) -> None:
    view = await rig.create()
    assert view.state is SandboxState.RUNNING
    assert {"compose", "mounts", "queue", "fake", "total"} <= set(view.phases)
    assert view.idle_deadline == rig.clock.now() + 300.0
    answer = await rig.call(view, "DELETE")
    assert (answer.status, answer.json()["state"], answer.json()["end"]["end"]) == (200, "gone", "stopped")
    assert rig.clean()
    await settle()
    assert rig.ended == [view.id]
    again = await rig.call(view, "DELETE")
    assert (again.status, again.json()["state"]) == (200, "gone")
    assert (await rig.call(view, "GET")).json()["state"] == "gone"
    lost = await rig.exec(view, "true")
    assert (lost.status, lost.json()["code"], lost.json()["fields"]["end"]) == (410, "sandbox_lost", "stopped")


async def test_refusals_leave_nothing(rig: Rig) -> None:
    for spec, error in (
        (replace(SPEC, container_image="none"), NotFound),
        (replace(SPEC, network_rules={"pypi": True}), Unsupported),
        (replace(SPEC, backend="microvm"), Unsupported),
        (replace(SPEC, memory_limit_mb=1), InvalidArgument),
    ):
        with pytest.raises(error):
            await rig.create(spec)
    rig.images.broken.add("base")
    with pytest.raises(ImageUnavailable):
        await rig.create()
    assert rig.clean() and rig.node.lifecycle.memory_committed == 0


@pytest.mark.parametrize("trouble", [Trouble.CLEAN, Trouble.PARTS])
async def test_a_failed_start_is_undone(rig: Rig, trouble: Trouble) -> None:
    rig.backend.start_troubles.append(trouble)
    with pytest.raises(RuntimeFailure):
        await rig.create()
    assert rig.clean()
    assert (await rig.create()).state is SandboxState.RUNNING


async def test_admission_counts_and_gives_back(tmp_path: Path) -> None:
    async with running(tmp_path, sandboxes=2) as rig:
        first = await rig.create()
        await rig.create()
        with pytest.raises(Busy):
            await rig.create()
        await rig.call(first, "DELETE")
        await rig.create()
        status = await rig.node.status()
        assert (status.sandboxes, status.memory_committed, status.healthy) == (2, 512 << 20, True)


async def test_cancelled_without_a_key_at_every_step(rig: Rig) -> None:
    """Cut after each number of turns of the loop that a create takes: nothing is ever left."""
    rig.backend.start_delay = 0.0
    for turns in range(40):
        task = asyncio.ensure_future(rig.create())
        await settle(turns)
        done = task.done()
        task.cancel()
        if done:
            await rig.call(task.result(), "DELETE")
        else:
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(rig.clean)
    assert rig.kernel.most == 1


async def test_cancelled_while_the_backend_hangs(rig: Rig) -> None:
    rig.backend.start_troubles.append(Trouble.HANG)
    task = asyncio.ensure_future(rig.create())
    await until(lambda: len(rig.kernel.cells) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(rig.clean)


async def test_a_key_names_one_sandbox(rig: Rig) -> None:
    """LC3: cut a create with a key at each step, ask again with the same key: one sandbox per key, the same one."""
    for turns in range(30):
        key = f"key-{turns}"
        task = asyncio.ensure_future(rig.create(key=key))
        await settle(turns)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        view = await rig.create(key=key)
        assert view.state is SandboxState.RUNNING
        assert (await rig.create(key=key)).id == view.id
        await rig.advance(60.0)
        assert rig.cell(view)
        assert len(rig.kernel.cells) == 1
        await rig.call(view, "DELETE")
    with pytest.raises(Conflict):
        await rig.create(replace(SPEC, pids_limit=99), key="key-0")
    assert (await rig.create(key="key-0")).state is SandboxState.GONE
    assert rig.clean()


async def test_a_key_nobody_comes_back_for(rig: Rig) -> None:
    rig.backend.start_troubles.append(Trouble.HANG)
    task = asyncio.ensure_future(rig.create(key="k"))
    await until(lambda: len(rig.kernel.cells) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.advance(5.0)
    assert rig.kernel.cells, "within the grace time it goes on"
    await rig.advance(6.0)
    await until(rig.clean)
    assert (await rig.create(key="k")).state is SandboxState.RUNNING, "one that never ran may be asked for again"


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_deleted_twice_while_starting(rig: Rig, turns: int) -> None:
    """LC4: a delete in every state is accepted, twice, and it never comes back."""
    task = asyncio.ensure_future(rig.create())
    await settle(turns)
    ids = list(rig.node.lifecycle.residents)
    for sandbox_id in ids:
        path = f"/v1/sandboxes/{sandbox_id}"
        answers = await asyncio.gather(rig.client.request("DELETE", path), rig.client.request("DELETE", path))
        assert [(each.status, each.json()["state"]) for each in answers] == [(200, "gone")] * 2
    await asyncio.gather(task, return_exceptions=True)
    if ids:
        assert rig.clean()


async def test_a_stop_that_fails_is_tried_until_it_works(tmp_path: Path) -> None:
    async with running(tmp_path, stop_patience=0.01) as rig:
        view = await rig.create()
        rig.backend.stop_failures = 3
        assert (await rig.call(view, "DELETE")).json()["state"] == "stopping"
        for _ in range(3):
            assert not rig.ended
            await rig.advance(2.0)
        await until(rig.clean)
        assert rig.ended == [view.id]


async def test_idle_and_absolute_ends(rig: Rig) -> None:
    idle = await rig.create(replace(SPEC, ttl_running_stop=10.0))
    await rig.advance(9.0)
    assert (await rig.exec(idle, "true")).status == 200
    for path in ("", "/metrics", "/events", "/processes"):
        await rig.advance(9.0)
        assert (await rig.call(idle, "GET", path)).status == 200, f"{path}: any call on it is activity"
    await rig.advance(10.0)
    await until(lambda: idle.id not in rig.kernel.cells)
    assert (await rig.call(idle, "GET")).json()["end"]["end"] == "idle"
    absolute = await rig.create(replace(SPEC, ttl_running_stop=None, ttl_absolute=25.0))
    await rig.advance(19.0)
    await rig.exec(absolute, "true")
    assert (await rig.call(absolute, "POST", "/renew", ttl="100")).status == 200
    await rig.advance(6.0)
    await until(rig.clean)
    assert (await rig.call(absolute, "GET")).json()["end"]["end"] == "expired"


async def test_a_running_call_keeps_it_alive(rig: Rig) -> None:
    view = await rig.create(replace(SPEC, ttl_running_stop=10.0))
    gone = asyncio.Event()
    task = asyncio.ensure_future(rig.call(view, "POST", "/exec", json={"argv": ["hang"]}, gone=gone))
    await until(lambda: bool(rig.agent(view).processes))
    await rig.advance(100.0)
    assert rig.cell(view)
    gone.set()
    await task
    assert not rig.agent(view).processes, "its process went with the call"
    await rig.advance(9.9)
    assert rig.cell(view)
    await rig.advance(0.2)
    await until(rig.clean)


@pytest.mark.parametrize("late", [-0.05, -0.001, 0.0, 0.001, 0.05])
async def test_renewal_races_the_end(rig: Rig, late: float) -> None:
    """LC2: at the end of its time a sandbox is either renewed, with an end in the future, or ends; never both."""
    for _ in range(20):
        view = await rig.create(replace(SPEC, ttl_running_stop=5.0))
        rig.clock.advance(5.0 + late)
        answer = await rig.call(view, "POST", "/renew")
        await settle()
        state = (await rig.call(view, "GET")).json()["state"]
        if answer.status == 200:
            assert state == "running" and answer.json()["idle_deadline"] > rig.clock.now()
            await rig.advance(5.1)
        else:
            assert (answer.status, state) == (410, "gone")
        await until(rig.clean)


async def test_death_is_told(rig: Rig) -> None:
    view = await rig.create()
    task = asyncio.ensure_future(rig.exec(view, "hang"))
    await until(lambda: bool(rig.agent(view).processes))
    rig.cell(view).die(End.OUT_OF_MEMORY, "its init was killed")
    answer = await task
    assert (answer.status, answer.json()["fields"]["end"]) == (410, "out_of_memory")
    assert answer.json()["detail"] == "its init was killed"
    await until(rig.clean)
    assert (await rig.call(view, "GET")).json()["end"]["reason"] == "its init was killed"


async def test_others_do_not_see_it(rig: Rig) -> None:
    view = await rig.create(project="root/other")
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("GET", "/files/stat")):
        answer = await rig.call(
            view, method, rest, json={"argv": ["true"]}, **({"path": "/"} if "files" in rest else {})
        )
        assert (answer.status, answer.json()["code"]) == (404, "not_found")
    assert rig.cell(view)


async def test_lists_are_paged(rig: Rig) -> None:
    views = []
    for index in range(5):
        views.append(await rig.create(replace(SPEC, job="a" if index % 2 else "b", labels={"n": str(index)})))
        rig.clock.advance(1.0)
    await rig.call(views[0], "DELETE")
    ids = [view.id for view in reversed(views)]
    for states, expected in (((), ids), ((SandboxState.RUNNING,), ids[:-1]), ((SandboxState.GONE,), ids[-1:])):
        found, cursor = [], None
        while True:
            page = await rig.node.list(ListQuery(project="root", states=states, limit=2, cursor=cursor))
            found += [view.id for view in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == expected
    assert [v.id for v in (await rig.node.list(ListQuery(project="root", labels={"n": "3"}))).items] == [views[3].id]
    assert not (await rig.node.list(ListQuery(project="root/other"))).items
    with pytest.raises(InvalidArgument):
        await rig.node.list(ListQuery(project="root", cursor="x"))
    assert set(await rig.node.stop_many(ListQuery(project="root", job="a"))) == {views[1].id, views[3].id}
    assert set(await rig.node.stop_all()) == {views[2].id, views[4].id}
    assert rig.clean()


async def test_a_restart_takes_over_what_lives(tmp_path: Path) -> None:
    """LC1 on fakes: live ones adopted, half-made ones and dead ones removed, ends by time that passed meanwhile kept."""
    clock, kernel = VirtualClock(), FakeKernel()
    async with TaskSet(clock) as tasks:
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            alive = await rig.create(replace(SPEC, ttl_running_stop=None))
            dead = await rig.create(replace(SPEC, ttl_running_stop=None))
            late = await rig.create(replace(SPEC, ttl_running_stop=5.0))
            active = await rig.create(replace(SPEC, ttl_running_stop=20.0))
            await rig.advance(4.0)
            await rig.exec(active, "true")
            await rig.advance(1.5)
            assert late.id not in kernel.cells
            late = await rig.create(replace(SPEC, ttl_running_stop=5.0))
            rig.backend.start_troubles.append(Trouble.HANG)
            half = asyncio.ensure_future(rig.create())
            await until(lambda: len(kernel.cells) == 5)
            process = (await rig.call(alive, "POST", "/processes", json={"argv": ["hang"]})).json()
        with pytest.raises(Unavailable):
            await half
        assert len(kernel.cells) == 5, "sandboxes outlive their edge"
        kernel.cells[dead.id].die()
        clock.advance(15.0)
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            await until(lambda: set(kernel.cells) == {alive.id, active.id})
            assert (await rig.exec(alive, "true")).status == 200
            assert (await rig.call(alive, "GET", f"/processes/{process['id']}")).json()["running"]
            ends = [(await rig.call(view, "GET")).json()["end"]["end"] for view in (dead, late)]
            assert ends == ["runtime", "idle"]
            assert rig.images.holders == {alive.id, active.id}
            await rig.advance(10.0)
            assert set(kernel.cells) == {alive.id}
            assert (await rig.node.status()).epoch == 2
            assert rig.node.new_id() != alive.id
            await rig.node.stop_all()
            assert rig.clean()


async def test_a_restart_knows_who_was_in_a_sandbox_and_what_a_renewal_made_shorter(tmp_path: Path) -> None:
    clock, kernel = VirtualClock(), FakeKernel()
    async with TaskSet(clock) as tasks:
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            used = await rig.create(replace(SPEC, ttl_running_stop=20.0))
            renewed = await rig.create(replace(SPEC, ttl_running_stop=300.0))
            await rig.exec(renewed, "true")
            await rig.advance(2.0)
            assert (await rig.call(renewed, "POST", "/renew", ttl="50")).status == 200
            attached = asyncio.ensure_future(rig.exec(used, "hang"))
            await settle()
            await rig.advance(60.0 - 15.0)
            dead = tmp_path / "as it was when the edge died"
            shutil.copytree(tmp_path, dead, ignore=lambda _, names: {each for each in names if each == dead.name})
        attached.cancel()
        await asyncio.wait((attached,))
        clock.advance(3.0)
        async with running(dead, kernel=kernel, clock=clock, tasks=tasks) as rig:
            ends = [rig.node.lifecycle.find(view.id).deadlines().idle for view in (used, renewed)]
            assert ends == [clock.now() + 20.0, clock.now() + 2.0]
            await rig.node.stop_all()


async def test_a_restart_goes_on_stopping(tmp_path: Path) -> None:
    clock, kernel = VirtualClock(), FakeKernel()
    async with TaskSet(clock) as tasks:
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks, stop_patience=0.001) as rig:
            view = await rig.create()
            rig.backend.stop_failures = 1 << 30
            await rig.call(view, "DELETE")
        assert kernel.cells
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            await until(rig.clean)
            assert (await rig.call(view, "GET")).json()["end"]["end"] == "stopped"


async def test_what_is_old_is_forgotten(rig: Rig) -> None:
    view = await rig.create()
    await rig.call(view, "DELETE")
    await rig.advance(3000.0)
    assert (await rig.call(view, "GET")).status == 200
    for _ in range(100):
        await rig.advance(300.0)
        await asyncio.sleep(0.005)  # a round ends with a checkpoint in a thread
        if (await rig.call(view, "GET")).status == 404:
            break
    with pytest.raises(NotFound):
        rig.node.lifecycle.find(view.id)


async def test_the_story(rig: Rig) -> None:
    view = await rig.create()
    await rig.exec(view, "false", key="one")
    rig.cell(view).oom_kills = 1
    await rig.call(view, "GET", "/metrics")
    await rig.call(view, "DELETE")
    story = [(each["event"], each["fields"]) for each in (await rig.call(view, "GET", "/events")).json()]
    names = [name for name, _ in story]
    assert names == [
        "Requested",
        "Mounted",
        "Started",
        "exec",
        "Observed",
        "StopAsked",
        "Killed",
        "Unmounted",
    ] or sorted(names) == sorted(
        ["Requested", "Mounted", "Started", "exec", "Observed", "StopAsked", "Killed", "Unmounted"]
    )
    assert ("exec", {"request_id": "one", "sequence": 1, "phase": "ended"}) in story
    assert any(fields.get("what") == "out_of_memory" for _, fields in story)


async def test_kills_are_told_once_with_their_time_also_after_a_restart(tmp_path: Path) -> None:
    clock, kernel = VirtualClock(), FakeKernel()

    async def told(rig: Rig) -> list[tuple[float, int]]:
        story = (await rig.call(view, "GET", "/events")).json()
        return [(each["at"], each["fields"]["count"]) for each in story if each["event"] == "Observed"]

    async with TaskSet(clock) as tasks:
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            view = await rig.create(replace(SPEC, ttl_running_stop=None))
            cell, killed = rig.cell(view), rig.clock.monotonic()
            when = rig.node.clock.now()
            await rig.advance(5.0)
            assert cell.tell_kills is not None
            cell.oom_kills = 2
            for _ in range(2):
                cell.tell_kills(2, killed)
            await rig.exec(view, "false")
            assert await told(rig) == [(pytest.approx(when), 2)]
        cell.oom_kills = 3
        async with running(tmp_path, kernel=kernel, clock=clock, tasks=tasks) as rig:
            assert [count for _, count in await told(rig)] == [2, 1], "only the one that came while nobody looked"


async def test_a_full_journal_refuses_but_still_stops(rig: Rig) -> None:
    view = await rig.create()
    pages = rig.node._journal._db.execute("PRAGMA page_count").fetchone()[0]
    rig.node._journal._db.execute(f"PRAGMA max_page_count={pages}")
    filled = 0
    with pytest.raises(Busy) as refused:
        for _ in range(200):
            await rig.create(replace(SPEC, labels={"x": "y" * 200}))
            filled += 1
    assert refused.value.fields["limit"] == "journal"
    answer = await rig.call(view, "DELETE")
    assert (answer.status, answer.json()["state"]) == (200, "gone")
    assert len(rig.kernel.cells) == filled
    await rig.node.stop_all()
    assert rig.clean()
    assert (await rig.call(view, "GET")).json()["end"]["end"] == "stopped", "told, though it is not recorded"
    rig.node._journal._db.execute(f"PRAGMA max_page_count={1 << 20}")
    await rig.advance(1.1)
    journal = rig.node._journal
    assert not journal.has_living(), "recorded as soon as there was room"
    assert [type(event).__name__ for event, _ in journal.events(view.id)][-3:] == ["StopAsked", "Killed", "Unmounted"]
    assert PRINCIPAL.project == "root/team"
