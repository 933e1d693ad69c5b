//! A process that does nothing but keep another's descriptors open, and takes its place when it ends.

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{check, Error, Result};
use crate::raw;

const PAUSE_MS: u64 = 100;

/// Starts the keeper: a copy of this process that shares its table of descriptors, so that what this process has open stays
/// open, under the same numbers, when it dies. Then, `delay` milliseconds later, the keeper executes `program` with `arguments`
/// and this process's environment; descriptors without close-on-exec are there under the same numbers.
///
/// Between the two it makes system calls alone, so this may be called with threads about. Answers the keeper's process id; it is
/// a child of the caller's.
///
/// # Errors
/// EAGAIN, ENOMEM, EMFILE.
pub fn keep(program: BorrowedFd<'_>, arguments: &[CString], delay: &AtomicU64) -> Result<i32> {
    let myself = std::process::id();
    // SAFETY: plain numbers.
    let life = unsafe { libc::syscall(libc::SYS_pidfd_open, myself, 0) };
    let life = check(life, "pidfd_open", "")? as RawFd;
    let environment: Vec<CString> = std::env::vars_os()
        .filter_map(|(name, value)| {
            let line = [name.as_encoded_bytes(), b"=", value.as_encoded_bytes()].concat();
            CString::new(line).ok()
        })
        .collect();
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter().map(|each| each.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, envp) = (pointers(arguments), pointers(&environment));
    let flags = (libc::CLONE_FILES | libc::SIGCHLD) as usize;
    // SAFETY: a child with memory of its own, as after fork; what it runs makes system calls alone and never returns.
    let pid = unsafe { raw::call(libc::SYS_clone, [flags, 0, 0, 0, 0, 0]) };
    if pid == 0 {
        wait_and_take_over(life, program.as_raw_fd(), argv.as_ptr(), envp.as_ptr(), delay);
    }
    // The number stays open in the table that the keeper shares.
    if pid < 0 {
        drop(adopt(life)?);
        return Err(Error::new("clone", "", -pid as i32));
    }
    Ok(pid as i32)
}

fn wait_and_take_over(
    life: RawFd,
    program: RawFd,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
    delay: &AtomicU64,
) -> ! {
    let mut poll = libc::pollfd {
        fd: life,
        events: libc::POLLIN,
        revents: 0,
    };
    let name = c"pager-keeper";
    // SAFETY: all pointers are to memory of this process, copied from the parent's with all that they point to.
    unsafe {
        raw::call(
            libc::SYS_prctl,
            [libc::PR_SET_NAME as usize, name.as_ptr() as usize, 0, 0, 0, 0],
        );
        while raw::call(libc::SYS_ppoll, [ptr::from_mut(&mut poll) as usize, 1, 0, 0, 0, 0]) != 1 {}
        pause(delay.load(Ordering::Relaxed));
        loop {
            let (at, flags) = (c"".as_ptr() as usize, libc::AT_EMPTY_PATH as usize);
            raw::call(
                libc::SYS_execveat,
                [program as usize, at, argv as usize, envp as usize, flags, 0],
            );
            pause(PAUSE_MS);
        }
    }
}

fn pause(milliseconds: u64) {
    let time = libc::timespec {
        tv_sec: (milliseconds / 1000) as libc::time_t,
        tv_nsec: ((milliseconds % 1000) * 1_000_000) as libc::c_long,
    };
    // SAFETY: the time lives over the call; no remainder is asked for.
    unsafe { raw::call(libc::SYS_nanosleep, [ptr::from_ref(&time) as usize, 0, 0, 0, 0, 0]) };
}

/// Has this process, and what it executes, ignore signals.
pub fn ignore_signals(signals: &[i32]) {
    for signal in signals {
        // SAFETY: a disposition without a handler.
        unsafe { libc::signal(*signal, libc::SIG_IGN) };
    }
}

/// The open descriptor of this number, as the owner's. The caller says so once for each number.
///
/// # Errors
/// EBADF where none is open.
pub fn adopt(number: RawFd) -> Result<OwnedFd> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::fcntl(number, libc::F_GETFD) };
    check(r.into(), "adopt", &number.to_string())?;
    // SAFETY: it is open, and the caller owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Whether nobody but the holder of `file` (open for writing) has it open; a mount of it counts. Tried by a write lease.
///
/// # Errors
/// As fcntl(2) F_SETLEASE; EAGAIN is an answer, no error.
pub fn only_open_here(file: BorrowedFd<'_>) -> Result<bool> {
    // SAFETY: SIGIO, which an open would send while the lease is there, is to be ignored: a disposition without a handler.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    // SAFETY: plain numbers.
    let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    if taken < 0 {
        let error = Error::last("fcntl lease", "");
        return if error.errno == libc::EAGAIN || error.errno == libc::EBUSY {
            Ok(false)
        } else {
            Err(error)
        };
    }
    // SAFETY: plain numbers.
    let r = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    check(r.into(), "fcntl lease", "")?;
    Ok(true)
}
