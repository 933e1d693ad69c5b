"""How much memory the host has and has left: /proc/meminfo."""

from pathlib import Path

from dsec.kernel.errors import KernelError

__all__ = ["host_memory"]

_KIB = 1024


def host_memory(path: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Bytes in total, and bytes that could be given out without swapping (MemAvailable). Raises KernelError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise KernelError("read", str(path), error.errno or 0) from error
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        found[name] = rest
    return tuple(int(found[name].split()[0]) * _KIB for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
