//! Makes a process that carries out steps and then runs a program, while the calling thread waits for that.
//!
//! The child shares the parent's memory until it runs the program (CLONE_VM | CLONE_VFORK), so the cost does not grow with
//! the parent. It runs on a stack of its own, makes raw calls only, and writes nothing but its report.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use crate::carry::{forget_above, sys, Carrier};
use crate::error::{check, Error, Result};
use crate::raw;
use crate::step::Step;

const STACK: usize = 64 * 1024;
const KEPT_FROM: i32 = 1024;
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A program to become, and how.
#[derive(Debug)]
pub struct Program {
    /// What happens first; an Arrange must be among them, and names the program.
    pub steps: Vec<Step>,
    pub arguments: Vec<CString>,
    pub environment: Vec<CString>,
    /// CLONE_NEW* flags of the clone itself.
    pub namespaces: i32,
    /// Directory of the v2 cgroup that it starts in.
    pub cgroup: Option<i32>,
}

/// A process that runs its program.
#[derive(Debug)]
pub struct Spawned {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

struct Stack {
    base: *mut libc::c_void,
}

impl Stack {
    fn new() -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: a fresh anonymous mapping, placed by the kernel.
        let base = unsafe { libc::mmap(ptr::null_mut(), STACK, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last("mmap", "stack"));
        }
        Ok(Self { base })
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and the child that used it has exec'd or is gone.
        unsafe { libc::munmap(self.base, STACK) };
    }
}

/// What the child reads, and the two numbers that it writes.
struct Shared<'a> {
    steps: &'a [Step],
    arguments: &'a [usize],
    environment: &'a [usize],
    number: usize,
    /// The highest descriptor that a step uses.
    highest: i32,
    failed_step: usize,
    errno: i32,
}

// SAFETY: called by clone3 alone, with the address of the parent's `Shared`.
unsafe extern "C" fn child(argument: usize) -> ! {
    // SAFETY: the parent waits, suspended, with this record alive on its stack, until the child execs or exits.
    let shared = unsafe { &mut *(argument as *mut Shared<'_>) };
    if let Err(errno) = forget_above(shared.highest) {
        shared.failed_step = usize::MAX;
        shared.errno = errno;
        exit();
    }
    let mut carrier = Carrier::new();
    for (index, step) in shared.steps.iter().enumerate() {
        if let Err(errno) = carrier.carry(step) {
            shared.failed_step = index;
            shared.errno = errno;
            exit();
        }
    }
    shared.failed_step = usize::MAX;
    shared.errno = Carrier::execute(shared.number, shared.arguments, shared.environment);
    exit()
}

fn exit() -> ! {
    loop {
        // Does not come back; the loop is for the type.
        let _ = sys(libc::SYS_exit_group, [127, 0, 0, 0, 0, 0]);
    }
}

fn pointers(texts: &[CString]) -> Vec<usize> {
    let ends = [0_usize];
    texts.iter().map(|t| t.as_ptr() as usize).chain(ends).collect()
}

/// Blocks every signal in this thread while it lives, so that none is handled in the child on our memory.
struct NoSignals {
    before: libc::sigset_t,
}

impl NoSignals {
    fn new() -> Self {
        // SAFETY: sigset_t is plain data; both sets are ours.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }
}

impl Drop for NoSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

fn reap(pid: i32) {
    // SAFETY: our own child, which has exited; no status is wanted.
    unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
}

fn clone_args(program: &Program, stack: &Stack, pidfd: &mut i32) -> libc::clone_args {
    // SAFETY: clone_args is plain numbers, for which zero means absent.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    // FILES: the child takes a copy of its own, without what no step uses.
    args.flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::CLONE_PIDFD) as u64;
    args.flags |= CLONE_CLEAR_SIGHAND;
    args.flags |= program.namespaces as u64 & 0xffff_ffff;
    args.pidfd = ptr::from_mut(pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    args.stack = stack.base as u64;
    args.stack_size = STACK as u64;
    if let Some(fd) = program.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = fd as u64;
    }
    args
}

/// Runs `program` in a new process; comes back when the program runs.
///
/// # Errors
/// The step that failed and why; the process is gone then.
pub fn spawn(program: &Program) -> Result<Spawned> {
    let Some(number) = program.steps.iter().find_map(|step| match step {
        Step::Arrange { fds, .. } => Some(fds.len()),
        _ => None,
    }) else {
        return Err(Error::new("spawn", "no program", libc::EINVAL));
    };
    let (arguments, environment) = (pointers(&program.arguments), pointers(&program.environment));
    let mut shared = Shared {
        steps: &program.steps,
        arguments: &arguments,
        environment: &environment,
        number,
        highest: program.steps.iter().map(Step::highest).max().unwrap_or(-1),
        failed_step: 0,
        errno: 0,
    };
    let stack = Stack::new()?;
    let mut pidfd: i32 = -1;
    let args = clone_args(program, &stack, &mut pidfd);
    let quiet = NoSignals::new();
    // SAFETY: the stack is fresh and page aligned; `child` never returns; `shared` outlives it, since VFORK holds us here.
    let pid = unsafe { raw::clone3(&raw const args, child, ptr::from_mut(&mut shared) as usize) };
    drop(quiet);
    if pid < 0 {
        return Err(Error::new("clone3", "", -pid as i32));
    }
    // SAFETY: the kernel made this descriptor for us.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: a plain read of our own record, through a pointer that the compiler cannot see past the child's writes.
    let (failed_step, errno) = unsafe {
        (
            ptr::read_volatile(&raw const shared.failed_step),
            ptr::read_volatile(&raw const shared.errno),
        )
    };
    if errno != 0 {
        reap(pid as i32);
        let (op, path) = program
            .steps
            .get(failed_step)
            .map_or(("execveat", String::new()), Step::describe);
        return Err(Error::new(op, path, errno));
    }
    Ok(Spawned {
        pid: pid as i32,
        pidfd: out_of_the_way(pidfd),
    })
}

/// The same under a high number: what is kept for as long as a sandbox lives must not lie below what later children need, or
/// each would copy it. Stays as it is where the limit of open files is too low for that.
fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    // SAFETY: plain numbers; a descriptor that comes back is new and ours.
    unsafe {
        let high = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, KEPT_FROM);
        if high < 0 {
            return fd;
        }
        OwnedFd::from_raw_fd(high)
    }
}

/// Waits for our own child `pid` to end; gives its wait status.
///
/// # Errors
/// ECHILD where it is not ours or was waited for already.
pub fn wait(pid: i32) -> Result<i32> {
    let mut status = 0;
    // SAFETY: `status` is ours.
    let r = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    check(r.into(), "waitpid", "")?;
    Ok(status)
}
