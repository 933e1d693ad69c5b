//! Namespaces made ahead: a sandbox's user namespace and those it owns, and the bare mount namespace all begin from.

use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::ptr;

use crate::carry::{close, forget_above, sys};
use crate::disguise::Disguise;
use crate::error::{c_string, check, Error, Result};
use crate::mount::{mount, umount};
use crate::mountfd::private_proc;
use crate::raw;

const STACK: usize = 16 * 1024;
/// Ids in a sandbox's map: 0 to 65,535.
pub const IDS: u32 = 65_536;

/// The namespaces of one sandbox, kept by descriptors alone: no process is in them.
#[derive(Debug)]
pub struct Namespaces {
    pub user: OwnedFd,
    pub net: OwnedFd,
    pub ipc: OwnedFd,
    pub uts: OwnedFd,
}

/// What the holder reads: descriptors to report on and of a /proc, and the server's process id.
struct Orders {
    report: i32,
    proc: i32,
    parent: i32,
}

/// The holder: sets what only a process inside can set, then waits to be killed. Raw calls only, no thread-local storage.
// SAFETY: called by clone3 alone, with the address of the parent's `Orders`, which live until the report is read.
unsafe extern "C" fn hold(argument: usize) -> ! {
    // SAFETY: see above.
    let orders = unsafe { &*(argument as *const Orders) };
    let answer = forget_above(orders.report.max(orders.proc))
        .and_then(|_| end_with_parent(orders.parent))
        .and_then(|_| forbid_nested_namespaces(orders.proc))
        .err()
        .unwrap_or(0);
    let byte = answer as u8;
    let _ = sys(
        libc::SYS_write,
        [orders.report as usize, ptr::from_ref(&byte) as usize, 1, 0, 0, 0],
    );
    loop {
        let _ = sys(libc::SYS_ppoll, [0; 6]);
    }
}

/// A server that is killed meanwhile must not leave a holder behind: with it would stay all descriptors of the server.
fn end_with_parent(parent: i32) -> std::result::Result<isize, i32> {
    let (what, signal) = (libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize);
    let set = sys(libc::SYS_prctl, [what, signal, 0, 0, 0, 0]);
    // The server may have died before the signal was asked for; then nobody will send it.
    if sys(libc::SYS_getppid, [0; 6])? as i32 != parent {
        let _ = sys(libc::SYS_exit_group, [1, 0, 0, 0, 0, 0]);
    }
    set
}

fn forbid_nested_namespaces(proc: i32) -> std::result::Result<isize, i32> {
    let path = c"sys/user/max_user_namespaces".as_ptr() as usize;
    let flags = (libc::O_WRONLY | libc::O_CLOEXEC) as usize;
    let fd = sys(libc::SYS_openat, [proc as usize, path, flags, 0, 0, 0])? as usize;
    let done = sys(libc::SYS_write, [fd, c"0".as_ptr() as usize, 1, 0, 0, 0]);
    close(fd as i32);
    done
}

/// A process that shares our memory and lives in the new namespaces until it is dropped.
struct Holder {
    pid: i32,
    stack: *mut libc::c_void,
}

impl Holder {
    fn new(owner: u32, proc: &OwnedFd) -> Result<Self> {
        let (ready, report) = pipe()?;
        let orders = Orders {
            report: report.as_raw_fd(),
            proc: proc.as_raw_fd(),
            parent: std::process::id() as i32,
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: a fresh anonymous mapping, placed by the kernel.
        let stack = unsafe { libc::mmap(ptr::null_mut(), STACK, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if stack == libc::MAP_FAILED {
            return Err(Error::last("mmap", "stack"));
        }
        let mut holder = Self { pid: 0, stack };
        // SAFETY: clone_args is plain numbers, for which zero means absent.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        let new = libc::CLONE_NEWUSER | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        // CLEAR_SIGHAND: no handler of ours may run in it. FILES: it takes its own copy, without what it does not need.
        args.flags = (libc::CLONE_VM | libc::CLONE_FILES | new) as u64 | 0x1_0000_0000;
        args.exit_signal = libc::SIGCHLD as u64;
        args.stack = stack as u64;
        args.stack_size = STACK as u64;
        let owner = Disguise::effective(owner)?;
        let argument = ptr::from_ref(&orders) as usize;
        // SAFETY: the stack is fresh and stays mapped until the holder is dead; `hold` never returns and touches no
        // memory but its own stack and constants.
        let pid = unsafe { raw::clone3(&raw const args, hold, argument) };
        drop(owner);
        if pid < 0 {
            return Err(Error::new("clone3", "user namespace", -pid as i32));
        }
        holder.pid = pid as i32;
        wait_for(&ready, holder.pid)?;
        let mut answer = 0_u8;
        // SAFETY: one byte into one byte.
        let got = unsafe { libc::read(ready.as_raw_fd(), (&raw mut answer).cast(), 1) };
        if got != 1 {
            return Err(Error::new("read", "holder", libc::EPIPE));
        }
        if answer != 0 {
            return Err(Error::new("write", "/proc/sys/user/max_user_namespaces", answer.into()));
        }
        Ok(holder)
    }

    fn map(&self, base: u32) -> Result<()> {
        for name in ["uid_map", "gid_map"] {
            let path = format!("/proc/{}/{name}", self.pid);
            fs::write(&path, format!("0 {base} {IDS}")).map_err(|e| Error::from_io("write", Path::new(&path), &e))?;
        }
        Ok(())
    }

    fn open(&self, name: &str) -> Result<OwnedFd> {
        let path = format!("/proc/{}/ns/{name}", self.pid);
        let file = File::open(&path).map_err(|e| Error::from_io("open", Path::new(&path), &e))?;
        Ok(file.into())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SAFETY: the pid is our own child's, not yet waited for; the stack is ours and unused once it is dead.
        unsafe {
            if self.pid > 0 {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, ptr::null_mut(), 0);
            }
            libc::munmap(self.stack, STACK);
        }
    }
}

/// Returns when `ready` has something to read. Its other end is ours too, so the holder's death does not close it.
fn wait_for(ready: &OwnedFd, holder: i32) -> Result<()> {
    // SAFETY: plain numbers; on success the descriptor is new and ours.
    let pidfd = unsafe {
        let fd = check(libc::syscall(libc::SYS_pidfd_open, holder, 0), "pidfd_open", "holder")?;
        OwnedFd::from_raw_fd(fd as i32)
    };
    let mut ends = [ready, &pidfd].map(|fd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    loop {
        // SAFETY: two records of ours.
        let r = unsafe { libc::poll(ends.as_mut_ptr(), 2, -1) };
        match check(r.into(), "poll", "holder") {
            Err(error) if error.errno == libc::EINTR => {}
            Err(error) => return Err(error),
            Ok(_) if ends[0].revents != 0 => return Ok(()),
            Ok(_) => return Err(Error::new("read", "holder", libc::EPIPE)),
        }
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0_i32; 2];
    // SAFETY: two numbers into two places; on success both descriptors are new and ours.
    unsafe {
        check(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC).into(), "pipe2", "")?;
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// Makes the namespaces of a sandbox whose ids are `base` to `base` + 65,535, owned by the host id `owner`.
///
/// In them: no nested user namespaces, loopback up, every port and ICMP echo open to every user.
///
/// # Errors
/// ENOSPC at the host's limits of namespaces; EPERM without privilege.
pub fn make_namespaces(base: u32, owner: u32) -> Result<Namespaces> {
    let proc = private_proc()?;
    let holder = Holder::new(owner, &proc)?;
    holder.map(base)?;
    let made = Namespaces {
        user: holder.open("user")?,
        net: holder.open("net")?,
        ipc: holder.open("ipc")?,
        uts: holder.open("uts")?,
    };
    drop(holder);
    open_network(&made.net, &proc, base)?;
    Ok(made)
}

fn sysctl(proc: &OwnedFd, name: &str, value: &str) -> Result<()> {
    let path: CString = c_string("open", name)?;
    // SAFETY: the path is a NUL-terminated string that lives past the call; a descriptor that comes back is new and ours.
    let mut file: File = unsafe {
        let fd = libc::openat(proc.as_raw_fd(), path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        OwnedFd::from_raw_fd(check(fd.into(), "open", name)? as i32).into()
    };
    file.write_all(value.as_bytes())
        .map_err(|e| Error::from_io("write", Path::new(name), &e))
}

/// Sets up the network from a thread that visits it; the thread ends, so nothing of ours stays there.
fn open_network(net: &OwnedFd, proc: &OwnedFd, base: u32) -> Result<()> {
    in_thread(|| {
        // SAFETY: a descriptor that lives past the call.
        let r = unsafe { libc::setns(net.as_raw_fd(), libc::CLONE_NEWNET) };
        check(r.into(), "setns", "net")?;
        loopback_up()?;
        sysctl(proc, "sys/net/ipv4/ip_unprivileged_port_start", "0")?;
        let last = base + IDS - 1;
        sysctl(proc, "sys/net/ipv4/ping_group_range", &format!("{base} {last}"))
    })
}

pub(crate) fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .spawn_scoped(scope, work)
            .map_err(|e| Error::from_io("thread", Path::new(""), &e))?
            .join()
            .unwrap_or_else(|_| Err(Error::new("thread", "panicked", libc::EIO)))
    })
}

fn loopback_up() -> Result<()> {
    // SAFETY: a new socket, and an ifreq that is ours; `lo` fits its name field.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        check(fd.into(), "socket", "")?;
        let socket = OwnedFd::from_raw_fd(fd);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        check(
            libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request).into(),
            "ioctl",
            "lo up",
        )?;
    }
    Ok(())
}

/// A mount namespace with nothing in it but an empty, read-only root with the directories `r`, `s`, `t` and `y`: where sandboxes
/// begin, so that no mount of the host's is ever copied into one. At `y` is a file system of its own with the directories
/// `skeleton`, parents first, that all sandboxes share.
///
/// # Errors
/// As the kernel gives them. `scratch` is a directory that the namespace is built over (in a private copy).
pub fn make_stage(scratch: &str, skeleton: &[&str]) -> Result<OwnedFd> {
    in_thread(|| {
        // SAFETY: plain numbers; concerns this thread, which ends with this function.
        let r = unsafe { libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS) };
        check(r.into(), "unshare", "mount namespace")?;
        mount("", "/", "", libc::MS_REC | libc::MS_PRIVATE, "")?;
        let (quiet, read_only) = (
            libc::MS_NOSUID | libc::MS_NODEV,
            libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY,
        );
        mount("stage", scratch, "tmpfs", quiet, "mode=755,size=64k")?;
        for name in ["r", "s", "t", "y"] {
            make_directory(&Path::new(scratch).join(name))?;
        }
        let shared = format!("{scratch}/y");
        let quieter = quiet | libc::MS_NOEXEC;
        mount("sys", &shared, "tmpfs", quieter, "mode=755,size=4k,nr_inodes=64")?;
        for name in skeleton {
            make_directory(&Path::new(&shared).join(name))?;
        }
        mount("", &shared, "", read_only | quieter, "")?;
        // Opened before the root moves, while the host's /proc is still to be seen.
        let here =
            File::open("/proc/thread-self/ns/mnt").map_err(|e| Error::from_io("open", Path::new("ns/mnt"), &e))?;
        std::env::set_current_dir(scratch).map_err(|e| Error::from_io("chdir", Path::new(scratch), &e))?;
        // SAFETY: both paths are NUL-terminated strings.
        let r = unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) };
        check(r, "pivot_root", scratch)?;
        umount(".", true)?;
        mount("", "/", "", read_only | quiet, "")?;
        Ok(here.into())
    })
}

/// A directory that anyone may look into, whatever the server's umask.
fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755)))
        .map_err(|e| Error::from_io("mkdir", path, &e))
}

/// The descriptors of a set, in the order user, net, ipc, uts.
impl Namespaces {
    #[must_use]
    pub fn numbers(&self) -> [i32; 4] {
        [&self.user, &self.net, &self.ipc, &self.uts].map(|fd| fd.as_fd().as_raw_fd())
    }
}
