//! What PID 1 of a sandbox needs of the kernel: its signals by descriptor, its children's ends, helpers by fork.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::child::{become_user, enter_namespace, restrict, Entry};
use crate::error::{Error, Result};

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Exited(i32),
    Killed(i32),
}

/// Takes a descriptor of the launcher as ours, and marks it close-on-exec.
///
/// # Errors
/// EBADF when it is not open.
pub fn adopt_descriptor(number: u32) -> Result<OwnedFd> {
    let number = RawFd::try_from(number).map_err(|_| Error::new("fcntl", "descriptor", libc::EBADF))?;
    // SAFETY: sets a flag of a number, which fails when it is not open.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(Error::last("fcntl", number.to_string()));
    }
    // SAFETY: open, and given to aether by its launcher for it alone.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Makes this process what aether has to be: not dumpable, default dispositions, SIGCHLD by descriptor, SIGPIPE ignored,
/// descriptors 0 to 2 taken, little memory held back by the allocator.
///
/// # Errors
/// As the kernel gives them.
pub fn become_init() -> Result<OwnedFd> {
    // SAFETY: plain numbers; the signal set is initialised before it is used; dispositions are the kernel's own two.
    unsafe {
        if libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 {
            return Err(Error::last("prctl", "dumpable"));
        }
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // All zeros is the kernel's default action. The C library would refuse its own signals, 32 and 33.
        let default = [0_u64; 4];
        for signal in 1..=64_i64 {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                ptr::null_mut::<u64>(),
                8_usize,
            );
        }
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        for number in 0..3 {
            if libc::fcntl(number, libc::F_GETFD) < 0 && libc::eventfd(0, 0) < 0 {
                return Err(Error::last("eventfd", "standard stream"));
            }
        }
        let mut wanted: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut wanted);
        libc::sigaddset(&mut wanted, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_SETMASK, &wanted, ptr::null_mut());
        let descriptor = libc::signalfd(-1, &wanted, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if descriptor < 0 {
            return Err(Error::last("signalfd", "SIGCHLD"));
        }
        Ok(OwnedFd::from_raw_fd(descriptor))
    }
}

/// Takes what the signal descriptor holds, so that it is not ready again before the next signal.
pub fn drain_signals(descriptor: BorrowedFd<'_>) {
    let mut buffer = [0u8; size_of::<libc::signalfd_siginfo>() * 4];
    // SAFETY: reads into a buffer of our own; the descriptor does not block.
    while unsafe { libc::read(descriptor.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) } > 0 {}
}

/// The next child that has ended, whoever's it was before; it is gone after this.
#[must_use]
pub fn reap() -> Option<(u32, End)> {
    loop {
        let mut status = 0;
        // SAFETY: the status lives past the call.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
        if pid <= 0 {
            return None;
        }
        if libc::WIFEXITED(status) {
            return Some((pid as u32, End::Exited(libc::WEXITSTATUS(status))));
        }
        if libc::WIFSIGNALED(status) {
            return Some((pid as u32, End::Killed(libc::WTERMSIG(status))));
        }
        refuse_to_trace(pid, status);
    }
}

/// A program can make its parent its tracer (PTRACE_TRACEME), and stops are then told as ends are: it goes on as if untraced.
fn refuse_to_trace(pid: i32, status: i32) {
    let signal = match libc::WSTOPSIG(status) {
        libc::SIGTRAP => 0, // of the tracing itself, at exec
        other => other,
    };
    // SAFETY: plain numbers; a process that was killed meanwhile makes it fail, and is reaped next.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, 0, signal) };
}

/// Sends `signal` to a process of this PID namespace.
///
/// # Errors
/// ESRCH when it is gone.
pub fn kill(pid: u32, signal: i32) -> Result<()> {
    let target = i32::try_from(pid).unwrap_or(i32::MAX);
    // SAFETY: plain numbers; never 0 or negative, so never a group.
    if target <= 1 || unsafe { libc::kill(target, signal) } < 0 {
        return Err(Error::last("kill", pid.to_string()));
    }
    Ok(())
}

/// Bytes that a read would get now.
#[must_use]
pub fn readable(descriptor: BorrowedFd<'_>) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: the count lives past the call.
    let asked = unsafe { libc::ioctl(descriptor.as_raw_fd(), libc::FIONREAD, &mut count) };
    if asked < 0 {
        return 0;
    }
    usize::try_from(count).unwrap_or(0)
}

/// Runs `work` in a forked child that has entered the sandbox as `entry` says and holds `keep` alone; its process id.
/// `work` gets the errno when the child could not enter, and answers with its exit status. The caller is single-threaded.
///
/// # Errors
/// EAGAIN, ENOMEM.
pub fn fork_helper(
    entry: &Entry<'_>,
    keep: BorrowedFd<'_>,
    work: impl FnOnce(std::result::Result<(), i32>) -> i32,
) -> Result<u32> {
    // SAFETY: single-threaded, so the child may do whatever the parent could.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(Error::last("fork", "helper"));
    }
    if pid > 0 {
        return Ok(pid as u32);
    }
    let entered = enter_namespace(entry)
        .and_then(|()| restrict(entry))
        .and_then(|()| become_user(entry))
        .map_err(|report| report.errno);
    close_others(keep.as_raw_fd());
    let status = work(entered);
    // SAFETY: does not return and runs nothing of the parent's.
    unsafe { libc::_exit(status) }
}

fn close_others(keep: RawFd) {
    let keep = keep as u32;
    // SAFETY: the helper uses no descriptor but `keep` from here on; aether's owned ones are never dropped in it.
    unsafe {
        if keep > 3 {
            libc::syscall(libc::SYS_close_range, 3u32, keep - 1, 0);
        }
        libc::syscall(libc::SYS_close_range, keep + 1, u32::MAX, 0);
        libc::umask(0o022);
    }
}
