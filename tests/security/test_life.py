"""A sandbox's life on the container backend: whatever happens, nothing stays; what lives is found again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dsec.edge.agent import UnixAgent
from dsec.edge.backends.container import Container
from dsec.kernel.clock import SystemClock
from dsec.model.outcome import End
from dsec.model.plan import Aftermath, Handle, Identity, Life, Mount, Plan
from dsec.ports.backend import BackendFailure
from security.cell import LIMITS, Starter, groups_of, settings

pytestmark = pytest.mark.root


def plan_of(layer: str, name: str = "one", mounts: tuple[Mount, ...] = ()) -> Plan:
    layers = (Mount(kind="layer", source=layer),)
    return Plan(
        sandbox_id=name, layers=layers, mounts=mounts, limits=LIMITS, identity=Identity(hostname="cell")
    )  # fmt: skip


def nothing_left(container: Container, state: Path, name: str) -> bool:
    there = [*groups_of(container, name), *map(str, (state / "run").glob("*")), *container.pool.names()]
    return there == [] and f"cells/{name}" not in Path("/proc/self/mountinfo").read_text()


async def test_stop_leaves_nothing_and_may_be_repeated(start: Starter, container: Container, tmp_path: Path) -> None:
    cell = await start()
    await cell.shell("sleep 1000 >/dev/null 2>&1 & (sleep 1000 >/dev/null 2>&1 &)")
    assert groups_of(container, "one")
    pids = [int(p) for p in os.listdir("/proc") if p.isdigit() and in_groups(p, "one")]
    assert len(pids) >= 3
    for _ in range(2):
        await container.stop(cell.handle)
        assert nothing_left(container, tmp_path, "one")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def in_groups(pid: str, name: str) -> bool:
    try:
        return f"/{name}" in Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_what_was_reserved_alone_stops_too(container: Container, layer: str, tmp_path: Path) -> None:
    handle = container.reserve(plan_of(layer))
    await container.stop(handle)
    await container.stop(handle)
    assert nothing_left(container, tmp_path, "one")


async def test_stop_during_start_waits_for_it(container: Container, layer: str, tmp_path: Path) -> None:
    for delay in (0.0, 0.0005, 0.002, 0.01):
        plan = plan_of(layer)
        handle = container.reserve(plan)
        starting = asyncio.ensure_future(container.start(plan, handle))
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await container.stop(handle)
        assert nothing_left(container, tmp_path, "one"), delay


@pytest.mark.parametrize(
    ("mount", "end"),
    [
        (Mount(kind="volume", source="/no/such/place", target="/v", read_only=False), End.IMAGE),
        (Mount(kind="volume", source="/", target="/../v", read_only=False), End.RUNTIME),
    ],
)
async def test_a_start_that_fails_is_undone(
    container: Container, layer: str, tmp_path: Path, mount: Mount, end: End
) -> None:
    plan = plan_of(layer, mounts=(mount,))
    handle = container.reserve(plan)
    with pytest.raises(BackendFailure) as caught:
        await container.start(plan, handle)
    assert caught.value.aftermath is Aftermath.UNDONE
    assert nothing_left(container, tmp_path, "one")


async def test_a_death_of_its_own_is_told(start: Starter, container: Container) -> None:
    cell = await start()
    waiting = asyncio.ensure_future(container.wait_end(cell.handle))
    await asyncio.sleep(0)
    pid = next(int(p) for p in os.listdir("/proc") if p.isdigit() and in_groups(p, "one"))
    os.kill(pid, signal.SIGKILL)
    end, why = await asyncio.wait_for(waiting, 5)
    assert end is End.RUNTIME
    assert "signal 9" in why


async def test_an_edge_that_comes_back_finds_its_sandboxes(layer: str, tmp_path: Path) -> None:
    plan = plan_of(layer)
    first = Container(settings(tmp_path), SystemClock(), UnixAgent)
    await first.open()
    handle = first.reserve(plan)
    await first.start(plan, handle)
    unstarted = first.reserve(plan_of(layer, "two"))
    await first.close()
    again = Container(settings(tmp_path), SystemClock(), UnixAgent)
    await again.open()
    handle = Handle(backend="container", state=bytes(handle.state))
    assert await again.adopt(handle) is Life.ALIVE
    assert await again.adopt(unstarted) is Life.GONE
    assert (await again.usage(handle)).memory_limit_bytes == LIMITS.memory_bytes
    # Its ids are not given to another.
    third = plan_of(layer, "three")
    other = again.reserve(third)
    await again.start(third, other)
    waiting = asyncio.ensure_future(again.wait_end(handle))
    await asyncio.sleep(0)
    await again.stop(handle)
    assert (await waiting)[0] is End.STOPPED
    assert await again.adopt(handle) is Life.GONE
    await again.stop(other)
    assert nothing_left(again, tmp_path, "one")
    await again.close()


async def test_a_volume_is_shared_and_a_read_only_one_is_not_written(
    start: Starter, container: Container, tmp_path: Path
) -> None:
    source = str(container.pool.create_volume("shared"))
    writable = Mount(kind="volume", source=source, target="/data/shared", read_only=False)
    fixed = Mount(kind="volume", source=source, target="/fixed", read_only=True)
    one = await start("one", mounts=(writable,))
    two = await start("two", mounts=(writable, fixed))
    await one.shell("echo hi > /data/shared/x")
    assert await two.shell("cat /data/shared/x; stat -c %u /data/shared/x") == "hi\n0"
    assert "Read-only" in await two.shell("echo no > /fixed/y")
    for cell in (one, two):
        await container.stop(cell.handle)
    container.pool.delete_volume("shared")


async def test_a_target_behind_a_link_of_the_image_stays_inside(
    start: Starter, container: Container, tmp_path: Path
) -> None:
    outside = set(os.listdir("/tmp"))
    source = str(container.pool.create_volume("inside"))
    cell = await start(mounts=(Mount(kind="volume", source=source, target="/srv/out/deep/er", read_only=False),))
    assert "/tmp/deep/er" in await cell.shell("cat /proc/self/mountinfo")
    assert set(os.listdir("/tmp")) - outside == set()
    await container.stop(cell.handle)
    container.pool.delete_volume("inside")


async def test_sixteen_at_once(start: Starter, container: Container, tmp_path: Path) -> None:
    cells = await asyncio.gather(*(start(f"n{number}") for number in range(16)))
    told = await asyncio.gather(*(cell.shell("cat /proc/self/uid_map; echo x > /mine; ls /") for cell in cells))
    assert len({text.split()[1] for text in told}) == 16
    await asyncio.gather(*(container.stop(cell.handle) for cell in cells))
    assert nothing_left(container, tmp_path, "n1")
