//! Mounting by descriptor: detached trees, idmapped clones, overlays.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use crate::error::{c_string, check, Error, Result};

pub(crate) const OPEN_TREE_CLONE: u32 = 1;
pub(crate) const OPEN_TREE_CLOEXEC: u32 = libc::O_CLOEXEC as u32;
pub(crate) const MOVE_MOUNT_F_EMPTY_PATH: u32 = 0x4;
pub(crate) const MOVE_MOUNT_T_EMPTY_PATH: u32 = 0x40;
pub(crate) const FSCONFIG_SET_FLAG: u32 = 0;
pub(crate) const FSCONFIG_SET_STRING: u32 = 1;
pub(crate) const FSCONFIG_SET_FD: u32 = 5;
pub(crate) const FSCONFIG_CMD_CREATE: u32 = 6;

pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
pub(crate) const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

#[repr(C)]
pub(crate) struct MountAttr {
    pub attr_set: u64,
    pub attr_clr: u64,
    pub propagation: u64,
    pub userns_fd: u64,
}

fn owned(value: libc::c_long) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows its number.
    unsafe { OwnedFd::from_raw_fd(value as i32) }
}

/// A detached clone of the mount at `path` whose owners are shifted by the map of `userns`.
///
/// # Errors
/// EINVAL where the file system cannot be idmapped or is not mounted in this mount namespace.
pub fn idmapped_clone(path: &str, userns: BorrowedFd<'_>, attributes: u64) -> Result<OwnedFd> {
    clone_of(path, Some(userns), attributes)
}

/// A detached clone of the mount at `path`, with its owners as they are.
///
/// # Errors
/// EINVAL where the file system is not mounted in this mount namespace.
pub fn plain_clone(path: &str, attributes: u64) -> Result<OwnedFd> {
    clone_of(path, None, attributes)
}

fn clone_of(path: &str, userns: Option<BorrowedFd<'_>>, attributes: u64) -> Result<OwnedFd> {
    let path_c = c_string("open_tree", path)?;
    // SAFETY: the path is a NUL-terminated string that lives past the call.
    let tree = unsafe {
        libc::syscall(
            libc::SYS_open_tree,
            libc::AT_FDCWD,
            path_c.as_ptr(),
            OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | libc::AT_SYMLINK_NOFOLLOW as u32,
        )
    };
    let tree = owned(check(tree, "open_tree", path)?);
    let attr = MountAttr {
        attr_set: userns.map_or(0, |_| MOUNT_ATTR_IDMAP) | attributes,
        attr_clr: 0,
        propagation: 0,
        userns_fd: userns.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    // SAFETY: `attr` is a valid struct mount_attr of the size given, and the empty path is a valid string.
    let r = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            ptr::from_ref(&attr),
            size_of::<MountAttr>(),
        )
    };
    check(r, "mount_setattr", path)?;
    Ok(tree)
}

/// A detached clone of the mount that `directory` is in, with it as the root: nothing above it can be reached through it.
///
/// # Errors
/// EINVAL where it is not mounted in this mount namespace.
pub fn detached(directory: BorrowedFd<'_>) -> Result<OwnedFd> {
    // SAFETY: the empty path is a valid string; the descriptor is open.
    let tree = unsafe {
        libc::syscall(
            libc::SYS_open_tree,
            directory.as_raw_fd(),
            c"".as_ptr(),
            OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH as u32,
        )
    };
    Ok(owned(check(tree, "open_tree", "cgroup")?))
}

fn fsconfig(fs: &OwnedFd, command: u32, key: Option<&CStr>, value: Option<&CStr>, aux: i32) -> Result<()> {
    let key_ptr = key.map_or(ptr::null(), CStr::as_ptr);
    let value_ptr = value.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: both pointers are null or NUL-terminated strings that live past the call.
    let r = unsafe { libc::syscall(libc::SYS_fsconfig, fs.as_raw_fd(), command, key_ptr, value_ptr, aux) };
    let what = key.map_or_else(String::new, |k| k.to_string_lossy().into_owned());
    check(r, "fsconfig", &what).map(|_| ())
}

/// A mount of the host's /proc that nobody else looks names up in, detached.
///
/// The kernel keeps a name of /proc/sys/net or /proc/sys/user for each namespace that it was looked up from, all in one chain: on
/// the /proc that everyone shares, a look-up from a new namespace walks past those of all others.
///
/// # Errors
/// As the kernel gives them.
pub(crate) fn private_proc() -> Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string.
    let fs = unsafe { libc::syscall(libc::SYS_fsopen, c"proc".as_ptr(), 1_u32) };
    let fs = owned(check(fs, "fsopen", "proc")?);
    fsconfig(&fs, FSCONFIG_CMD_CREATE, None, None, 0)?;
    let quiet = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    // SAFETY: plain numbers.
    let mount = unsafe { libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), 1_u32, quiet) };
    Ok(owned(check(mount, "fsmount", "proc")?))
}

fn beneath(dir: &OwnedFd, name: &CStr) -> Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string that lives past the call.
    let fd = unsafe {
        libc::openat(
            dir.as_raw_fd(),
            name.as_ptr(),
            libc::O_PATH | libc::O_CLOEXEC | libc::O_DIRECTORY | libc::O_NOFOLLOW,
        )
    };
    Ok(owned(check(fd.into(), "openat", &name.to_string_lossy())?))
}

/// An overlay, detached: `layers` lowest first, writes to `upper/` of `writable`, which has `work/` beside it.
///
/// `volatile`: nothing is synced, since nothing outlives the sandbox. The mount takes no device nodes.
/// The caller's file-system ids become the ones that the overlay acts with.
///
/// # Errors
/// As the kernel gives them.
pub fn overlay(layers: &[OwnedFd], writable: &OwnedFd) -> Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string.
    let fs = unsafe { libc::syscall(libc::SYS_fsopen, c"overlay".as_ptr(), 1_u32) };
    let fs = owned(check(fs, "fsopen", "overlay")?);
    for layer in layers.iter().rev() {
        fsconfig(&fs, FSCONFIG_SET_FD, Some(c"lowerdir+"), None, layer.as_raw_fd())?;
    }
    let upper = beneath(writable, c"upper")?;
    let work = beneath(writable, c"work")?;
    fsconfig(&fs, FSCONFIG_SET_FD, Some(c"upperdir"), None, upper.as_raw_fd())?;
    fsconfig(&fs, FSCONFIG_SET_FD, Some(c"workdir"), None, work.as_raw_fd())?;
    fsconfig(&fs, FSCONFIG_SET_FLAG, Some(c"volatile"), None, 0)?;
    fsconfig(&fs, FSCONFIG_SET_STRING, Some(c"metacopy"), Some(c"off"), 0)?;
    fsconfig(&fs, FSCONFIG_CMD_CREATE, None, None, 0).map_err(|e| Error::new("mount", "overlay", e.errno))?;
    // SAFETY: plain numbers.
    let mount = unsafe { libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), 1_u32, MOUNT_ATTR_NODEV) };
    Ok(owned(check(mount, "fsmount", "overlay")?))
}
