//! Mounting by paths: the classic calls.

use std::ptr;

use crate::error::{c_string, check, Result};

/// `mount(2)`. `data` is the file system's own option string.
///
/// # Errors
/// As the kernel gives them.
pub fn mount(source: &str, target: &str, fstype: &str, flags: u64, data: &str) -> Result<()> {
    let source_c = c_string("mount", source)?;
    let target_c = c_string("mount", target)?;
    let fstype_c = c_string("mount", fstype)?;
    let data_c = c_string("mount", data)?;
    let data_ptr = if data.is_empty() { ptr::null() } else { data_c.as_ptr() };
    // SAFETY: all four pointers are NUL-terminated strings that live past the call; a null data is allowed.
    let r = unsafe {
        libc::mount(
            source_c.as_ptr(),
            target_c.as_ptr(),
            fstype_c.as_ptr(),
            flags,
            data_ptr.cast(),
        )
    };
    check(r.into(), "mount", target).map(|_| ())
}

/// `umount2(2)`; `lazy` detaches at once and lets go when the last user does.
///
/// # Errors
/// EINVAL where nothing is mounted, EBUSY when in use and not `lazy`.
pub fn umount(target: &str, lazy: bool) -> Result<()> {
    let target_c = c_string("umount", target)?;
    let flags = libc::UMOUNT_NOFOLLOW | if lazy { libc::MNT_DETACH } else { 0 };
    // SAFETY: the pointer is a NUL-terminated string that lives past the call.
    let r = unsafe { libc::umount2(target_c.as_ptr(), flags) };
    check(r.into(), "umount", target).map(|_| ())
}

/// Mounts an EROFS image straight from its files, read-only, with no loop device in between.
///
/// `meta` holds the metadata; `data` the blob that its device table names, if it names one.
///
/// # Errors
/// EINVAL for a broken image or a data path that an option string cannot carry (a comma in it).
pub fn mount_erofs(meta: &str, data: Option<&str>, target: &str) -> Result<()> {
    let flags = libc::MS_RDONLY | libc::MS_NODEV | libc::MS_NOATIME;
    let options = match data {
        Some(path) if path.contains(',') => {
            return Err(crate::Error::new("mount", path, libc::EINVAL));
        }
        Some(path) => format!("device={path}"),
        None => String::new(),
    };
    mount(meta, target, "erofs", flags, &options)
}
