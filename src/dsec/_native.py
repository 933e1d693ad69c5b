"""The native module's exports, so that import rules can see them; made by crates/native as dsec._core.

Every function raises OSError(errno, operation, path) where the kernel says no; dsec.kernel.errors gives that its name.
The interpreter's lock is released around the calls.
"""

from dsec._core import mount, mount_erofs, umount

__all__ = ["mount", "mount_erofs", "umount"]
