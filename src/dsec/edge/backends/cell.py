"""From a plan of the platform to the launcher's, and how a first process is known."""

import math
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EBUSY
from pathlib import Path
from typing import Literal

from dsec.kernel.cgroup import Cgroups
from dsec.kernel.errors import KernelError, kernel_op
from dsec.kernel.launch import CellPlan, Extra
from dsec.model.plan import Plan

__all__ = ["cell_plan", "end_all", "is_first", "on_cpus"]


def cell_plan(
    plan: Plan,
    writable: Path,
    views: tuple[tuple[str, str], ...],
    listener: int,
    addresses: tuple[tuple[str, ...], tuple[str, ...]],
) -> CellPlan:
    """The launcher's plan. `addresses`: the sandbox's own, and its resolver's."""
    return CellPlan(
        hostname=plan.identity.hostname,
        addresses=addresses[0],
        nameservers=addresses[1],
        layers=tuple(mount.source for mount in plan.layers),
        writable=str(writable),
        extras=tuple(Extra(mount.source, mount.target, mount.read_only) for mount in plan.mounts),
        views=views,
        shm_bytes=plan.limits.shm_bytes,
        listener=listener,
        no_new_privileges=plan.identity.no_new_privileges,
    )


def is_first(pid: int) -> bool:
    """True for the first process of a PID namespace of its own."""
    with kernel_op("read", f"/proc/{pid}/status"), suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1] == "1" and len(line.split()) > 2
    return False


def end_all(groups: Cgroups, patience: float) -> None:
    """Kills every process of every sandbox of the node and waits for their ends, `patience` seconds each. Raises KernelError."""
    with ExitStack() as stack, kernel_op("kill"):
        first = []
        for name in groups.names():
            for pid in groups.processes(name):
                with suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(pid)
                    stack.callback(os.close, pidfd)
                    first.append((pid, pidfd))
            groups.kill(name)
        for pid, pidfd in first:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(patience * 1000):
                raise KernelError("kill", str(pid), EBUSY)


@contextmanager
def on_cpus(slot: int, cores: float, affinity: Literal["none", "limit"]) -> Iterator[None]:
    """What this thread starts meanwhile is tied to as many of its CPUs as `cores`, rounded up; slots go round them."""
    allowed = sorted(os.sched_getaffinity(0))
    count = max(1, math.ceil(cores))
    if affinity == "none" or count >= len(allowed):
        yield
        return
    with kernel_op("sched_setaffinity"):
        os.sched_setaffinity(0, {allowed[(slot * count + n) % len(allowed)] for n in range(count)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
