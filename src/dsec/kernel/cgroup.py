"""Limits and accounts of sandboxes by cgroups: one small interface, for hybrid hosts and for pure v2.

On a hybrid host the v1 controllers limit and the empty v2 tree groups and kills. Either way a sandbox has a v2 directory
that belongs to its aether's host id, below which aether makes a group for each command.
"""

import os
import select
from abc import ABC, abstractmethod
from dataclasses import dataclass
from errno import EBUSY, ENODEV, ENOENT, ESRCH
from pathlib import Path
from typing import Literal

from dsec.kernel.errors import KernelError, as_kernel_error, kernel_op

__all__ = ["Cgroups", "GroupFds", "GroupLimits", "GroupUsage", "Hybrid", "Unified", "choose_cgroups"]

_PERIOD_US = 100_000
# Against each other. All sandboxes together weigh as an ordinary process on each CPU, the server and the aethers four times
# that, apart from them: what a command has used makes no aether, and no answer of the server, wait.
_SHARES = {"ls": 1024, "be": 128}
_WEIGHTS = {"ls": 100, "be": 12}
_SANDBOXES, _AGENTS = 1024, 4096
_SHARES_MOST, _WEIGHT_MOST = 1 << 18, 10_000


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """`memory_bytes`, `cpu_cores` (fractions allowed), `pids`; `qos` sets the share of CPU under contention."""

    memory_bytes: int
    cpu_cores: float
    pids: int
    qos: Literal["ls", "be"] = "be"


@dataclass(frozen=True, slots=True)
class GroupFds:
    """What a launch needs: v2 directories for aether (`home`) and its commands (`work`), and v1 `tasks` files."""

    home: int
    work: int
    tasks: tuple[int, ...]

    def close(self) -> None:
        for fd in {self.home, self.work, *self.tasks}:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Bytes, seconds and counts of a sandbox; `oom_kills` and `pids_refused` since its start."""

    memory: int
    memory_peak: int
    memory_limit: int
    cpu_seconds: float
    pids: int
    oom_kills: int
    pids_refused: int


class Cgroups(ABC):
    """Groups of one server, all below `node` in each hierarchy; names are the caller's. Methods raise KernelError."""

    kind: Literal["hybrid", "unified"]

    def __init__(self, root: Path, node: str) -> None:
        self._root = root
        self._node = node
        self.agent_tasks: tuple[int, ...] = ()

    @abstractmethod
    def open(self) -> None:
        """Makes the server's own groups; done where they are there. On a hybrid host this process joins the aethers' CPU group."""

    @abstractmethod
    def close(self) -> None:
        """Removes the server's own groups if no sandbox is left in them; this process goes back to where it was."""

    @abstractmethod
    def create(self, name: str, limits: GroupLimits, owner: int) -> GroupFds:
        """Makes the sandbox's groups with their limits; `owner` is the host id of its aether."""

    @abstractmethod
    def usage(self, name: str) -> GroupUsage: ...

    @abstractmethod
    def oom_kills(self, name: str) -> int: ...

    @abstractmethod
    def kill_watch(self, name: str) -> tuple[int, int]:
        """A descriptor that the caller owns, and the events of epoll by which it says that the kernel kills in the sandbox for
        want of memory: an edge each time."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes the sandbox's groups, aether's own below them too; done where they are gone. EBUSY while a process lives."""

    @property
    @abstractmethod
    def _tree(self) -> Path:
        """The v2 directory of the server's sandboxes."""

    def names(self) -> list[str]:
        """Sandboxes that have a v2 group here."""
        with kernel_op("readdir", str(self._tree)):
            return sorted(entry.name for entry in os.scandir(self._tree) if entry.is_dir())

    def owner(self, name: str) -> int | None:
        """Host id of the aether that the sandbox's group belongs to; None where there is no group."""
        try:
            return os.stat(self._tree / name).st_uid
        except FileNotFoundError:
            return None

    def kill(self, name: str) -> None:
        """Kills every process of the sandbox, at once; done where it has no group."""
        try:
            _write(self._tree / name / "cgroup.kill", "1")
        except KernelError as error:
            if error.errno not in (ENOENT, ENODEV):
                raise

    def processes(self, name: str) -> list[int]:
        """Host pids of aether and the processes it keeps beside its commands; empty where there is no group."""
        try:
            return [int(pid) for pid in _read(self._home(name) / "cgroup.procs").split()]
        except KernelError as error:
            if error.errno in (ENOENT, ENODEV):
                return []
            raise

    def _home(self, name: str) -> Path:
        return self._tree / name


class Hybrid(Cgroups):
    """v1 memory, cpu and pids under `root`, the empty v2 tree at `root/unified`."""

    kind = "hybrid"
    controllers = ("memory", "cpu", "pids")

    def __init__(self, root: Path, node: str) -> None:
        super().__init__(root, node)
        self._swap = (root / "memory" / "memory.memsw.limit_in_bytes").exists()
        self._sockets = (root / "memory" / "memory.kmem.tcp.limit_in_bytes").exists()
        self._nodes = {controller: root / controller / node for controller in self.controllers}
        self._agents = {controller: group / "agents" for controller, group in self._nodes.items()}
        # Not below the sandboxes' group: there the time that commands use would count as aether's and the server's.
        self._agents["cpu"] = root / "cpu" / f"{node}-agents"
        self._came_from = root / "cpu"

    @property
    def _tree(self) -> Path:
        return self._root / "unified" / self._node

    def open(self) -> None:
        _mkdir(self._tree)
        for controller in self.controllers:
            _mkdir(self._v1(controller))
            _mkdir(self._agents[controller])
        cpus = os.cpu_count() or 1
        _write(self._v1("cpu") / "cpu.shares", str(min(_SHARES_MOST, _SANDBOXES * cpus)))
        _write(self._agents["cpu"] / "cpu.shares", str(min(_SHARES_MOST, _AGENTS * cpus)))
        if not self.agent_tasks:
            self.agent_tasks = tuple(_open(self._agents[c] / "tasks", os.O_WRONLY) for c in self.controllers)
        self._join()

    def _join(self) -> None:
        """Moves this process, all its threads, and with them its later children, into the aethers' CPU group."""
        for line in _read(Path("/proc/self/cgroup")).splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(",") and not path.endswith("-agents"):
                self._came_from = self._root / "cpu" / path.lstrip("/")
        _write(self._agents["cpu"] / "cgroup.procs", str(os.getpid()))

    def _leave(self) -> None:
        """Moves this process back, and what it started too where no aether can be among that."""
        pids = _read(self._agents["cpu"] / "cgroup.procs").split()
        for pid in pids if not self.names() else {str(os.getpid())} & set(pids):
            try:
                _write(self._came_from / "cgroup.procs", pid)
            except KernelError as error:
                if error.errno != ESRCH:
                    raise

    def close(self) -> None:
        if self.agent_tasks:
            self._leave()
        for fd in self.agent_tasks:
            os.close(fd)
        self.agent_tasks = ()
        for controller in self.controllers:
            _rmdir_if_empty(self._agents[controller])
            _rmdir_if_empty(self._v1(controller))
        _rmdir_if_empty(self._tree)

    def create(self, name: str, limits: GroupLimits, owner: int) -> GroupFds:
        fds: list[int] = []
        try:
            fds.append(_delegate(self._tree / name, owner))
            for controller, settings in self._settings(limits).items():
                group = self._v1(controller) / name
                _mkdir(group)
                for key, value in settings.items():
                    _write(f"{group}/{key}", value)
                fds.append(_open(f"{group}/tasks", os.O_WRONLY))
        except KernelError:
            for fd in fds:
                os.close(fd)
            self.remove(name)
            raise
        return GroupFds(fds[0], fds[0], tuple(fds[1:]))

    def _settings(self, limits: GroupLimits) -> dict[str, dict[str, str]]:
        memory = {"memory.limit_in_bytes": str(limits.memory_bytes)}
        if self._swap:
            memory["memory.memsw.limit_in_bytes"] = str(limits.memory_bytes)
        if self._sockets:  # v1 counts the buffers of IP sockets apart, and not at all without a limit of their own
            memory["memory.kmem.tcp.limit_in_bytes"] = str(limits.memory_bytes // 4)
        return {
            "memory": memory,
            "cpu": {
                "cpu.cfs_quota_us": str(max(1000, int(limits.cpu_cores * _PERIOD_US))),
                "cpu.shares": str(max(2, int(_SHARES[limits.qos] * limits.cpu_cores))),
            },
            "pids": {"pids.max": str(limits.pids)},
        }

    def usage(self, name: str) -> GroupUsage:
        memory, pids = self._v1("memory") / name, self._v1("pids") / name
        return GroupUsage(
            memory=int(_read(memory / "memory.usage_in_bytes")),
            memory_peak=int(_read(memory / "memory.max_usage_in_bytes")),
            memory_limit=int(_read(memory / "memory.limit_in_bytes")),
            cpu_seconds=_field(self._tree / name / "cpu.stat", "usage_usec") / 1e6,
            pids=int(_read(pids / "pids.current")),
            oom_kills=self.oom_kills(name),
            pids_refused=_field(pids / "pids.events", "max"),
        )

    def oom_kills(self, name: str) -> int:
        return _field(self._v1("memory") / name / "memory.oom_control", "oom_kill")

    def kill_watch(self, name: str) -> tuple[int, int]:
        group = self._v1("memory") / name
        control = _open(group / "memory.oom_control", os.O_RDONLY)
        try:
            with kernel_op("eventfd", name):
                watch = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                # The group keeps the eventfd, which tells of nothing more once it is closed.
                _write(group / "cgroup.event_control", f"{watch} {control}")
            except KernelError:
                os.close(watch)
                raise
        finally:
            os.close(control)
        return watch, select.EPOLLIN | select.EPOLLET

    def remove(self, name: str) -> None:
        _remove_tree(self._tree / name)
        for controller in self.controllers:
            _remove_tree(self._v1(controller) / name)

    def _v1(self, controller: str) -> Path:
        return self._nodes[controller]


class Unified(Cgroups):
    """Pure v2: `root/node/name` holds `aether`, outside the limits, and `work`, which has them."""

    kind = "unified"
    controllers = ("memory", "cpu", "pids")

    @property
    def _tree(self) -> Path:
        return self._root / self._node

    def _home(self, name: str) -> Path:
        return self._tree / name / "aether"

    def open(self) -> None:
        _enable(self._root, self.controllers)
        _mkdir(self._tree)
        _write(self._tree / "cpu.weight", str(min(_WEIGHT_MOST, _WEIGHTS["ls"] * (os.cpu_count() or 1))))
        _enable(self._tree, self.controllers)

    def close(self) -> None:
        _rmdir_if_empty(self._tree)

    def create(self, name: str, limits: GroupLimits, owner: int) -> GroupFds:
        group = self._tree / name
        fds: list[int] = []
        try:
            os.close(_delegate(group, owner))
            weight = int(_WEIGHTS[limits.qos] * limits.cpu_cores)
            _write(group / "cpu.weight", str(min(_WEIGHT_MOST, max(1, weight))))  # against the other sandboxes
            _enable(group, self.controllers)
            fds.append(_delegate(group / "aether", owner))
            _write(group / "aether" / "cpu.weight", str(_WEIGHT_MOST))  # against its own commands
            fds.append(_delegate(group / "work", owner))
            for key, value in _v2_settings(limits).items():
                _write(group / "work" / key, value)
        except KernelError:
            for fd in fds:
                os.close(fd)
            self.remove(name)
            raise
        return GroupFds(fds[0], fds[1], ())

    def usage(self, name: str) -> GroupUsage:
        work = self._tree / name / "work"
        peak = work / "memory.peak"
        memory = int(_read(work / "memory.current"))
        return GroupUsage(
            memory=memory,
            memory_peak=int(_read(peak)) if peak.exists() else memory,
            memory_limit=int(_read(work / "memory.max")),
            cpu_seconds=_field(work / "cpu.stat", "usage_usec") / 1e6,
            pids=int(_read(work / "pids.current")),
            oom_kills=self.oom_kills(name),
            pids_refused=_field(work / "pids.events", "max"),
        )

    def oom_kills(self, name: str) -> int:
        return _field(self._tree / name / "work" / "memory.events", "oom_kill")

    def kill_watch(self, name: str) -> tuple[int, int]:
        watch = _open(self._tree / name / "work" / "memory.events", os.O_RDONLY)
        with kernel_op("read", name):
            os.read(watch, 4096)  # a change is told from what was read last
        return watch, select.EPOLLPRI | select.EPOLLET

    def remove(self, name: str) -> None:
        _remove_tree(self._tree / name)


def choose_cgroups(node: str, root: Path = Path("/sys/fs/cgroup")) -> Cgroups:
    """The implementation for this host. Raises KernelError ENODEV where neither shape with all three controllers is there."""
    plain = root / "cgroup.controllers"
    if plain.exists():
        missing = set(Unified.controllers) - set(_read(plain).split())
        if missing:
            raise KernelError("cgroup", f"{root}: no {' '.join(sorted(missing))}", ENODEV)
        return Unified(root, node)
    missing = {c for c in Hybrid.controllers if not (root / c / "tasks").exists()}
    if missing or not (root / "unified" / "cgroup.procs").exists():
        raise KernelError("cgroup", f"{root}: no {' '.join(sorted(missing)) or 'unified'}", ENODEV)
    return Hybrid(root, node)


def _v2_settings(limits: GroupLimits) -> dict[str, str]:
    return {
        "memory.max": str(limits.memory_bytes),
        "memory.swap.max": "0",
        "cpu.max": f"{max(1000, int(limits.cpu_cores * _PERIOD_US))} {_PERIOD_US}",
        "pids.max": str(limits.pids),
    }


def _delegate(path: Path, owner: int) -> int:
    """Makes a v2 group in which `owner` may make groups and move processes, but not change its limits; gives its directory."""
    _mkdir(path)
    try:
        os.chown(path, owner, -1)
        os.chown(f"{path}/cgroup.procs", owner, -1)
    except OSError as error:
        raise as_kernel_error(error, "chown", str(path)) from error
    return _open(path, os.O_RDONLY | os.O_DIRECTORY)


def _enable(path: Path, controllers: tuple[str, ...]) -> None:
    _write(path / "cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))


def _mkdir(path: Path) -> None:
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    except OSError as error:
        raise as_kernel_error(error, "mkdir", str(path)) from error


def _open(path: Path | str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise as_kernel_error(error, "open", str(path)) from error


def _write(path: Path | str, value: str) -> None:
    fd = _open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    except OSError as error:
        raise as_kernel_error(error, "write", str(path)) from error
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    with kernel_op("read", str(path)):
        return path.read_text("ascii").strip()


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    raise KernelError("read", f"{path}: no {name}", ENOENT)


def _rmdir_if_empty(path: Path) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != EBUSY:
            raise KernelError("rmdir", str(path), error.errno or 0) from error


def _remove_tree(path: Path) -> None:
    """Removes a group and those below it, deepest first: a group's directory holds only control files and groups."""
    try:
        below = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        for child in below:
            _remove_tree(Path(child))
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise KernelError("rmdir", str(path), error.errno or 0) from error
