"""Limits hold, and the platform outlives whoever reaches them."""

import resource
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from security.cell import LIMITS, Starter

pytestmark = pytest.mark.root

RLIMIT_NICE = 13  # the module has no name for it


async def test_memory(start: Starter) -> None:
    cell = await start()
    assert (await cell.run("probe", "touch", "64")).out == "done"
    ran = await cell.run("probe", "touch", "512")
    assert ran.outcome == "signalled"
    usage = await cell.backend.usage(cell.handle)
    assert usage.oom_kills >= 1
    assert usage.memory_limit_bytes == LIMITS.memory_bytes
    assert usage.memory_peak_bytes <= LIMITS.memory_bytes
    assert (await cell.run("true")).code == 0


async def test_shared_memory_has_a_size_and_is_charged(start: Starter) -> None:
    cell = await start()
    said = await cell.shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=64 2>&1; stat -c %s /dev/shm/x")
    assert int(said.split()[-1]) == LIMITS.shm_bytes
    assert (await cell.backend.usage(cell.handle)).memory_bytes >= LIMITS.shm_bytes


async def test_buffers_of_sockets_are_counted(start: Starter) -> None:
    """v1 does not count them at all unless they have a limit: one sandbox took as much of the host as it had descriptors for."""
    await start()
    limits = [
        int(path.read_text()) for path in Path("/sys/fs/cgroup/memory").glob("dsec-*/*/memory.kmem.tcp.limit_in_bytes")
    ]
    if not Path("/sys/fs/cgroup/memory/memory.kmem.tcp.limit_in_bytes").exists():
        pytest.skip("these groups count them by themselves")
    assert LIMITS.memory_bytes // 4 in limits


async def test_processes(start: Starter) -> None:
    cell = await start()
    ran = await cell.run("probe", "fork", "500")
    made = int(ran.out.split()[0])
    assert made < LIMITS.pids
    assert ran.out.split()[1] == "EAGAIN"
    assert (await cell.run("true")).code == 0


async def test_disk(start: Starter) -> None:
    cell = await start()
    said = await cell.shell("dd if=/dev/zero of=/tmp/x bs=1M count=100 2>&1; stat -c %s /tmp/x")
    assert "quota" in said.lower()
    assert int(said.split()[-1]) <= LIMITS.disk_bytes
    assert (await cell.run("true")).code == 0
    said = await cell.shell("rm /tmp/x; dd if=/dev/zero of=/tmp/y bs=1M count=4 2>&1; stat -c %s /tmp/y")
    assert int(said.split()[-1]) == 4 << 20


async def test_open_files(start: Starter) -> None:
    cell = await start()
    assert await cell.shell("ulimit -Hn") == str(LIMITS.open_files)


async def test_no_core_files(start: Starter) -> None:
    cell = await start()
    assert await cell.shell("ulimit -Hc") == "0"


async def test_no_right_to_go_before_others_is_handed_down(start: Starter) -> None:
    """A server that may raise priorities, as its service may say, gives that to nobody."""
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_RTPRIO, RLIMIT_NICE)}
    for kind in before:
        with suppress(ValueError):  # a root without CAP_SYS_RESOURCE has none to hand down
            resource.setrlimit(kind, (30, 30))
    try:
        cell = await start()
        assert await cell.shell("ulimit -Hr; ulimit -He") == "0\n0"
        assert await cell.probe("try", "nice") == "EACCES"
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


async def test_cpu_is_shared_by_quota(start: Starter) -> None:
    limits = msgspec.structs.replace(LIMITS, cpu_cores=0.2)
    cell = await start(limits=limits)
    await cell.run("sh", "-c", "while :; do :; done", timeout_ms=1500)
    assert (await cell.backend.usage(cell.handle)).cpu_seconds < 0.75
