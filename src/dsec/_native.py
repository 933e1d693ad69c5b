"""The native module's exports, so that import rules can see them; made by crates/native as dsec._core.

Every function raises OSError(errno, operation, path) where the kernel says no; dsec.kernel.errors gives that its name.
The interpreter's lock is released around the calls.
"""

from dsec._core import cached_bytes, erofs_image, mount, mount_erofs, seccomp_program, umount

__all__ = ["cached_bytes", "erofs_image", "mount", "mount_erofs", "seccomp_program", "umount"]
