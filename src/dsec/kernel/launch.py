"""Launching a sandbox's first process, aether, from a plan of values and descriptors."""

import os
from pathlib import Path

import msgspec

from dsec import _native
from dsec.kernel.cgroup import GroupFds
from dsec.kernel.errors import from_kernel, kernel_op
from dsec.kernel.namespaces import Namespaces
from dsec.kernel.uids import agent_id, base_id

__all__ = ["CAPABILITIES", "CellPlan", "Extra", "Launched", "Launcher", "capability_bits"]

# What root inside keeps, within its own user namespace: docker's default, less what a sandbox has no use for.
# A reason for each, and for those left out, is in docs/security.md.
CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "net_raw": 13,
    "sys_chroot": 18,
    "setfcap": 31,
}


def capability_bits() -> int:
    """CAPABILITIES as the bit set of capabilities(7)."""
    return sum(1 << number for number in CAPABILITIES.values())


class Extra(msgspec.Struct, frozen=True):
    """A directory of the node at a path of the sandbox."""

    source: str
    target: str
    read_only: bool


class CellPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from sandbox to sandbox. `layers`: directories of mounted layers, lowest first. `writable`: directory
    with `upper` and `work`. `views`: what of the kernel is shown from which file (see kernel.sights). `listener`: descriptor of aether's listening socket. Sizes in bytes.
    `addresses`: its own beside the loopback's, with which /etc/hosts names it; `nameservers`: for /etc/resolv.conf.
    """

    hostname: str
    layers: tuple[str, ...]
    writable: str
    extras: tuple[Extra, ...]
    views: tuple[tuple[str, str], ...]
    shm_bytes: int
    listener: int
    no_new_privileges: bool
    addresses: tuple[str, ...] = ()
    nameservers: tuple[str, ...] = ()


class Launched(msgspec.Struct, frozen=True):
    """A running aether: its host pid, a descriptor of it that the caller owns, and seconds for root and process."""

    pid: int
    pidfd: int
    rootfs: float
    process: float


class _Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's own record: crates/launcher, `Cell`."""

    hostname: str
    base: int
    agent_id: int
    layers: tuple[str, ...]
    writable: str
    extras: tuple[Extra, ...]
    views: tuple[tuple[str, str], ...]
    shm_bytes: int
    stage_fd: int
    user_fd: int
    net_fd: int
    ipc_fd: int
    uts_fd: int
    program_fd: int
    null_fd: int
    listener_fd: int
    home_fd: int
    work_fd: int
    tasks_fds: tuple[int, ...]
    agent_tasks_fds: tuple[int, ...]
    filter: bytes
    capabilities: int
    no_new_privileges: bool
    addresses: tuple[str, ...]
    nameservers: tuple[str, ...]


_encode = msgspec.msgpack.Encoder().encode


class Launcher:
    """`program`: the static aether binary, copied into sealed memory once. `filter`: seccomp program of every command.
    `agent_tasks`: v1 `tasks` files of the group in which every aether stays. Methods raise KernelError.
    """

    def __init__(self, program: Path, filter: bytes, agent_tasks: tuple[int, ...]) -> None:
        self._path = program
        self._filter = filter
        self._agent_tasks = agent_tasks
        self._program = self._stage = self._null = -1

    def open(self, scratch: Path) -> None:
        """Loads the program and makes the bare mount namespace, built over the directory `scratch` in a private copy."""
        with kernel_op("read", str(self._path)):
            program = self._path.read_bytes()
            self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._program = from_kernel(_native.sealed_file)("aether", program, True)
        self._stage = from_kernel(_native.make_stage)(str(scratch))

    def close(self) -> None:
        for fd in (self._program, self._stage, self._null):
            if fd >= 0:
                os.close(fd)
        self._program = self._stage = self._null = -1

    def launch(self, plan: CellPlan, namespaces: Namespaces, groups: GroupFds) -> Launched:
        """Starts aether. Every descriptor passed stays the caller's. Nothing is left behind where it fails."""
        cell = _Cell(
            hostname=plan.hostname,
            base=base_id(namespaces.slot),
            agent_id=agent_id(namespaces.slot),
            layers=plan.layers,
            writable=plan.writable,
            extras=plan.extras,
            views=plan.views,
            shm_bytes=plan.shm_bytes,
            stage_fd=self._stage,
            user_fd=namespaces.user,
            net_fd=namespaces.net,
            ipc_fd=namespaces.ipc,
            uts_fd=namespaces.uts,
            program_fd=self._program,
            null_fd=self._null,
            listener_fd=plan.listener,
            home_fd=groups.home,
            work_fd=groups.work,
            tasks_fds=groups.tasks,
            agent_tasks_fds=self._agent_tasks,
            filter=self._filter,
            capabilities=capability_bits(),
            no_new_privileges=plan.no_new_privileges,
            addresses=plan.addresses,
            nameservers=plan.nameservers,
        )
        return Launched(*from_kernel(_native.launch)(_encode(cell)))
