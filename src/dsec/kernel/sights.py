"""What a sandbox's programs see of CPUs and memory: files made once for each value of a limit, and mounted over the kernel's own."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dsec.kernel.errors import kernel_op

__all__ = ["Sights"]

_KEPT = 512
_SAME = frozenset({"Hugepagesize"})
_FULL = frozenset({"MemTotal", "MemFree", "MemAvailable"})
_CPU_LISTS = ("online", "possible", "present")


class Sights:
    """`folder`: where the files are; they are made again after a restart. Methods raise KernelError.

    A file's content never changes: what a mount shows stays as it was when the sandbox began.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, str] = {}
        self._cpus = 1

    def open(self) -> None:
        """Makes the folder, and empties it of an earlier server's files."""
        with kernel_op("mkdir", str(self._folder)):
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._cpus = os.cpu_count() or 1
        self._clear()

    def close(self) -> None:
        """Removes the files; sandboxes that have them mounted keep seeing them."""
        self._clear()
        with kernel_op("rmdir", str(self._folder)), suppress(FileNotFoundError):
            self._folder.rmdir()

    def of(self, memory_bytes: int, cpu_cores: float) -> tuple[tuple[str, str], ...]:
        """(what, file) for a sandbox with these limits; CPUs only where it has fewer than the host.

        As many CPUs are shown as its quota fills, rounded up. All memory is shown as free, and no load: both would have to be
        kept up for each sandbox.
        """
        views = [("meminfo", self._file(f"meminfo-{memory_bytes >> 10}")), ("loadavg", self._file("loadavg-0"))]
        cpus = max(1, math.ceil(cpu_cores))
        if cpus < self._cpus:
            numbers = self._file(f"cpus-{cpus}")
            views += [("cpuinfo", self._file(f"cpuinfo-{cpus}")), *((name, numbers) for name in _CPU_LISTS)]
        return tuple(views)

    def _file(self, name: str) -> str:
        # The last used come last, so that none goes between being given out and being mounted.
        made = self._made[name] = self._made.pop(name, "") or self._make(name)
        if len(self._made) > _KEPT:
            with kernel_op("unlink", name):
                Path(self._made.pop(next(iter(self._made)))).unlink(missing_ok=True)
        return made

    def _make(self, name: str) -> str:
        kind, _, value = name.partition("-")
        with kernel_op("write", name):
            text = _CONTENT[kind](int(value))
            # Two workers may make the same file. The first one stays: a file that another took its place cannot be mounted.
            part = self._folder / f".{name}.{os.urandom(6).hex()}"
            part.write_text(text)
            part.chmod(0o444)
            with suppress(FileExistsError):
                os.link(part, self._folder / name)
            part.unlink()
        return str(self._folder / name)

    def _clear(self) -> None:
        self._made.clear()
        with kernel_op("unlink", str(self._folder)), suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)


def _meminfo(kib: int) -> str:
    lines = []
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        value = number if name in _SAME else kib if name in _FULL else 0
        lines.append(" ".join([f"{name + ':':<15}{value:>9}", *unit]))
    return "\n".join(lines) + "\n"


def _cpuinfo(cpus: int) -> str:
    blocks = Path("/proc/cpuinfo").read_text("ascii", "replace").split("\n\n")
    return "\n\n".join(islice((block for block in blocks if block.strip()), cpus)) + "\n\n"


_CONTENT: dict[str, Callable[[int], str]] = {
    "meminfo": _meminfo,
    "cpuinfo": _cpuinfo,
    "cpus": lambda cpus: "0\n" if cpus == 1 else f"0-{cpus - 1}\n",
    "loadavg": lambda _: "0.00 0.00 0.00 1/1 1\n",
}
