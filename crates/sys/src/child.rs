//! A command's way from aether to its own program: clone into a cgroup, enter the sandbox's user namespace, become the
//! asked user under the sandbox's limits and filter, execute. All memory is prepared before the clone; the child makes
//! system calls only.

use std::ffi::{c_char, CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;

use crate::error::{Error, Result};

/// Who a child is to become, and under what. Identifiers are those of the sandbox's user namespace.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// v1 `tasks` files, opened by the launcher; the child writes "0" to each.
    pub tasks: &'a [BorrowedFd<'a>],
    pub userns: BorrowedFd<'a>,
    pub uid: u32,
    pub gid: u32,
    pub groups: &'a [u32],
    /// Capabilities that remain in the bounding set, and that uid 0 holds.
    pub capabilities: u64,
    pub no_new_privileges: bool,
    /// struct sock_filter[]; empty for aether's own file helpers alone.
    pub filter: &'a [u8],
}

/// What becomes descriptors 0, 1 and 2.
#[derive(Debug, Clone, Copy)]
pub enum Streams<'a> {
    /// Each at least 3.
    Given([BorrowedFd<'a>; 3]),
    /// A terminal of the sandbox's devpts, owned by the user; the child sends its master through `sender`.
    Terminal {
        devpts: BorrowedFd<'a>,
        sender: BorrowedFd<'a>,
        cols: u16,
        rows: u16,
    },
}

/// Everything a command needs.
#[derive(Debug)]
pub struct Launch<'a> {
    pub entry: Entry<'a>,
    /// v2 cgroup directory to be born in.
    pub cgroup: BorrowedFd<'a>,
    pub streams: Streams<'a>,
    /// A further descriptor and its number in the command.
    pub extra: Option<(BorrowedFd<'a>, RawFd)>,
    /// Paths to try, in order.
    pub programs: &'a [CString],
    pub argv: &'a [CString],
    pub env: &'a [CString],
    pub cwd: &'a CStr,
    /// Prefixes of `cwd`, shortest first, to be made by the sandbox's root where missing.
    pub make: &'a [CString],
    pub open_files: u64,
    /// Close-on-exec writer of a pipe: gets one `Report` on failure, nothing on success.
    pub report: BorrowedFd<'a>,
}

/// Where a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Stage {
    Score = 1,
    Limits,
    Namespace,
    OpenFiles,
    Filter,
    Identity,
    Streams,
    Directory,
    Execute,
}

/// Bytes of an encoded report.
pub const REPORT: usize = 8;

/// The failure of a child between clone and exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub stage: Stage,
    pub errno: i32,
}

impl Report {
    /// The report in what was read from the pipe; None for an empty or foreign text.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let stage = u32::from_le_bytes(*bytes.first_chunk::<4>()?);
        let errno = i32::from_le_bytes(*bytes.get(4..)?.first_chunk::<4>()?);
        const STAGES: [Stage; 9] = [
            Stage::Score,
            Stage::Limits,
            Stage::Namespace,
            Stage::OpenFiles,
            Stage::Filter,
            Stage::Identity,
            Stage::Streams,
            Stage::Directory,
            Stage::Execute,
        ];
        let stage = STAGES.into_iter().find(|known| *known as u32 == stage)?;
        Some(Self { stage, errno })
    }
}

type Step = std::result::Result<(), Report>;

fn errno() -> i32 {
    // SAFETY: the location is the calling thread's own and always valid.
    unsafe { *libc::__errno_location() }
}

fn judge(value: libc::c_long, stage: Stage) -> std::result::Result<libc::c_long, Report> {
    if value < 0 {
        return Err(Report { stage, errno: errno() });
    }
    Ok(value)
}

/// Starts the command; its process id. Whether it reached its program is told through `report`.
///
/// # Errors
/// EAGAIN at a process limit, ENOMEM, EACCES where the cgroup is not ours.
pub fn launch(launch: &Launch<'_>) -> Result<u32> {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter()
            .map(|text| text.as_ptr())
            .chain(std::iter::once(ptr::null()))
            .collect()
    };
    let (argv, env) = (pointers(launch.argv), pointers(launch.env));
    let pid = clone_into(launch.cgroup)?;
    if pid > 0 {
        return Ok(pid as u32);
    }
    let mut out = launch.report.as_raw_fd();
    let report = match run(launch, &argv, &env, &mut out) {
        Ok(()) => Report {
            stage: Stage::Execute,
            errno: libc::ENOEXEC,
        },
        Err(report) => report,
    };
    let mut bytes = [0u8; REPORT];
    bytes[..4].copy_from_slice(&(report.stage as u32).to_le_bytes());
    bytes[4..].copy_from_slice(&report.errno.to_le_bytes());
    // SAFETY: the buffer lives past the call; _exit does not return and runs nothing of the parent's.
    unsafe {
        libc::write(out, bytes.as_ptr().cast(), REPORT);
        libc::_exit(127)
    }
}

/// From linux/sched.h; libc's constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A fork whose child is born in `cgroup`. Zero in the child. The caller is single-threaded.
fn clone_into(cgroup: BorrowedFd<'_>) -> Result<libc::c_long> {
    // SAFETY: clone_args is plain data for which zero means "not asked for".
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = CLONE_INTO_CGROUP;
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.cgroup = cgroup.as_raw_fd() as u64;
    // SAFETY: no memory is shared with the child and no stack is given, so this is fork(2).
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<libc::clone_args>()) };
    if pid < 0 {
        return Err(Error::last("clone3", "command"));
    }
    Ok(pid)
}

/// `out`: the report's descriptor, and where it was moved to.
fn run(launch: &Launch<'_>, argv: &[*const c_char], env: &[*const c_char], out: &mut RawFd) -> Step {
    // SAFETY: a copy at a free number, out of the way of every descriptor that a command is given.
    let moved = unsafe { libc::fcntl(*out, libc::F_DUPFD_CLOEXEC, 300) };
    judge(moved.into(), Stage::Streams)?;
    *out = moved;
    reset_signals();
    // SAFETY: both only change this process.
    unsafe {
        libc::umask(0o022);
        libc::setsid();
    }
    raise_score()?;
    enter_namespace(&launch.entry)?;
    limit(launch.open_files)?;
    forget_descriptors(launch, *out);
    make_directories(launch.make);
    restrict(&launch.entry)?;
    become_user(&launch.entry)?;
    streams(&launch.streams)?;
    extra(launch.extra, *out)?;
    // SAFETY: the path is NUL-terminated and lives past the call.
    judge(unsafe { libc::chdir(launch.cwd.as_ptr()) }.into(), Stage::Directory)?;
    execute(launch.programs, argv, env)
}

/// Empty mask, and SIGPIPE (which Rust ignores) back to its default; aether sets no other disposition.
fn reset_signals() {
    // SAFETY: the set is initialised by sigemptyset before it is used; SIG_DFL is valid for SIGPIPE.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// A command is killed before aether when the host runs out. Its own file in /proc can be written by a dumpable process only;
/// nothing of the sandbox can trace this one yet, whose user and address space are the host's.
fn raise_score() -> Step {
    // SAFETY: constant strings; the descriptor is ours.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        judge(file.into(), Stage::Score)?;
        let written = libc::write(file, c"500".as_ptr().cast(), 3);
        judge(written as libc::c_long, Stage::Score)?;
        libc::close(file);
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
    }
    Ok(())
}

pub(crate) fn enter_namespace(entry: &Entry<'_>) -> Step {
    for task in entry.tasks {
        // SAFETY: the buffer is a constant.
        let written = unsafe { libc::write(task.as_raw_fd(), c"0".as_ptr().cast(), 1) };
        judge(written as libc::c_long, Stage::Limits)?;
    }
    // SAFETY: only changes this process's credentials.
    let entered = unsafe { libc::setns(entry.userns.as_raw_fd(), libc::CLONE_NEWUSER) };
    judge(entered.into(), Stage::Namespace)?;
    // Raw calls: glibc's would try to tell other threads. Root first, so that leaving it drops every capability.
    // SAFETY: plain numbers.
    unsafe {
        judge(
            libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>()),
            Stage::Identity,
        )?;
        judge(libc::syscall(libc::SYS_setresgid, 0, 0, 0), Stage::Identity)?;
        judge(libc::syscall(libc::SYS_setresuid, 0, 0, 0), Stage::Identity)?;
    }
    Ok(())
}

fn limit(open_files: u64) -> Step {
    let files = libc::rlimit {
        rlim_cur: open_files,
        rlim_max: open_files,
    };
    let none = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both structures live past the calls.
    unsafe {
        judge(libc::setrlimit(libc::RLIMIT_NOFILE, &files).into(), Stage::OpenFiles)?;
        // The server's own rights to go before others are not handed down.
        for kind in [libc::RLIMIT_CORE, libc::RLIMIT_RTPRIO, libc::RLIMIT_NICE] {
            judge(libc::setrlimit(kind, &none).into(), Stage::OpenFiles)?;
        }
    }
    Ok(())
}

/// What cannot be made shows when the command enters its directory.
fn make_directories(prefixes: &[CString]) {
    for prefix in prefixes {
        // SAFETY: the path is NUL-terminated and lives past the call.
        unsafe { libc::mkdir(prefix.as_ptr(), 0o755) };
    }
}

const LAST_CAPABILITY: libc::c_ulong = 40;

pub(crate) fn restrict(entry: &Entry<'_>) -> Step {
    for capability in 0..=LAST_CAPABILITY {
        if entry.capabilities & (1 << capability) == 0 {
            // SAFETY: plain numbers.
            let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
            judge(dropped.into(), Stage::Identity)?;
        }
    }
    if entry.no_new_privileges {
        // SAFETY: plain numbers.
        let set = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        judge(set.into(), Stage::Filter)?;
    }
    if !entry.filter.is_empty() {
        let program = libc::sock_fprog {
            len: (entry.filter.len() / size_of::<libc::sock_filter>()) as u16,
            filter: entry.filter.as_ptr().cast_mut().cast(),
        };
        // Installed while the process still holds CAP_SYS_ADMIN in its namespace, so that set-uid programs keep working.
        // SAFETY: the kernel copies the program; it only reads, and sock_filter may lie at any address for it.
        let installed = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &program) };
        judge(installed, Stage::Filter)?;
    }
    Ok(())
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

pub(crate) fn become_user(entry: &Entry<'_>) -> Step {
    // SAFETY: the group list lives past the call; the rest are plain numbers and structures that live past their call.
    unsafe {
        let groups = libc::syscall(libc::SYS_setgroups, entry.groups.len(), entry.groups.as_ptr());
        judge(groups, Stage::Identity)?;
        judge(
            libc::syscall(libc::SYS_setresgid, entry.gid, entry.gid, entry.gid),
            Stage::Identity,
        )?;
        if entry.uid == 0 {
            let header = CapabilityHeader {
                version: 0x2008_0522,
                pid: 0,
            };
            let half = |bits: u64| CapabilityData {
                effective: bits as u32,
                permitted: bits as u32,
                inheritable: 0,
            };
            let data = [half(entry.capabilities), half(entry.capabilities >> 32)];
            judge(libc::syscall(libc::SYS_capset, &header, data.as_ptr()), Stage::Identity)?;
        } else {
            judge(
                libc::syscall(libc::SYS_setresuid, entry.uid, entry.uid, entry.uid),
                Stage::Identity,
            )?;
        }
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
    }
    Ok(())
}

fn streams(streams: &Streams<'_>) -> Step {
    match streams {
        Streams::Given(given) => {
            for (target, source) in given.iter().enumerate() {
                // SAFETY: sources are at least 3, so no target overwrites a source.
                let put = unsafe { libc::dup2(source.as_raw_fd(), target as RawFd) };
                judge(put.into(), Stage::Streams)?;
            }
            Ok(())
        }
        Streams::Terminal {
            devpts,
            sender,
            cols,
            rows,
        } => terminal(*devpts, *sender, *cols, *rows),
    }
}

fn terminal(devpts: BorrowedFd<'_>, sender: BorrowedFd<'_>, cols: u16, rows: u16) -> Step {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let unlock: libc::c_int = 0;
    // SAFETY: constant strings, structures that live past their calls, descriptors of our own.
    unsafe {
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        let master = libc::openat(devpts.as_raw_fd(), c"ptmx".as_ptr(), flags);
        judge(master.into(), Stage::Streams)?;
        judge(libc::ioctl(master, libc::TIOCSPTLCK, &unlock).into(), Stage::Streams)?;
        judge(libc::ioctl(master, libc::TIOCSWINSZ, &size).into(), Stage::Streams)?;
        let slave = libc::ioctl(master, libc::TIOCGPTPEER, flags);
        judge(slave.into(), Stage::Streams)?;
        judge(libc::ioctl(slave, libc::TIOCSCTTY, 0).into(), Stage::Streams)?;
        crate::child_socket::send_descriptor(sender.as_raw_fd(), master).map_err(|errno| Report {
            stage: Stage::Streams,
            errno,
        })?;
        for target in 0..3 {
            judge(libc::dup2(slave, target).into(), Stage::Streams)?;
        }
    }
    Ok(())
}

/// Closes what the command is not given, before any path of the sandbox's choosing is walked: `/proc/self/fd/N` in a
/// directory's or program's name would lead through aether's cgroup directories out of the sandbox.
fn forget_descriptors(launch: &Launch<'_>, report: RawFd) {
    let further = launch.extra.map_or(report, |(source, _)| source.as_raw_fd());
    match &launch.streams {
        Streams::Given([input, output, error]) => {
            let streams = [input.as_raw_fd(), output.as_raw_fd(), error.as_raw_fd()];
            close_but([report, further, streams[0], streams[1], streams[2]]);
        }
        Streams::Terminal { devpts, sender, .. } => {
            close_but([report, further, devpts.as_raw_fd(), sender.as_raw_fd()]);
        }
    }
}

/// Closes every descriptor from 3 on that is not among `kept`.
fn close_but<const N: usize>(mut kept: [RawFd; N]) {
    // SAFETY: plain numbers; nothing in this process drops a descriptor that it owned.
    let close = |first: RawFd, last: libc::c_uint| unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    kept.sort_unstable();
    let mut first = 3;
    for number in kept {
        if number > first {
            close(first, number as libc::c_uint - 1);
        }
        first = first.max(number + 1);
    }
    close(first, libc::c_uint::MAX);
}

/// Puts the further descriptor in its place and closes every other one but the report's, which the program's start closes.
fn extra(extra: Option<(BorrowedFd<'_>, RawFd)>, report: RawFd) -> Step {
    let Some((source, target)) = extra else {
        close_but([report]);
        return Ok(());
    };
    // SAFETY: the target is neither the report nor one of the standard three.
    unsafe {
        let put = if source.as_raw_fd() == target {
            libc::fcntl(target, libc::F_SETFD, 0)
        } else {
            libc::dup2(source.as_raw_fd(), target)
        };
        judge(put.into(), Stage::Streams)?;
    }
    close_but([report, target]);
    Ok(())
}

/// As execvp(3), but a text without a known format is an error rather than a script.
fn execute(programs: &[CString], argv: &[*const c_char], env: &[*const c_char]) -> Step {
    let mut reason = libc::ENOENT;
    for program in programs {
        // SAFETY: both arrays end with a null pointer, and all texts are NUL-terminated and live.
        unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
        match errno() {
            libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP => {}
            // Somewhere further on there may be one that may be executed; if not, this is the reason.
            libc::EACCES => reason = libc::EACCES,
            other => {
                return Err(Report {
                    stage: Stage::Execute,
                    errno: other,
                })
            }
        }
    }
    Err(Report {
        stage: Stage::Execute,
        errno: reason,
    })
}
