"""The processes of a sandbox, seen from the host, and raw connections to its aether."""

import hashlib
import os
import platform
import signal
import socket
from contextlib import suppress
from pathlib import Path

from dsec.testing.leaks import CGROUPS
from dsec.testing.node import Node

__all__ = ["aether_pid", "crash", "dial", "groups", "helpers", "kill"]


def groups(node: Node, sandbox_id: str) -> list[Path]:
    """The cgroups of a sandbox, in all hierarchies."""
    name = "dsec-" + hashlib.sha256(str(node.state).encode()).hexdigest()[:8]
    return [path for pattern in (f"{name}/{sandbox_id}", f"*/{name}/{sandbox_id}") for path in CGROUPS.glob(pattern)]


def _status(pid: int, field: str) -> list[str]:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return line.split()[1:]
    raise AssertionError(field)


def aether_pid(node: Node, sandbox_id: str) -> int:
    """The host's number of a sandbox's first process."""
    for child in Path(f"/proc/{node.pid}/task").glob("*/children"):
        for pid in map(int, child.read_text().split()):
            if any(sandbox_id in line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()):
                assert _status(pid, "NSpid")[-1] == "1"
                return pid
    raise AssertionError("no such sandbox runs")


def helpers(aether: int) -> list[int]:
    """aether's children that run its own program: its file helpers."""
    program = os.stat(f"/proc/{aether}/exe")
    found = []
    for children in Path(f"/proc/{aether}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            try:
                here = os.stat(f"/proc/{pid}/exe")
            except FileNotFoundError:  # it ended meanwhile
                continue
            if (here.st_dev, here.st_ino) == (program.st_dev, program.st_ino):
                found.append(pid)
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def crash(node: Node, sandbox_id: str) -> None:
    """A fault of its own in aether, as a bug would make it: its code is overwritten with what no program may execute. A
    signal sent from outside would not do, since the kernel keeps all but SIGKILL from the first process of a namespace."""
    pid = aether_pid(node, sandbox_id)
    wrong = b"\xf4" if platform.machine() == "x86_64" else b"\0"
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        if "x" in mode and "[" not in line:
            start, end = (int(part, 16) for part in span.split("-"))
            memory = os.open(f"/proc/{pid}/mem", os.O_WRONLY)
            try:
                os.pwrite(memory, wrong * (end - start), start)
            finally:
                os.close(memory)
    with suppress(OSError):  # it wakes, and falls
        dial(node, sandbox_id).close()


def dial(node: Node, sandbox_id: str) -> socket.socket:
    """A connection to a sandbox's aether, as its server makes them."""
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(10)
    folder = os.open(node.state / "run", os.O_PATH | os.O_DIRECTORY)
    try:
        found.connect(f"/proc/self/fd/{folder}/{sandbox_id}")
    finally:
        os.close(folder)
    return found
