"""Resources: rows RE, scaled down."""

import asyncio
import time

import pytest

import dsec
from conformance.boxes import Boxes, eventually

pytestmark = pytest.mark.root

EAT = "dd if=/dev/zero of=/dev/null bs=200M count=1 2>/dev/null"


async def events(boxes: Boxes, box: dsec.Sandbox) -> list[str]:
    transport = boxes.client._transport
    found = await transport.fetch("GET", f"/v1/sandboxes/{box.id}/events")
    return found.decode()


async def test_re1_out_of_memory_is_told(boxes: Boxes) -> None:
    box = await boxes.make(memory_limit_mb=64, shm_size_mb=128)
    result = await box.exec(["dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1"])
    assert (result.outcome, result.signal, result.limit) == ("out_of_memory", 9, 64 << 20)
    result = await box.run_shell(f"{EAT}; exit $?")
    assert (result.outcome, result.exit_code) == ("out_of_memory", 137)
    assert (await box.exec(["true"])).exit_code == 0
    process = await box.start(["sh", "-c", f"{EAT}; exit 3"])
    assert not (await process.wait()).running
    kills = (await box.metrics()).oom_kills
    assert kills >= 3
    assert "out_of_memory" in await events(boxes, box)
    result = await box.run_shell("dd if=/dev/zero of=/dev/shm/f bs=1M count=120 2>/dev/null; rm -f /dev/shm/f")
    assert (await box.metrics()).oom_kills > kills or result.outcome == "out_of_memory"
    assert (await box.info()).state == "running"


async def test_re1_page_cache_is_no_kill(boxes: Boxes) -> None:
    box = await boxes.make(memory_limit_mb=64, disk_limit_mb=512)
    result = await box.run_shell("dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null && cat /big > /dev/null")
    assert (result.outcome, result.exit_code) == ("exited", 0)
    assert (await box.metrics()).oom_kills == 0


@pytest.mark.parametrize("where", ["/f", "/tmp/f", "/var/f"])
async def test_re3_the_disk_limit_holds(boxes: Boxes, where: str) -> None:
    box = await boxes.make(disk_limit_mb=48)
    result = await box.run_shell(f"dd if=/dev/zero of={where} bs=1M count=200")
    assert result.outcome == "disk_limit", result
    assert result.exit_code == 1 and result.limit == 48 << 20
    assert (await box.files.stat(where)).size <= 49 << 20
    await box.files.remove(where)
    assert (
        await box.run_shell("dd if=/dev/zero of=/again bs=1M count=8 2>/dev/null && sync && rm /again")
    ).exit_code == 0


async def test_re3_deleted_but_open_counts(boxes: Boxes) -> None:
    box = await boxes.make(disk_limit_mb=48)
    result = await box.run_shell("exec 3> /f; rm /f; dd if=/dev/zero bs=1M count=200 >&3")
    assert result.exit_code == 1
    assert (await box.exec(["true"])).exit_code == 0


async def test_re3_shm_is_bounded(boxes: Boxes) -> None:
    box = await boxes.make(shm_size_mb=8)
    result = await box.run_shell("dd if=/dev/zero of=/dev/shm/f bs=1M count=64")
    assert result.exit_code == 1
    assert (await box.files.stat("/dev/shm/f")).size <= 8 << 20


@pytest.mark.timeout(120)
async def test_re4_a_fork_storm_stays_inside(boxes: Boxes) -> None:
    wild, calm = await boxes.make(pids_limit=64), await boxes.make()

    async def latency() -> float:
        taken = []
        for _ in range(20):
            began = time.monotonic()
            await calm.exec(["true"])
            taken.append(time.monotonic() - began)
        return sorted(taken)[-2]

    await latency()
    storm = asyncio.create_task(wild.run_shell("f() { f | f & }; sleep 60 & p=$!; f & wait $p", timeout=3))
    await asyncio.sleep(0.5)
    assert await latency() < 2.0
    assert (await wild.metrics()).pids <= 64
    result = await storm
    assert result.outcome == "timeout"

    async def calmed() -> bool:
        return (await wild.metrics()).pids <= 2

    await eventually(calmed)
    assert (await wild.exec(["true"])).exit_code == 0
    storm = asyncio.create_task(wild.run_shell("f() { f | f & }; f; sleep 60"))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await wild.stop()
    assert time.monotonic() - began < 5
    with pytest.raises(dsec.SandboxLost):
        await storm


async def test_re4_a_refused_fork_is_told(boxes: Boxes) -> None:
    box = await boxes.make(pids_limit=16)
    result = await box.run_shell("for i in $(seq 40); do sleep 3 & done; wait; exit 1", timeout=20)
    assert result.outcome == "pids_limit" and result.limit == 16


async def test_re4_open_files_are_bounded(boxes: Boxes) -> None:
    box = await boxes.make(open_files_limit=64)
    assert (await box.run_shell("ulimit -n; ulimit -Hn")).text.split() == ["64", "64"]


async def test_re2_programs_see_their_limits(boxes: Boxes) -> None:
    box = await boxes.make(memory_limit_mb=96, cpu_cores_limit=0.5)
    shown = "head -n 3 /proc/meminfo; cut -d ' ' -f 1-3 /proc/loadavg; grep -c ^processor /proc/cpuinfo; cat /sys/devices/system/cpu/online"
    result = await box.run_shell(
        shown.replace("head", "busybox head").replace("cut", "busybox cut").replace("grep", "busybox grep")
    )
    words = result.stdout.decode().split()
    assert [word for word in words if word.isdecimal()][:3] == [str(96 << 10)] * 3
    assert words[-5:] == ["0.00", "0.00", "0.00", "1", "0"]
    for act in ("echo 1 > /proc/meminfo", "busybox umount /proc/meminfo"):
        assert (await box.run_shell(act)).exit_code != 0, act
    assert b"/run/" not in (await box.files.read("/proc/self/mountinfo"))
