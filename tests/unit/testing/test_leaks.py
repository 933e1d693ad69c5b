"""The leak plugin catches each kind of thing that a test can leave behind, and does not cry wolf."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.testing.leaks import Census
from dsec.testing.netns import Netns

pytest_plugins = ["pytester"]


def gained(census: Census, before: object) -> set[str]:
    return {kind for kind, _ in census.take() - before}  # type: ignore[operator]


@contextmanager
def command(make: list[str], undo: list[str]) -> Iterator[None]:
    subprocess.run(make, check=True, capture_output=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(undo, check=True, capture_output=True, timeout=30)


def test_descriptor(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    before = census.take()
    with (tmp_path / "f").open("w"):
        assert gained(census, before) >= {"descriptor"}
    assert "descriptor" not in gained(census, before)


def test_child_and_orphan(tmp_path: Path) -> None:
    census = Census(tmp_path, "orphan-of-this-test")
    before = census.take()
    child = subprocess.Popen(["sleep", "60"])
    assert ("process", f"{child.pid} sleep") in census.take() - before
    child.kill()
    child.wait()
    assert "process" not in gained(census, before)
    env = {**os.environ, "LEAKS_SESSION": "orphan-of-this-test"}
    pid = int(
        subprocess.run(
            ["sh", "-c", "setsid sleep 60 >&- 2>&- & echo $!"], env=env, capture_output=True, check=True
        ).stdout
    )
    try:
        assert "process" in gained(census, before)
    finally:
        os.kill(pid, 9)


def test_temporary_directory(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    before = census.take()
    (tmp_path / "stray").mkdir()
    assert gained(census, before) == {"temporary directory"}


@pytest.mark.root
def test_mount(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    point = tmp_path / "p"
    point.mkdir()
    before = census.take()
    with command(["mount", "-t", "tmpfs", "none", str(point)], ["umount", str(point)]):
        assert gained(census, before) == {"mount"}
    assert gained(census, before) == set()


@pytest.mark.root
def test_loop_device_and_subvolume(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    pool, image = tmp_path / "p", tmp_path / "i"
    pool.mkdir()
    with image.open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, timeout=60)
    before = census.take()
    with command(["mount", "-o", "loop", str(image), str(pool)], ["umount", str(pool)]):
        assert gained(census, before) == {"mount", "loop device"}
        mounted = census.take()
        subprocess.run(["btrfs", "subvolume", "create", str(pool / "one")], check=True, capture_output=True, timeout=30)
        assert gained(census, mounted) == {"subvolume"}


@pytest.mark.root
def test_a_loop_device_that_a_stranger_s_mounts_keep_is_no_leak_on_a_shared_host(tmp_path: Path) -> None:
    """Who unshares his mounts privately copies ours, and keeps them beyond our umount."""
    pool, image = tmp_path / "p", tmp_path / "i"
    pool.mkdir()
    with image.open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, timeout=60)
    shared, alone = (Census(tmp_path, "x", whole_host=whole) for whole in (False, True))
    before = shared.take(), alone.take()
    with command(["mount", "-o", "loop", str(image), str(pool)], ["umount", str(pool)]):
        unshared = [
            "setsid",
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            "echo $$; exec sleep 60 2>&- >&-",
        ]
        with subprocess.Popen(
            [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen({unshared})"], stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdout is not None
            stranger = int(parent.stdout.readline())
        assert "loop device" in gained(shared, before[0])
    try:
        assert gained(shared, before[0]) == set()
        assert "loop device" in gained(alone, before[1])
    finally:
        os.kill(stranger, 9)
    assert eventually(lambda: "loop device" not in gained(alone, before[1]))


def eventually(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 5
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return condition()


@pytest.mark.root
def test_cgroup(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    before = census.take()
    tree = next(path for path in Path("/sys/fs/cgroup").rglob("cgroup.procs")).parent
    group = tree / f"dsec-leaktest-{os.getpid()}"
    group.mkdir()
    try:
        assert ("cgroup", str(group)) in census.take() - before
    finally:
        group.rmdir()


@pytest.mark.root
def test_a_shared_host_counts_only_groups_of_our_states(tmp_path: Path) -> None:
    census = Census(tmp_path, "x", whole_host=False)
    (tmp_path / "t" / "state").mkdir(parents=True)
    mine = "dsec-" + hashlib.sha256(str(tmp_path / "t" / "state").encode()).hexdigest()[:8]
    tree = next(path for path in Path("/sys/fs/cgroup").rglob("cgroup.procs")).parent
    for name, counts in ((f"dsec-stranger{os.getpid()}", False), (mine, True)):
        before = census.take()
        (tree / name).mkdir()
        try:
            assert (("cgroup", str(tree / name)) in census.take() - before) is counts
        finally:
            (tree / name).rmdir()


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("ip"), reason="iproute2 is not installed")
def test_network_namespace_and_link(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    before = census.take()
    name = f"dsl{os.getpid()}"
    with command(["ip", "netns", "add", name], ["ip", "netns", "delete", name]):
        assert ("network namespace", name) in census.take() - before
    with command(["ip", "link", "add", name, "type", "veth"], ["ip", "link", "delete", name]):
        assert ("network link", name) in census.take() - before


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("nft"), reason="nftables is not installed")
def test_table_of_nftables(tmp_path: Path) -> None:
    """Only of a node's state: whose links and tables carry its hash."""
    census = Census(tmp_path, "x", whole_host=False)
    (tmp_path / "state" / "run").mkdir(parents=True)
    mine = "dsec_" + hashlib.sha256(str(tmp_path / "state" / "run").encode()).hexdigest()[:8]
    with Netns("tables") as place, place.inside():
        before = census.take()
        for name in (mine, "dsec_stranger", "other"):
            subprocess.run(["nft", "add", "table", "inet", name], check=True, timeout=30)
        assert census.take() - before == {("nft table", mine): 1}


@pytest.mark.root
def test_run_file(tmp_path: Path) -> None:
    census = Census(tmp_path, "x")
    before = census.take()
    file = Path("/run/dsec") / f"leaktest-{os.getpid()}"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    try:
        assert ("run file", str(file)) in census.take() - before
    finally:
        file.unlink()


INNER = """
import pytest, socket

KEEP = []

@pytest.fixture(scope="session")
def wide():
    pair = socket.socketpair()
    yield pair
    pair[0].close(), pair[1].close()

@pytest.fixture(scope="module")
def careless():
    KEEP.append(socket.socketpair())
    yield

def test_leaks():
    KEEP.append(open("/dev/zero"))

def test_is_not_blamed_for_the_one_before(): pass

def test_uses_a_wide_fixture(wide): pass

@pytest.mark.leaves("proof that the mark works")
def test_may_leave():
    KEEP.append(open("/dev/full"))

def test_closes_what_it_opens(wide):
    with open("/dev/zero"): pass

def test_ends_a_careless_fixture(careless): pass
"""


def test_plugin_fails_the_test_that_leaks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(INNER)
    monkeypatch.setattr(sys, "path", sys.path)
    result = pytester.runpytest_subprocess("-p", "dsec.testing.leaks", "-p", "no:cacheprovider", "-rE", timeout=60)
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines(["*left behind*", "*descriptor: /dev/zero (x1)*"])
    result.stdout.fnmatch_lines(["ERROR *::test_leaks*", "ERROR *::test_ends_a_careless_fixture*"])
