"""pytest plugin: a test that leaves something behind in the process or the kernel fails.

Around each test it compares open descriptors, child processes (orphans too), mounts, cgroups, named network namespaces,
links, tables of nftables, pinned maps and routers of nodes (by the mounts that they lie in), loop devices, files in /run/dsec, btrfs subvolumes of the session's pools and temporary directories. What a fixture
of a wider scope makes is that fixture's until it is torn down, and then has to be gone.

Load it with `-p dsec.testing.leaks`. It gives the session a temporary root of its own (short, since Unix socket paths are)
and removes it at the end. On a machine where others run DSec at the same time set LEAKS_SHARED_HOST=1: named
namespaces are then not compared, and of links, cgroups and /run/dsec only what belongs to the session. A test that must leave something carries
`@pytest.mark.leaves("what and why")`.
"""

import gc
import hashlib
import os
import re
import shutil
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Census", "Leaks"]

MARK = "LEAKS_SESSION"
GRACE_SECONDS = 3.0
SUBVOLUME_INODE = 256
# Of state directories below the temporary root, in slashes: /tmp/dt-x/p/test_name0/state.
DEPTH = 7
_NETFILTER, _GET_TABLES, _TABLE_NAME = 12, 0xA01, 1
_DUMP, _NL_ERROR, _NL_DONE = 0x301, 2, 3
CGROUPS = Path("/sys/fs/cgroup")
Kept = Counter[tuple[str, str]]


def _names(folder: str | Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: str | Path) -> str:
    """A file of the kernel's; empty when its object has gone meanwhile."""
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _tables() -> list[str]:
    """Names of the tables of nftables in this network namespace, asked of the kernel; none where it has no nftables."""
    asked = struct.pack("=IHHIIBBH", 20, _GET_TABLES, _DUMP, 1, 0, 0, 0, 0)
    names: list[str] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as line:
        line.send(asked)
        while True:
            data, at = line.recv(1 << 16), 0
            while at + 16 <= len(data):
                size, kind = struct.unpack_from("=IH", data, at)
                if kind in (_NL_ERROR, _NL_DONE):
                    return names
                length, first = struct.unpack_from("=HH", data, at + 20)
                if first & 0x3FFF == _TABLE_NAME:
                    names.append(data[at + 24 : at + 20 + length].rstrip(b"\0").decode())
                at += (size + 3) & ~3


class Census:
    """What there is, as (kind, label) with a count.

    `root`: directory that the session's mounts, files, pools and loop devices lie below. `mark`: value of LEAKS_SESSION
    in the environment of the session's processes. `whole_host`: nobody else uses DSec here, so unnamed objects count too.
    """

    def __init__(self, root: Path, mark: str, *, whole_host: bool = True) -> None:
        self._root = str(root)
        self._mark = f"{MARK}={mark}".encode()
        self._whole_host = whole_host
        self._strangers: set[int] = set()
        self._groups: set[str] = set()
        self._foreign: set[str] = set()

    def take(self) -> Kept:
        found = Counter(self._descriptors())
        found.update(self._processes())
        found.update(self._mounts_and_subvolumes())
        found.update(self._loops())
        found.update(("temporary directory", name) for name in _names(self._root) if name != "p")
        found.update(self._node_files())
        links = (
            name for name in _names("/sys/class/net") if self._whole_host or (_is_uplink(name) and self._is_ours(name))
        )
        found.update(("network link", name) for name in links)
        tables = (name for name in _tables() if name.startswith("dsec_"))
        found.update(("nft table", name) for name in tables if self._is_ours(name.replace("_", "-")))
        if self._whole_host:
            found.update(("network namespace", name) for name in _names("/run/netns"))
        return found

    def _descriptors(self) -> Iterator[tuple[str, str]]:
        for number in _names("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except FileNotFoundError:
                continue  # the listing's own
            if target != "/dev/urandom":  # the interpreter keeps it
                yield "descriptor", re.sub(r"^(socket|pipe):\[\d+\]$", r"\1", target)

    def _processes(self) -> Iterator[tuple[str, str]]:
        """Living processes that descend from this one or carry the session's mark (orphans do)."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            fields = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if len(fields) > 1 and fields[0] not in "ZX":
                parents[int(name)] = int(fields[1])
        self._strangers &= parents.keys()
        own = {os.getpid()}
        for pid in parents:
            line, at = [], pid
            while at in parents and at not in own:
                line.append(at)
                at = parents[at]
            if at in own:
                own.update(line)
        for pid in parents.keys() - own - self._strangers:
            if self._marked(pid):
                own.add(pid)
            else:
                self._strangers.add(pid)
        for pid in own - {os.getpid()}:
            yield "process", f"{pid} {_read(f'/proc/{pid}/comm').strip()}"

    def _marked(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False  # gone, or a kernel thread

    def _mounts_and_subvolumes(self) -> Iterator[tuple[str, str]]:
        for line in _read("/proc/self/mountinfo").splitlines():
            point, kind = line.split()[4], line.partition(" - ")[2].split()[0]
            if not point.startswith(self._root + "/"):
                continue
            yield "mount", point
            if kind == "btrfs":
                pattern = [Path(point).glob("*"), Path(point).glob("*/*")]
                for path in (p for paths in pattern for p in paths):
                    if path.lstat().st_ino == SUBVOLUME_INODE and path.is_dir():
                        yield "subvolume", str(path)

    def _loops(self) -> Iterator[tuple[str, str]]:
        for name in _names("/sys/block"):
            backing = _read(f"/sys/block/{name}/loop/backing_file").strip() if name.startswith("loop") else ""
            if backing.startswith(self._root + "/") and (self._whole_host or not self._kept_by_stranger(name)):
                yield "loop device", f"{name} {backing}"

    def _kept_by_stranger(self, loop: str) -> bool:
        """Whether the device is mounted only where another's `unshare -m` copied our mounts: it goes with that process."""
        mounted, spaces = False, {os.readlink("/proc/self/ns/mnt")}
        if f"/dev/{loop} " in _read("/proc/self/mountinfo"):
            return False
        for pid in self._strangers:
            try:
                space = os.readlink(f"/proc/{pid}/ns/mnt")
            except OSError:
                continue  # gone
            if space not in spaces:
                spaces.add(space)
                mounted = mounted or f"/dev/{loop} " in _read(f"/proc/{pid}/mountinfo")
        return mounted

    def _node_files(self) -> Iterator[tuple[str, str]]:
        """Cgroups and files in /run/dsec: of state directories below the root, or all where nobody else uses DSec."""
        for tree in [CGROUPS, *(CGROUPS / name for name in _names(CGROUPS))]:
            for group in (name for name in _names(tree) if name.startswith("dsec") and self._is_ours(name)):
                yield "cgroup", str(tree / group)
                inner = (name for name in _names(tree / group) if (tree / group / name).is_dir())
                yield from (("cgroup", str(tree / group / name)) for name in inner)
        for path in Path("/run/dsec").glob("**/*"):
            if not path.is_dir() and (self._whole_host or _read(path).startswith(self._root)):
                yield "run file", str(path)

    def _is_ours(self, group: str) -> bool:
        """Whether a node's group carries the hash of a state directory that lies below the root, now or once."""
        group = group.removesuffix("-agents").removesuffix("-pager")
        if self._whole_host or group in self._groups:
            return True
        if group not in self._foreign:
            self._groups |= {
                _group_of(Path(folder)) for folder, _, _ in os.walk(self._root) if folder.count("/") < DEPTH
            }
            self._foreign.add(group)
        return group in self._groups


def _is_uplink(name: str) -> bool:
    """Whether a device has a name like those by which nodes reach their routers."""
    return name.startswith("dsec-")


def _group_of(state: Path) -> str:
    return "dsec-" + hashlib.sha256(str(state).encode()).hexdigest()[:8]


class Leaks:
    """The plugin's state: what the test at hand began with, and what wider fixtures hold."""

    def __init__(self, census: Census) -> None:
        self.census = census
        self._before: Kept = Counter()
        self._held: dict[int, Kept] = {}
        self._open: list[Kept] = []  # what inner fixtures took, for each fixture now being set up
        self._failed = False

    def _holding(self) -> Kept:
        return sum(self._held.values(), Counter())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self.census.take()
        self._open.append(Counter())
        try:
            return (yield)
        finally:
            taken = self.census.take() - before
            inner = self._open.pop()
            self._held[id(fixturedef)] = taken - inner
            if self._open:
                self._open[-1].update(taken)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._held.pop(id(fixturedef), None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        self._failed = False
        # Without what wider fixtures hold: those come and go by rules of their own.
        self._before = self.census.take() - self._holding()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._failed = self._failed or report.failed
        return report

    def left(self) -> Kept:
        """What is there beyond the start, after a grace time for what ends by itself (processes, mounts being undone)."""
        left = self.census.take() - self._before - self._holding()
        if left:
            gc.collect()
        # Descriptors close in this process, at once or never.
        seconds = GRACE_SECONDS if any(kind != "descriptor" for kind, _ in left) else GRACE_SECONDS / 10
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(0.02)  # the kernel announces none of these ends
            left = self.census.take() - self._before - self._holding()
        return left

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        yield
        if item.get_closest_marker("leaves"):
            return
        left = self.left()
        if self._failed:  # its traceback keeps frames, and so descriptors, alive
            left = Counter({key: count for key, count in left.items() if key[0] != "descriptor"})
        if left:
            lines = "\n".join(f"  {kind}: {label} (x{count})" for (kind, label), count in sorted(left.items()))
            pytest.fail(f"the test left behind\n{lines}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves(what): the test may leave something behind, for the reason given")
    root = Path(tempfile.mkdtemp(prefix="dt-", dir="/tmp"))
    if not config.option.basetemp:
        config.option.basetemp = str(root / "p")
    outer = {name: os.environ.get(name) for name in ("TMPDIR", MARK)}  # noqa: TID251
    os.environ.update({"TMPDIR": str(root), MARK: root.name})  # noqa: TID251
    tempfile.tempdir = str(root)
    whole = not os.environ.get("LEAKS_SHARED_HOST")  # noqa: TID251
    config.pluginmanager.register(Leaks(Census(root, root.name, whole_host=whole)), "dsec-leaks")

    def restore() -> None:
        tempfile.tempdir = None
        for name, value in outer.items():
            os.environ.pop(name, None)  # noqa: TID251
            if value is not None:
                os.environ[name] = value  # noqa: TID251
        if f" {root}/" in _read("/proc/self/mountinfo"):
            print(f"\nkept {root}: something is still mounted below it")  # noqa: T201
        else:
            shutil.rmtree(root, ignore_errors=True)

    config.add_cleanup(restore)
