"""Both cgroup implementations on a directory tree that stands for the kernel's: which files are made, read and removed."""

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import cgroup
from dsec.kernel.cgroup import Cgroups, GroupLimits, Hybrid, Unified, choose_cgroups
from dsec.kernel.errors import KernelError

LIMITS = GroupLimits(memory_bytes=64 << 20, cpu_cores=0.5, pids=32)
V2 = {
    "cgroup.procs": "",
    "cgroup.kill": "",
    "cgroup.subtree_control": "",
    "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.current": "4096",
    "memory.peak": "8192",
    "memory.events": "low 0\noom 2\noom_kill 1\n",
    "cpu.max": "max 100000",
    "cpu.weight": "100",
    "pids.max": "max",
    "pids.current": "3",
    "pids.events": "max 7\n",
}
V1 = {
    "memory": {
        "tasks": "",
        "memory.limit_in_bytes": "67108864",
        "memory.kmem.tcp.limit_in_bytes": "9223372036854771712",
        "memory.usage_in_bytes": "4096",
        "memory.max_usage_in_bytes": "8192",
        "cgroup.event_control": "",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    },
    "cpu": {"tasks": "", "cgroup.procs": "", "cpu.cfs_quota_us": "-1", "cpu.shares": "1024"},
    "pids": {"tasks": "", "pids.max": "max", "pids.current": "3", "pids.events": "max 7\n"},
}


class Tree:
    """A directory in which a new group has its control files at once, and which lets go of them with the group."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self, path: Path) -> dict[str, str]:
        top = path.relative_to(self.root).parts[:1]
        return V1[top[0]] if top and top[0] in V1 and self.hybrid else V2

    @property
    def hybrid(self) -> bool:
        return (self.root / "unified").is_dir()

    def mkdir(self, path: Path) -> None:
        if path.is_dir():
            return
        try:
            path.mkdir()
        except OSError as error:
            raise KernelError("mkdir", str(path), error.errno or 0) from error
        for name, content in self.files(path).items():
            (path / name).write_text(content)

    def rmdir(self, path: str | Path) -> None:
        here = Path(path)
        if here.is_dir() and not any(entry.is_dir() for entry in here.iterdir()):
            for entry in here.iterdir():
                entry.unlink()
        os.rmdir(path)


class Os:
    """`os` with a rmdir that knows control files."""

    def __init__(self, tree: Tree) -> None:
        self.rmdir = tree.rmdir

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    tree = Tree(tmp_path)
    monkeypatch.setattr(cgroup, "_mkdir", tree.mkdir)
    monkeypatch.setattr(cgroup, "os", Os(tree))
    return tree


@pytest.fixture
def hybrid(tree: Tree) -> Iterator[Hybrid]:
    for controller in V1:
        tree.mkdir(tree.root / controller)
    (tree.root / "unified").mkdir()
    for controller, files in V1.items():
        for name, content in files.items():
            (tree.root / controller / name).write_text(content)
    for name, content in V2.items():
        (tree.root / "unified" / name).write_text(content)
    made = Hybrid(tree.root, "node")
    yield made
    made.close()


@pytest.fixture
def unified(tree: Tree) -> Unified:
    for name, content in V2.items():
        (tree.root / name).write_text(content)
    (tree.root / "cgroup.controllers").write_text("cpuset cpu io memory pids")
    return Unified(tree.root, "node")


@pytest.fixture(params=["hybrid", "unified"])
def cgroups(request: pytest.FixtureRequest) -> Cgroups:
    made: Cgroups = request.getfixturevalue(request.param)
    return made


def test_the_host_decides_which(hybrid: Hybrid, tree: Tree) -> None:
    assert choose_cgroups("node", tree.root).kind == "hybrid"


def test_pure_v2_is_chosen_where_it_is(unified: Unified, tree: Tree) -> None:
    assert choose_cgroups("node", tree.root).kind == "unified"
    (tree.root / "cgroup.controllers").write_text("memory pids")
    with pytest.raises(KernelError, match="no cpu"):
        choose_cgroups("node", tree.root)


def test_no_shape_at_all_is_refused_by_name(tree: Tree) -> None:
    with pytest.raises(KernelError, match="cpu memory pids"):
        choose_cgroups("node", tree.root)


def test_hybrid_limits_by_v1_and_groups_by_v2(hybrid: Hybrid, tree: Tree) -> None:
    hybrid.open()
    fds = hybrid.create("one", LIMITS, os.getuid())
    assert (tree.root / "memory/node/one/memory.limit_in_bytes").read_text() == str(64 << 20)
    assert (tree.root / "memory/node/one/memory.kmem.tcp.limit_in_bytes").read_text().startswith(str(16 << 20))
    assert (tree.root / "cpu/node/one/cpu.cfs_quota_us").read_text().startswith("50000")
    assert (tree.root / "pids/node/one/pids.max").read_text().startswith("32")
    assert os.path.samestat(os.fstat(fds.work), os.stat(tree.root / "unified/node/one"))
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds.tasks]
    assert names == [str(tree.root / c / "node/one/tasks") for c in ("memory", "cpu", "pids")]
    assert len(hybrid.agent_tasks) == 3
    fds.close()
    hybrid.remove("one")
    hybrid.close()
    assert not (tree.root / "memory/node").exists()
    assert not (tree.root / "unified/node").exists()


def test_time_that_commands_use_is_not_taken_from_aethers_and_the_server(hybrid: Hybrid, tree: Tree) -> None:
    hybrid.open()
    agents, cpus = tree.root / "cpu/node-agents", os.cpu_count() or 1
    assert (agents / "cgroup.procs").read_text() == str(os.getpid())
    assert not (tree.root / "cpu/node/agents").exists()
    assert int((agents / "cpu.shares").read_text()) == min(1 << 18, 4096 * cpus)
    assert int((tree.root / "cpu/node/cpu.shares").read_text()) == min(1 << 18, 1024 * cpus)
    hybrid.close()
    assert not agents.exists()
    back = [path for path in (tree.root / "cpu").rglob("cgroup.procs") if path.read_text() == str(os.getpid())]
    assert len(back) == 1


def test_unified_weighs_sandboxes_by_class_and_aether_above_its_commands(unified: Unified, tree: Tree) -> None:
    unified.open()
    for name, qos in (("one", "be"), ("two", "ls")):
        unified.create(name, GroupLimits(64 << 20, 2.0, 32, qos), os.getuid()).close()  # type: ignore[arg-type]
    weights = [(tree.root / "node" / name / "cpu.weight").read_text() for name in ("one", "two")]
    assert weights == ["240", "200"]  # 24 and 200, on top of the "100" of a file that is no kernel's
    assert (tree.root / "node/one/aether/cpu.weight").read_text() == "10000"
    assert (tree.root / "node/one/work/cpu.weight").read_text() == "100"
    assert int((tree.root / "node/cpu.weight").read_text()) == min(10_000, 100 * (os.cpu_count() or 1))


def test_unified_keeps_aether_out_of_the_limits(unified: Unified, tree: Tree) -> None:
    unified.open()
    fds = unified.create("one", LIMITS, os.getuid())
    group = tree.root / "node/one"
    assert (group / "subtree_control").exists() is False
    assert (group / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert (group / "work/memory.max").read_text() == str(64 << 20)
    assert (group / "work/cpu.max").read_text() == "50000 100000"
    assert (group / "work/pids.max").read_text().startswith("32")
    assert (group / "aether/memory.max").read_text() == "max"
    assert os.path.samestat(os.fstat(fds.home), os.stat(group / "aether"))
    assert fds.tasks == ()
    fds.close()


def test_usage_and_kills_are_read(cgroups: Cgroups) -> None:
    cgroups.open()
    cgroups.create("one", LIMITS, os.getuid()).close()
    usage = cgroups.usage("one")
    assert (usage.memory, usage.memory_peak, usage.memory_limit) == (4096, 8192, 64 << 20)
    assert (usage.cpu_seconds, usage.pids, usage.pids_refused) == (2.5, 3, 7)
    assert cgroups.oom_kills("one") == usage.oom_kills == 1
    cgroups.remove("one")


def test_kills_are_told_by_a_descriptor(cgroups: Cgroups, tree: Tree) -> None:
    cgroups.open()
    cgroups.create("one", LIMITS, os.getuid()).close()
    fd, events = cgroups.kill_watch("one")
    if cgroups.kind == "hybrid":
        asked, control = (tree.root / "memory/node/one/cgroup.event_control").read_text().split()
        assert int(asked) == fd and int(control) >= 0 and events == select.EPOLLIN | select.EPOLLET
    else:
        assert os.path.samestat(os.fstat(fd), os.stat(tree.root / "node/one/work/memory.events"))
        assert events == select.EPOLLPRI | select.EPOLLET
    os.close(fd)
    cgroups.remove("one")


def test_removal_takes_the_groups_of_commands_too_and_may_be_repeated(cgroups: Cgroups, tree: Tree) -> None:
    cgroups.open()
    cgroups.create("one", LIMITS, os.getuid()).close()
    below = next(p for p in tree.root.rglob("one") if (p / "cgroup.procs").exists())
    tree.mkdir(below / "command")
    tree.mkdir(below / "command" / "deeper")
    cgroups.kill("one")
    assert (below / "cgroup.kill").read_text() == "1"
    for _ in range(2):
        cgroups.remove("one")
        cgroups.kill("one")
    assert list(tree.root.rglob("one")) == []
    assert cgroups.names() == []
    assert cgroups.processes("one") == []
    assert cgroups.owner("one") is None


def test_a_creation_that_fails_midway_leaves_nothing(
    hybrid: Hybrid, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid.open()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setitem(V1, "pids", {"tasks": "", "pids.current": "0"})
    with pytest.raises(KernelError, match=r"pids\.max"):
        hybrid.create("one", LIMITS, os.getuid())
    assert list(tree.root.rglob("one")) == []
    assert len(os.listdir("/proc/self/fd")) == before
