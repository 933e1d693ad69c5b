//! Network namespaces: made, and visited by threads that end afterwards, so that nothing of ours stays in one.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::error::{check, Error, Result};
use crate::namespaces::in_thread;

const HERE: &str = "/proc/thread-self/ns/net";

fn here() -> Result<OwnedFd> {
    let file = File::open(HERE).map_err(|e| Error::from_io("open", Path::new(HERE), &e))?;
    Ok(file.into())
}

/// A new network namespace, kept by the descriptor alone.
///
/// # Errors
/// ENOSPC at the host's limit; EPERM without privilege.
pub fn make_netns() -> Result<OwnedFd> {
    in_thread(|| {
        // SAFETY: a plain number; concerns this thread, which ends with this function.
        let r = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        check(r.into(), "unshare", "network namespace")?;
        here()
    })
}

/// The network namespace of the calling thread.
///
/// # Errors
/// As the kernel gives them.
pub fn this_netns() -> Result<OwnedFd> {
    here()
}

/// Runs `work` in a thread that is in the network namespace `netns`.
///
/// # Errors
/// Those of `work`; EPERM without privilege.
pub fn within<T: Send>(netns: BorrowedFd<'_>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    in_thread(|| {
        // SAFETY: a descriptor that lives past the call; concerns this thread, which ends with this function.
        let r = unsafe { libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) };
        check(r.into(), "setns", "net")?;
        work()
    })
}

/// An unbound socket of `family` and `kind` that belongs to the namespace `netns`, for good.
///
/// # Errors
/// As the kernel gives them.
pub fn socket_in(netns: BorrowedFd<'_>, family: i32, kind: i32, protocol: i32) -> Result<OwnedFd> {
    within(netns, || {
        // SAFETY: plain numbers; on success the descriptor is new and ours.
        unsafe {
            let fd = libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol);
            Ok(OwnedFd::from_raw_fd(check(fd.into(), "socket", "")? as i32))
        }
    })
}

/// A descriptor of somebody else's, for one call.
///
/// # Errors
/// EBADF where `fd` is none.
pub fn duplicate(fd: i32) -> Result<OwnedFd> {
    // SAFETY: plain numbers; on success the descriptor is new and ours.
    unsafe {
        let made = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0);
        Ok(OwnedFd::from_raw_fd(check(made.into(), "fcntl", "")? as i32))
    }
}

/// The index of the device `name` in the calling thread's namespace.
///
/// # Errors
/// ENODEV where there is none.
pub fn device_index(name: &str) -> Result<u32> {
    let text = crate::error::c_string("if_nametoindex", name)?;
    // SAFETY: a NUL-terminated string that lives past the call.
    let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
    if index == 0 {
        return Err(Error::last("if_nametoindex", name));
    }
    Ok(index)
}
