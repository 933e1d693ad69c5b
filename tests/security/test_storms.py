"""Storms: a sandbox takes as much as it gets of everything. Each is refused by its own name, costs the server little, ends at once."""

import asyncio
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import dsec
from bench.footprint import peak_resident, reset_peak
from bench.neighbours import add_program
from bench.rootfs import make_rootfs
from dsec.testing.node import Node

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

MIB = 1 << 20
STOP_SECONDS = 5.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("storms")
    root = make_rootfs(folder / "rootfs")
    add_program(root)
    for applet in ("find", "wc", "seq", "head", "test"):
        (root / "bin" / applet).symlink_to("busybox")
    with Node(folder / "state") as node:
        node.dsec("image", "import", "storm:1", str(root))
        with dsec.sync.DSecClient(url=node.url, api_key=node.api_key) as client:  # its layer is mounted from now on
            client.run_container(dsec.DSecContainerRunArgs(container_image="storm:1")).stop()
        yield node


@asynccontextmanager
async def stormed(node: Node, grown: int = 48, **args: object) -> AsyncIterator[dsec.Sandbox]:
    """A sandbox held to half a core. Afterwards: it answers, it stops in time, and the server grew by `grown` MiB at most."""
    given = {"memory_limit_mb": 256, "disk_limit_mb": 64, "pids_limit": 128, "cpu_cores_limit": 0.5, **args}
    async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
        before = reset_peak(node.pid)
        box = await client.run_container(dsec.DSecContainerRunArgs(container_image="storm:1", **given))  # type: ignore[arg-type]
        try:
            yield box
            assert (await box.files.stat("/")).kind == "dir"
            assert (await box.info()).state == "running"
        finally:
            begun = time.monotonic()
            await box.stop()
            took = time.monotonic() - begun
        assert took < STOP_SECONDS
        assert peak_resident(node.pid) - before < grown * MIB


async def got(box: dsec.Sandbox, *words: str, timeout: float = 60) -> tuple[int, str, str]:
    """How much the storm got, what ended it, and the command's outcome."""
    result = await box.exec(["storm", *words], timeout=timeout)
    count, end = result.text.split()
    return int(count), end, result.outcome


async def test_forks_end_as_the_limit_of_processes(node: Node) -> None:
    async with stormed(node) as box:
        result = await box.run_shell("storm forks 100000; exit 1", timeout=20)
        assert result.outcome == "pids_limit" and result.limit == 128
        bomb = asyncio.create_task(box.exec(["storm", "forks", "100000", "hold"], timeout=3))
        result = await bomb
        assert result.outcome == "timeout"


async def test_threads_are_processes(node: Node) -> None:
    async with stormed(node) as box:
        count, end, _ = await got(box, "threads", "100000")
        assert count < 128 and end == "EAGAIN"
        assert (await box.exec(["true"])).exit_code == 0


async def test_descriptors_end_at_the_limit_of_each_process(node: Node) -> None:
    async with stormed(node, open_files_limit=1024) as box:
        count, end, _ = await got(box, "files", "1000000")
        assert 1024 < count < 128 * 1024 and end in ("EAGAIN", "EMFILE", "ENOMEM")


async def test_sockets_end_at_a_limit(node: Node) -> None:
    async with stormed(node, open_files_limit=1024) as box:
        result = await box.exec(["storm", "sockets", "10000"], timeout=60)
        assert result.outcome in ("signalled", "out_of_memory", "timeout")
        if result.text:
            assert int(result.text.split()[0]) <= 10000


async def test_watches_count_as_memory(node: Node) -> None:
    async with stormed(node, memory_limit_mb=32, cpu_cores_limit=1.0) as box:
        result = await box.exec(["storm", "watches", "100000"], timeout=3)
        assert result.outcome in ("out_of_memory", "timeout")
        assert (await box.metrics()).memory_peak_bytes <= 32 * MIB


async def test_a_full_disk_is_told_and_files_still_go(node: Node) -> None:
    async with stormed(node) as box:
        result = await box.run_shell("storm disk 100000; storm disk 1; head -c 100000 /dev/zero > /tmp/more")
        assert result.outcome == "disk_limit" and result.limit == 64 * MIB
        assert await box.files.list("/tmp")
        await box.files.remove("/tmp/full")
        await box.files.write("/tmp/again", b"x" * MIB)


@pytest.mark.parametrize(
    "kind", ["attributes", "kept", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("names", "long"))]
)
async def test_what_holds_no_bytes_counts_all_the_same(node: Node, kind: str) -> None:
    async with stormed(node, disk_limit_mb=12, cpu_cores_limit=1.0) as box:
        count, end, _ = await got(box, kind, "1000000", timeout=90)
        assert count > 0 and end == "EDQUOT"
        usage = await box.metrics()
        assert usage.disk_bytes is not None and usage.disk_bytes <= 13 * MIB


async def test_memory_ends_the_program_by_name(node: Node) -> None:
    async with stormed(node) as box:
        result = await box.exec(["dd", "if=/dev/zero", "of=/dev/null", "bs=1024M", "count=1"])
        assert (result.outcome, result.limit) == ("out_of_memory", 256 * MIB)


async def test_output_of_both_streams_is_kept_short(node: Node) -> None:
    async with stormed(node) as box:
        both = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero >&2; wait"
        result = await box.run_shell(both, timeout=100, output_limit=1 << 16)
        assert result.exit_code == 0 and len(result.stdout) <= 1 << 16 and len(result.stderr) <= 1 << 16
        result = await box.exec(["yes"], timeout=2, output_limit=1 << 16)
        assert result.outcome == "timeout" and len(result.stdout) <= 1 << 16


async def test_output_that_nobody_reads_stops_the_program_and_not_the_server(node: Node) -> None:
    async with stormed(node) as box:
        processes = [await box.start(["yes"]) for _ in range(8)]
        streams = [process.stream() for process in processes]
        for stream in streams:
            await anext(stream)
        await asyncio.sleep(2.0)  # output that piles up, if it does
        for stream in streams:
            await stream.aclose()


async def many(box: dsec.Sandbox, count: int) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for _ in numbers:
            assert (await box.exec(["true"])).exit_code == 0

    await asyncio.gather(*(worker() for _ in range(16)))


async def test_short_commands(node: Node) -> None:
    async with stormed(node) as box:
        await many(box, 500)
        assert (await box.metrics()).pids <= 2


async def test_a_program_that_ignores_everything_ends(node: Node) -> None:
    async with stormed(node) as box:
        result = await box.exec(["storm", "silent", "1"], timeout=1)
        assert result.outcome == "timeout"
        assert (await box.metrics()).pids <= 1


async def test_deep_trees_are_listed_and_removed(node: Node) -> None:
    async with stormed(node) as box:
        assert (await got(box, "deep", "10000"))[0] == 10000
        try:
            await box.files.list("/tmp", depth=64)
        except dsec.DSecError as error:
            assert error.code in ("limit_reached", "invalid_argument"), error
        await box.files.remove("/tmp/d", recursive=True)
        assert (await box.files.list("/tmp")) == []


async def test_searching_everything_finds_an_end(node: Node) -> None:
    async with stormed(node) as box:
        result = await box.exec(["grep", "-r", "nowhere-to-be-found", "/"], timeout=2)
        assert result.outcome in ("exited", "timeout")


async def test_terminal_floods(node: Node) -> None:
    async with stormed(node) as box:
        flood = r"""while :; do printf '\033[6n\033c\033]0;x\007\033[2J\033P$qm\033\\\377\0'; done"""
        process = await box.start(["sh", "-c", flood], pty=dsec.Pty(cols=80, rows=24))
        stream, size = process.stream(), 0
        async for output in stream:
            size += len(output.data)
            if size > MIB:
                break
        await stream.aclose()
        await process.stop()


def pool_used(node: Node) -> int:
    """Bytes of the pool's data and metadata, when it is at rest."""
    subprocess.run(["btrfs", "filesystem", "sync", node.state / "pool"], check=True, capture_output=True)
    said = subprocess.run(
        ["btrfs", "filesystem", "df", "-b", node.state / "pool"], check=True, capture_output=True, text=True
    )
    return sum(int(used) for used in re.findall(r"^(?:Data|Metadata).*used=(\d+)", said.stdout, re.MULTILINE))


def settled(node: Node) -> int:
    """What the pool uses once the kernel has freed what was deleted."""
    subprocess.run(["btrfs", "subvolume", "sync", node.state / "pool"], check=True, capture_output=True, timeout=60)
    return pool_used(node)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clones", "links", "names", "attributes", "disk"])
async def test_what_the_pool_gives_beyond_the_limit_is_bounded(node: Node, kind: str) -> None:
    """Records of shared extents belong to no subvolume: they may take once more what the limit allows, not twice."""
    before = settled(node)
    async with stormed(node, disk_limit_mb=16, cpu_cores_limit=1.0) as box:
        await box.exec(["storm", kind, "1000000"], timeout=120)
        assert pool_used(node) - before < 2 * 16 * MIB
    assert settled(node) - before < MIB


@pytest.mark.slow
async def test_ten_thousand_short_commands(node: Node) -> None:
    async with stormed(node, cpu_cores_limit=2.0) as box:
        await many(box, 10_000)
        assert (await box.metrics()).pids <= 2


@pytest.mark.slow
async def test_a_minute_of_yes(node: Node) -> None:
    async with stormed(node) as box:
        result = await box.exec(["yes"], timeout=60)
        assert result.outcome == "timeout"


@pytest.mark.slow
async def test_a_gibibyte_on_each_stream(node: Node) -> None:
    async with stormed(node, cpu_cores_limit=2.0) as box:
        result = await box.run_shell(
            "head -c 1073741824 /dev/zero & head -c 1073741824 /dev/zero >&2; wait", timeout=200
        )
        assert result.exit_code == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_million_small_files(node: Node) -> None:
    async with stormed(node, disk_limit_mb=2048, memory_limit_mb=1024, cpu_cores_limit=2.0) as box:
        count, _, _ = await got(box, "names", "1000000", timeout=1000)
        assert count == 1_000_000
