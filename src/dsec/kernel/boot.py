"""Which boot of the host this is."""

from pathlib import Path

from dsec.kernel.errors import kernel_op

__all__ = ["boot_id"]

_PATH = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """The kernel's id of this boot: another one means that nothing of before still runs. Raises KernelError."""
    with kernel_op("read", _PATH):
        return Path(_PATH).read_text("ascii").strip()
