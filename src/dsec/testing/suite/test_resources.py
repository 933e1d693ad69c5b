"""Resources: limits hold, what reached one is told, and neighbours do not feel it (rows RE)."""

import asyncio
import time

import pytest

from dsec.testing.suite.boxes import Box, Boxes, eventually
from dsec.testing.suite.callers import Refused

pytestmark = pytest.mark.asyncio

EAT = "dd if=/dev/zero of=/dev/null bs=200M count=1 2>/dev/null"
MIB = 1 << 20


async def told(box: Box) -> bool:
    return any("out_of_memory" in each.fields.values() for each in await box.caller.story(box.id))


async def test_out_of_memory_in_a_command_is_its_outcome(boxes: Boxes) -> None:
    """RE1 (a): the result says so, with the limit; the sandbox and its agent go on."""
    box = await boxes.make(memory_limit_mb=64)
    result = await box.exec(["dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1"])
    assert (result.outcome, result.signal, result.limit) == ("out_of_memory", 9, 64 << 20)
    result = await box.shell(f"{EAT}; exit $?")
    assert (result.outcome, result.exit_code) == ("out_of_memory", 137)
    assert (await box.exec(["true"])).exit_code == 0
    assert (await box.usage()).oom_kills >= 2 and await told(box)
    assert (await boxes.caller.look(box.id)).state == "running"


async def test_out_of_memory_in_the_background_is_an_event(boxes: Boxes) -> None:
    """RE1 (b): nobody waits for the process and nobody asks what is used, and still it is told."""
    box = await boxes.make(memory_limit_mb=64)
    await box.start(f"{EAT}; exec sleep 600")
    await eventually(lambda: told(box))
    assert (await box.exec(["true"])).exit_code == 0


async def test_shared_memory_is_accounted(boxes: Boxes) -> None:
    """RE1 (c): what lies in /dev/shm counts as memory, and too much of it is out of memory."""
    box = await boxes.make(memory_limit_mb=64, shm_size_mb=128)
    await box.said("dd if=/dev/zero of=/dev/shm/f bs=1M count=40 2>/dev/null")
    assert (await box.usage()).memory_bytes >= 40 * MIB
    result = await box.shell("dd if=/dev/zero of=/dev/shm/f bs=1M count=120 2>/dev/null; exit $?")
    assert result.outcome == "out_of_memory"
    await box.caller.remove(box.id, "/dev/shm/f")
    assert (await box.usage()).memory_bytes < 40 * MIB


async def test_page_cache_is_no_kill(boxes: Boxes) -> None:
    """RE1 (d): files larger than the memory limit are written and read."""
    box = await boxes.make(memory_limit_mb=64, disk_limit_mb=512)
    result = await box.shell("dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null && cat /big > /dev/null")
    assert (result.outcome, result.exit_code) == ("exited", 0)
    assert (await box.usage()).oom_kills == 0


@pytest.mark.parametrize(("cores", "shown"), [(0.5, 1), (1, 1), (2, 2), (4, 4)])
async def test_programs_see_their_limits(boxes: Boxes, cores: float, shown: int) -> None:
    """RE2: /proc and /sys show the limits, CPUs rounded up (docs/security.md lists what asks the kernel and sees the
    host's; a count above the host's shows the host's)."""
    box = await boxes.make(memory_limit_mb=96, cpu_cores_limit=cores)
    memory = [line.split() for line in (await box.said("cat /proc/meminfo")).splitlines()]
    assert {name: int(value) for name, value, *_ in memory[:3]} == {
        "MemTotal:": 96 << 10, "MemFree:": 96 << 10, "MemAvailable:": 96 << 10,
    }  # fmt: skip
    assert (await box.said("cat /proc/loadavg")).split()[:3] == ["0.00"] * 3
    host = int(await box.said("grep -c ^cpu[0-9] /proc/stat"))
    cpus = min(shown, host)
    assert int(await box.said("grep -c ^processor /proc/cpuinfo")) == cpus
    for name in ("online", "possible", "present"):
        text = (await box.said(f"cat /sys/devices/system/cpu/{name}")).strip()
        assert text == ("0" if cpus == 1 else f"0-{cpus - 1}")
    for act in ("echo 1 > /proc/meminfo", "umount /proc/meminfo"):
        assert (await box.shell(act)).exit_code != 0, act


async def test_a_cpu_limit_is_kept(boxes: Boxes) -> None:
    """RE2: two busy loops under half a CPU use half a CPU."""
    box = await boxes.make(cpu_cores_limit=0.5)
    before, began = (await box.usage()).cpu_seconds, time.monotonic()
    await box.shell("while :; do :; done & while :; do :; done", timeout=2)
    assert (await box.usage()).cpu_seconds - before < 0.5 * (time.monotonic() - began) + 0.2


FILLS = {
    "bytes": "dd if=/dev/zero of=/f bs=1M count=200",
    "/tmp": "dd if=/dev/zero of=/tmp/f bs=1M count=200",
    "/var": "dd if=/dev/zero of=/var/f bs=1M count=200",
    "deleted but open": "exec 3> /f; rm /f; dd if=/dev/zero bs=1M count=200 >&3",
    "small files": "mkdir /s; cd /s; i=0; while [ $i -lt 100000 ]; do dd if=/bin/busybox of=$i bs=64k count=1 2>/dev/null || exit 1; i=$((i+1)); done",
}


@pytest.mark.costly
@pytest.mark.parametrize("how", sorted(FILLS))
async def test_the_disk_limit_has_no_hole(boxes: Boxes, how: str) -> None:
    """RE3: every way to fill it ends at the limit and says so; the agent works on, and what is deleted comes back."""
    box = await boxes.make(disk_limit_mb=48)
    result = await box.shell(FILLS[how], timeout=100)
    assert (result.outcome, result.exit_code, result.limit) == ("disk_limit", 1, 48 * MIB), result
    used = (await box.usage()).disk_bytes
    assert used is not None and used <= 49 * MIB
    assert await box.names("/etc")
    await box.said("rm -rf /f /tmp/f /var/f /s")
    await eventually(lambda: room(box, 40), 30)


async def room(box: Box, size: int) -> bool:
    result = await box.shell(
        f"dd if=/dev/zero of=/again bs=1M count={size} 2>/dev/null && sync; e=$?; rm /again; exit $e"
    )
    return result.exit_code == 0


async def test_shared_memory_ends_at_its_size(boxes: Boxes) -> None:
    """RE3: /dev/shm has its size, and deleting gives it back."""
    box = await boxes.make(shm_size_mb=8)
    for _ in range(2):
        assert (await box.shell("dd if=/dev/zero of=/dev/shm/f bs=1M count=64")).exit_code == 1
        assert 7 * MIB <= (await box.caller.stat(box.id, "/dev/shm/f")).size <= 8 * MIB
        await box.caller.remove(box.id, "/dev/shm/f")


async def test_every_writable_mount_is_bounded(boxes: Boxes) -> None:
    """RE3: whatever mount can be written to, 200 MiB do not fit below a disk limit of 48 and shared memory of 8."""
    box = await boxes.make(disk_limit_mb=48, shm_size_mb=8)
    points = {line.split()[1] for line in (await box.said("cat /proc/mounts")).splitlines()}
    written = 0
    for point in sorted(points):
        place = point.replace("\\040", " ").rstrip("/") + "/dsec-fill"
        result = await box.shell(f"dd if=/dev/zero of='{place}' bs=1M count=200", timeout=60)
        assert result.exit_code != 0, point
        written += (await box.shell(f"[ -f '{place}' ] && rm '{place}'")).exit_code == 0
    assert written >= 2


async def test_what_is_printed_is_not_kept_on_disk(boxes: Boxes) -> None:
    """RE3: output that nobody reads is bounded and no part of the quota."""
    box = await boxes.make(disk_limit_mb=48)
    process = await box.start("dd if=/dev/zero bs=1M count=200 2>/dev/null")
    view = await box.caller.wait(box.id, process.id)
    assert (view.exit_code, view.stdout_bytes_total) == (0, 200 * MIB)
    assert ((await box.usage()).disk_bytes or 0) < 8 * MIB


MAKE_FILES = r"""
mkdir -p /many && cd /many || exit 3
d=0
while [ $d -lt $DIRS ]; do
  mkdir $d && (cd $d && seq $EACH | xargs touch) || exit 1
  d=$((d+1))
done
"""


async def filled_with_empty_files(boxes: Boxes, folders: int, each: int, limit_mb: int) -> None:
    """Names cost room as well: they end at the limit, or all of them are there."""
    box = await boxes.make(disk_limit_mb=limit_mb, memory_limit_mb=1024)
    env = {"DIRS": str(folders), "EACH": str(each)}
    result = await box.shell(MAKE_FILES, env=env, timeout=560)
    used = (await box.usage()).disk_bytes or 0
    print(f"{folders * each} empty files: {result.outcome} {result.exit_code}, {used / MIB:.0f} MiB")
    assert result.exit_code == 0 or result.outcome in ("disk_limit", "timeout")
    assert used <= (limit_mb + 2) * MIB
    assert (await box.exec(["true"])).exit_code == 0


@pytest.mark.costly
async def test_empty_files_end_at_the_limit(boxes: Boxes) -> None:
    """RE3: names without bytes are counted too."""
    await filled_with_empty_files(boxes, 100, 2000, 16)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
async def test_ten_million_empty_files_end_at_the_limit(boxes: Boxes) -> None:
    """RE3: ten million names against 1 GiB."""
    await filled_with_empty_files(boxes, 2000, 5000, 1024)


async def slowest_but_one(box: Box) -> float:
    taken = []
    for _ in range(20):
        began = time.monotonic()
        await box.exec(["true"])
        taken.append(time.monotonic() - began)
    return sorted(taken)[-2]


STORMS = {
    "forks": "f() { f | f & }; f",
    "processes": "while :; do sleep 60 & done",
    "descriptors": 'i=3; while [ $i -lt 100000 ]; do eval "exec $i< /dev/null" || exit 1; i=$((i+1)); done; sleep 60',
    "watches": "while :; do inotifyd - /etc & done",
    "sockets": "i=0; while :; do nc -l -p $((2000 + i % 60000)) & i=$((i+1)); done",
}


@pytest.mark.costly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("storm", sorted(STORMS))
async def test_a_storm_stays_inside(boxes: Boxes, storm: str) -> None:
    """RE4: refused at the limit, a neighbour answers, the timeout ends all of it, and so does a delete, within 5 s."""
    wild, calm = await boxes.make(pids_limit=64), await boxes.make()
    await slowest_but_one(calm)
    running = asyncio.ensure_future(wild.shell(stormy(storm), timeout=2))
    await asyncio.sleep(0.3)
    assert await slowest_but_one(calm) < 2.0
    usage = await wild.usage()
    assert usage.pids <= 64
    result = await running
    assert result.outcome == "timeout"
    await eventually(lambda: calmed(wild))
    assert (await wild.exec(["true"])).exit_code == 0
    running = asyncio.ensure_future(wild.shell(stormy(storm)))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    await wild.stop()
    assert time.monotonic() - began < 5
    outcome = (await asyncio.gather(running, return_exceptions=True))[0]
    assert not isinstance(outcome, Refused) or outcome.code == "sandbox_lost"


def stormy(storm: str) -> str:
    """The storm in a shell of its own, which may die of it, beside one that stays."""
    return f"sleep 60 & p=$!; sh -c '{STORMS[storm]}'; wait $p"


async def calmed(box: Box) -> bool:
    return (await box.usage()).pids <= 2


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("storm", sorted(STORMS))
async def test_thirty_seconds_of_storm_beside_a_calm_one(boxes: Boxes, storm: str) -> None:
    """RE4 at the row's length: the neighbour's slow commands take less than twice as long as beside one busy loop."""
    wild, calm = await boxes.make(pids_limit=512, cpu_cores_limit=1), await boxes.make()
    running = asyncio.ensure_future(wild.shell("while :; do :; done", timeout=5))
    baseline = max([await slowest_but_one(calm) for _ in range(5)])
    await running
    running = asyncio.ensure_future(wild.shell(stormy(storm), timeout=30))
    measured = sorted([await slowest_but_one(calm) for _ in range(25)])
    print(f"{storm}: {baseline * 1e3:.1f} ms calm, {measured[-1] * 1e3:.1f} ms in the storm")
    assert measured[len(measured) // 2] < 2 * baseline + 0.05
    await running


async def test_a_refused_fork_is_told(boxes: Boxes) -> None:
    """RE4: a command that failed because no process could be made says so."""
    box = await boxes.make(pids_limit=16)
    result = await box.shell("for i in $(seq 40); do sleep 3 & done; wait; exit 1", timeout=20)
    assert (result.outcome, result.limit) == ("pids_limit", 16)


async def test_open_files_are_bounded(boxes: Boxes) -> None:
    """RE4: the limit of open files is the one asked for, and cannot be raised."""
    box = await boxes.make(open_files_limit=64)
    assert (await box.said("ulimit -n; ulimit -Hn")).split() == ["64", "64"]
    assert (await box.shell("ulimit -n 65")).exit_code != 0
