"""Mounting: by raw calls, so that mount(8) sets up nothing behind our back."""

from dsec import _native
from dsec.kernel.errors import from_kernel

__all__ = ["mount", "mount_erofs", "umount"]


@from_kernel
def mount_erofs(meta: str, data: str | None, target: str) -> None:
    """Mounts the EROFS image `meta` read-only on the directory `target`, straight from the file (no loop device).

    `data`: the blob that the image's device table names; None where it has none. Neither path may hold a comma.
    Raises KernelError: EINVAL for a broken image, ENOENT, EPERM.
    """
    _native.mount_erofs(meta, data, target)


@from_kernel
def umount(path: str, *, lazy: bool = False) -> None:
    """Unmounts `path`; `lazy` detaches it at once and lets go with its last user.

    Raises KernelError: EINVAL where nothing is mounted, EBUSY where it is in use and not `lazy`.
    """
    _native.umount(path, lazy)


@from_kernel
def mount(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
    """mount(2) as it is. Raises KernelError."""
    _native.mount(source, target, fstype, flags, data)
