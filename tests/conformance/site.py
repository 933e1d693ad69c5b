"""A node of one's own as the suite's site: the operator's powers over it."""

import ctypes
import hashlib
import os
import signal
import socket
from pathlib import Path

from dsec.testing.node import Node
from imagekit import Shelf

__all__ = ["OwnNode"]

PIDFD_GETFD = 438
RIGHTS = ("sandbox.create", "sandbox.use", "sandbox.read")


class OwnNode(Node):
    """A Node that can be asked all that the suite asks of an operator."""

    powers = frozenset({"import", "kill", "memory", "crash", "log", "tenants"})

    def __init__(self, state: Path, **settings: str) -> None:
        super().__init__(state, **settings)
        self._tenants: list[str] = []

    @property
    def key(self) -> str:
        return self.api_key

    def import_image(self, name: str, source: Path) -> None:
        """In this process, on the node's store, as the command line does it: thirty images are not thirty starts of Python."""
        Shelf(self.state).import_image(name, source)

    def remove_image(self, name: str) -> None:
        Shelf(self.state).names.remove(name)

    def server_memory(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the server has no VmHWM")

    def agent_pid(self, sandbox_id: str) -> int:
        """The process of this host that is the sandbox's aether."""
        node = "dsec-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        groups = Path("/sys/fs/cgroup").glob(f"**/{node}/{sandbox_id}/cgroup.procs")
        inside = {int(line) for path in groups for line in path.read_text().split()}
        [pid] = [pid for pid in inside if _number_inside(pid) == 1]
        return pid

    def crash_agent(self, sandbox_id: str) -> None:
        os.kill(self.agent_pid(sandbox_id), signal.SIGKILL)

    def cut_agent(self, sandbox_id: str) -> int:
        """By the server's own descriptors, of which the kernel gives us copies: shut down, they are so for both ends."""
        server, count = os.pidfd_open(self.pid), 0
        try:
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                if not os.readlink(f"/proc/{self.pid}/fd/{name}").startswith("socket:"):
                    continue
                copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, server, int(name), 0)
                if copy < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                with socket.socket(fileno=copy) as each:
                    if each.family == socket.AF_UNIX and each.getpeername().endswith(f"/{sandbox_id}"):
                        each.shutdown(socket.SHUT_RDWR)
                        count += 1
        finally:
            os.close(server)
        return count

    def server_log(self) -> str:
        return (self.state / "up.log").read_text(errors="replace")

    def another_key(self) -> str:
        """Of a project made for it."""
        name = f"tenant{len(self._tenants)}"
        self._tenants.append(name)
        allowed = [word for right in RIGHTS for word in ("--permission", right)]
        self.dsec("project", "create", f"root/{name}")
        self.dsec("key", "principal", name, "--project", f"root/{name}", *allowed)
        return self.dsec("key", "create", "--principal", name).strip()


def _number_inside(pid: int) -> int:
    """The process's number in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
