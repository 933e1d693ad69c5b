"""What a number of sandboxes costs the machine, and what is left of them: read from /proc, /sys/fs/cgroup and the node's state."""

import os
from pathlib import Path

from msgspec import Struct

from dsec.testing.node import Node

__all__ = ["Footprint", "allocated", "cpu_seconds", "left_of", "peak_resident", "reset_peak"]

_KIB = 1024
_PARTS = ("AnonPages", "Shmem", "SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "Percpu")


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines}


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Footprint(Struct, frozen=True):
    """The machine's memory at one moment, in bytes. `used`: all but free memory and the page cache of files; so kernel
    objects count in full, those that the kernel could let go of too. `server`, `client`: resident sets."""

    used: int
    available: int
    server: int
    client: int
    parts: dict[str, int]

    @classmethod
    def now(cls, server: int) -> "Footprint":
        """With the server of process id `server`."""
        found = _meminfo()
        cache = found["Cached"] - found["Shmem"] + found["Buffers"]
        return cls(
            used=found["MemTotal"] - found["MemFree"] - cache,
            available=found["MemAvailable"],
            server=_resident(server),
            client=_resident(os.getpid()),
            parts={name: found[name] for name in _PARTS},
        )

    def grown(self, since: "Footprint") -> int:
        """Bytes more than at `since`, by the less favourable of two counts; the client's own growth is not a sandbox's."""
        more = max(self.used - since.used, since.available - self.available)
        return more - (self.client - since.client)

    def by_part(self, since: "Footprint", count: int) -> dict[str, float]:
        """KiB for each of `count` sandboxes, by kind of memory, the server's own beside them."""
        kib = {name: (size - since.parts[name]) / _KIB / count for name, size in self.parts.items()}
        return kib | {"server": (self.server - since.server) / _KIB / count}


def reset_peak(pid: int) -> int:
    """Bytes that a process has resident now; `peak_resident` counts from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _resident(pid)


def peak_resident(pid: int) -> int:
    """The most bytes that a process had resident since `reset_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * _KIB for line in lines if line.startswith("VmHWM:"))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def allocated(folder: Path) -> int:
    """Bytes that files below `folder` take on disk; a file of several names once, what is mounted below it not at all."""
    seen: set[int] = set()
    total, device = 0, folder.stat().st_dev
    for place, folders, files in os.walk(folder):
        kept = [name for name in folders if os.lstat(os.path.join(place, name)).st_dev == device]
        folders[:] = kept
        for name in (*kept, *files):
            found = os.lstat(os.path.join(place, name))
            if found.st_dev == device and found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_blocks * 512
    return total


def _children(pid: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            count += int(fields[1]) == pid
    return count


def _below(folder: Path) -> int:
    try:
        return sum(entry.is_dir(follow_symlinks=False) for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0


def left_of(node: Node, groups: str) -> dict[str, int]:
    """What a node without sandboxes still has of them; all zero is right. `groups`: its name in the cgroup hierarchies."""
    trees = [Path("/sys/fs/cgroup", name, groups) for name in os.listdir("/sys/fs/cgroup")]
    return {
        "processes": _children(node.pid),
        "writable_layers": _below(node.state / "pool/cells"),
        "sockets": sum(path.is_socket() for path in (node.state / "run").iterdir()),
        "cgroups": sum(_below(tree) - (tree / "agents").is_dir() for tree in trees),
    }
