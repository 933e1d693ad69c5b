"""Groups of the platform's own processes that outlive the server: apart from its group, so that who ends that does not end them."""

import os
import select
import subprocess
import time
from collections.abc import Sequence
from errno import EBUSY, ENODEV, ENOENT
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from dsec.kernel.errors import KernelError, kernel_op

__all__ = ["ServiceGroup", "node_name"]

# Joins the groups before the program begins, so that no child of it can be left outside.
_JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 125; shift; n=$((n - 1)); done; exec "$@"'


def node_name(state: Path) -> str:
    """What groups of the node with this state directory begin with."""
    return "dsec-" + sha256(str(state).encode()).hexdigest()[:8]


class ServiceGroup:
    """The groups named `name` below each hierarchy at `root`: the v2 tree, and on a hybrid host the v1 CPU and memory too.

    Methods raise KernelError.
    """

    def __init__(self, name: str, root: Path = Path("/sys/fs/cgroup")) -> None:
        if (root / "cgroup.controllers").exists():
            self._tree, self._others = root / name, []
        else:
            self._tree = root / "unified" / name
            self._others = [root / each / name for each in ("cpu", "memory") if (root / each).is_dir()]

    def spawn(self, argv: Sequence[str], *, log: BinaryIO, keep: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
        """Starts a program in the groups, which are made where missing, in a session of its own; `keep`: descriptors that it gets."""
        groups = [self._tree, *self._others]
        for group in groups:
            with kernel_op("mkdir", str(group)):
                group.mkdir(exist_ok=True)
        places = [str(group / "cgroup.procs") for group in groups]
        with kernel_op("spawn", argv[0]):
            return subprocess.Popen(
                ["/bin/sh", "-c", _JOIN, "sh", str(len(places)), *places, *argv],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=tuple(keep), cwd="/",
            )  # fmt: skip

    def processes(self) -> list[int]:
        """Pids in the group; empty where there is none."""
        try:
            with kernel_op("read", str(self._tree)):
                return [int(pid) for pid in (self._tree / "cgroup.procs").read_text("ascii").split()]
        except KernelError as error:
            if error.errno in (ENOENT, ENODEV):
                return []
            raise

    def wait_empty(self, seconds: float) -> bool:
        """Blocks until no process is in the group, at most `seconds`; whether that is so."""
        try:
            with kernel_op("open", str(self._tree)):
                fd = os.open(self._tree / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        except KernelError as error:
            if error.errno in (ENOENT, ENODEV):
                return True
            raise
        try:
            poll, until = select.poll(), time.monotonic() + seconds
            poll.register(fd, select.POLLPRI)
            while True:
                with kernel_op("read", str(self._tree)):
                    populated = b"populated 1" in os.pread(fd, 4096, 0)
                if not populated:
                    return True
                left = until - time.monotonic()
                if left <= 0:
                    return False
                poll.poll(left * 1000)
        finally:
            os.close(fd)

    def kill(self) -> None:
        """Kills every process in the group at once; done where there is none."""
        try:
            with kernel_op("kill", str(self._tree)):
                (self._tree / "cgroup.kill").write_text("1")
        except KernelError as error:
            if error.errno not in (ENOENT, ENODEV):
                raise

    def remove(self) -> None:
        """Removes the groups; done where they are gone. EBUSY while a process lives."""
        for group in (self._tree, *self._others):
            try:
                group.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise KernelError("rmdir", str(group), error.errno or EBUSY) from error
