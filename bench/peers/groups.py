"""A CPU group for a peer, with the weight that sandboxes have all together: on a busy machine neither side is starved by the other."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["equal_share", "remove_group"]

TOP = Path("/sys/fs/cgroup")
SHARES, WEIGHT = 1024, 100  # for each core, as the node gives its sandboxes
SECONDS = 30.0


def remove_group(name: str) -> None:
    """Removes what is left of a group in every hierarchy, once its last processes have ended."""
    deadline = time.monotonic() + SECONDS
    for top in (TOP / name, *TOP.glob(f"*/{name}")):
        while top.is_dir():
            try:
                for folder, _, _ in os.walk(top, topdown=False):
                    os.rmdir(folder)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)  # the kernel announces no such moment


@contextmanager
def equal_share(name: str) -> Iterator[Path]:
    """The group `name`; a process whose number is written to its cgroup.procs is in it."""
    first = (TOP / "cpu").is_dir()
    group, file, value = (TOP / "cpu" / name, "cpu.shares", SHARES) if first else (TOP / name, "cpu.weight", WEIGHT)
    group.mkdir()
    try:
        (group / file).write_text(str(value * (os.cpu_count() or 1)))
        yield group
    finally:
        remove_group(name)
