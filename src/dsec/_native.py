"""The native module's exports, so that import rules can see them; made by crates/native as dsec._core.

Every function raises OSError(errno, operation, path) where the kernel says no; dsec.kernel.errors gives that its name.
The interpreter's lock is released around the calls.
"""

from dsec._core import (
    assemble,
    cached_bytes,
    erofs_image,
    filesystem_id,
    launch,
    loop_attach,
    make_namespaces,
    make_stage,
    mount,
    mount_erofs,
    quota_enable_simple,
    sealed_file,
    seccomp_program,
    subvolume_create,
    subvolume_delete,
    subvolume_id,
    subvolume_limit,
    subvolume_snapshot,
    umount,
)

__all__ = [
    "assemble",
    "cached_bytes",
    "erofs_image",
    "filesystem_id",
    "launch",
    "loop_attach",
    "make_namespaces",
    "make_stage",
    "mount",
    "mount_erofs",
    "quota_enable_simple",
    "sealed_file",
    "seccomp_program",
    "subvolume_create",
    "subvolume_delete",
    "subvolume_id",
    "subvolume_limit",
    "subvolume_snapshot",
    "umount",
]
