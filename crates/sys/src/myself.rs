//! The steps that concern the new process itself: its groups, root, ids, descriptors and program.

use crate::carry::{sys, Carrier, Done};
use crate::step::{Fd, Step};

const SECBIT_NO_SETUID_FIXUP: usize = 4;
const LAST_CAPABILITY: usize = 63;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;
const SCRATCH: usize = 64;
const ARRANGED: usize = 32;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

fn fs_ids(id: u32) -> Done {
    prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)?;
    sys(libc::SYS_umask, [0; 6])?;
    sys(libc::SYS_setfsgid, [id as usize, 0, 0, 0, 0, 0])?;
    sys(libc::SYS_setfsuid, [id as usize, 0, 0, 0, 0, 0])
}

fn prctl(what: i32, value: usize) -> Done {
    sys(libc::SYS_prctl, [what as usize, value, 0, 0, 0, 0])
}

fn pivot(root: i32) -> Done {
    sys(libc::SYS_fchdir, [root as usize, 0, 0, 0, 0, 0])?;
    let here = c".".as_ptr() as usize;
    sys(libc::SYS_pivot_root, [here, here, 0, 0, 0, 0])?;
    sys(libc::SYS_umount2, [here, libc::MNT_DETACH as usize, 0, 0, 0, 0])?;
    sys(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0, 0, 0, 0])
}

/// When the host itself runs out of memory, sandboxes go before its own programs. Nobody inside can
/// take this back where the server has CAP_SYS_RESOURCE.
fn offer_first() -> Done {
    let path = c"/proc/self/oom_score_adj".as_ptr() as usize;
    let flags = (libc::O_WRONLY | libc::O_CLOEXEC) as usize;
    let fd = sys(libc::SYS_openat, [libc::AT_FDCWD as usize, path, flags, 0, 0, 0])? as usize;
    sys(libc::SYS_write, [fd, c"300".as_ptr() as usize, 3, 0, 0, 0])?;
    sys(libc::SYS_close, [fd, 0, 0, 0, 0, 0])
}

fn settle() -> Done {
    offer_first()?;
    sys(libc::SYS_setsid, [0; 6])?;
    sys(libc::SYS_umask, [0o022, 0, 0, 0, 0, 0])?;
    let none = [0_u64; 2];
    let limit = std::ptr::from_ref(&none) as usize;
    sys(libc::SYS_prlimit64, [0, libc::RLIMIT_CORE as usize, limit, 0, 0, 0])?;
    let empty = 0_u64;
    let mask = std::ptr::from_ref(&empty) as usize;
    sys(
        libc::SYS_rt_sigprocmask,
        [libc::SIG_SETMASK as usize, mask, 0, size_of::<u64>(), 0, 0],
    )
}

fn without_capabilities(id: u32) -> Done {
    sys(libc::SYS_setgroups, [0; 6])?;
    for capability in 0..=LAST_CAPABILITY {
        match prctl(libc::PR_CAPBSET_DROP, capability) {
            Err(libc::EINVAL) => break,
            other => other?,
        };
    }
    prctl(libc::PR_SET_SECUREBITS, 0)?;
    let id = id as usize;
    sys(libc::SYS_setresgid, [id, id, id, 0, 0, 0])?;
    sys(libc::SYS_setresuid, [id, id, id, 0, 0, 0])?;
    let header = CapabilityHeader {
        version: CAPABILITY_VERSION_3,
        pid: 0,
    };
    let none = [0_u32; 6];
    let header_ptr = std::ptr::from_ref(&header) as usize;
    let none_ptr = std::ptr::from_ref(&none) as usize;
    sys(libc::SYS_capset, [header_ptr, none_ptr, 0, 0, 0, 0])
}

impl Carrier {
    /// Moves every wanted descriptor out of the way first, so that no target overwrites a source.
    fn arrange(&mut self, fds: &[Fd], program: Fd) -> Done {
        let mut aside = [0_usize; ARRANGED];
        let count = fds.len();
        if count >= ARRANGED {
            return Err(libc::E2BIG);
        }
        for (place, fd) in aside.iter_mut().zip(fds.iter().copied().chain([program])) {
            let source = self.fd(fd) as usize;
            *place = sys(libc::SYS_fcntl, [source, libc::F_DUPFD as usize, SCRATCH, 0, 0, 0])? as usize;
        }
        for (number, source) in aside.iter().take(count + 1).enumerate() {
            let flags = if number == count { libc::O_CLOEXEC as usize } else { 0 };
            sys(libc::SYS_dup3, [*source, number, flags, 0, 0, 0])?;
        }
        sys(libc::SYS_close_range, [count + 1, u32::MAX as usize, 0, 0, 0, 0])
    }

    pub(crate) fn carry_self(&mut self, step: &Step) -> Done {
        match step {
            Step::FsIds { id } => fs_ids(*id),
            Step::Enlist { tasks } => {
                let fd = self.fd(*tasks) as usize;
                sys(libc::SYS_write, [fd, c"0".as_ptr() as usize, 1, 0, 0, 0])
            }
            Step::Pivot { root } => pivot(self.fd(*root)),
            Step::Settle => settle(),
            Step::Become { id } => without_capabilities(*id),
            Step::Arrange { fds, program } => self.arrange(fds, *program),
            _ => Err(libc::ENOSYS),
        }
    }

    /// Runs the program that descriptor `number` holds. Only comes back when it failed.
    pub(crate) fn execute(number: usize, arguments: &[usize], environment: &[usize]) -> i32 {
        let (arguments, environment) = (arguments.as_ptr() as usize, environment.as_ptr() as usize);
        let flags = libc::AT_EMPTY_PATH as usize;
        let done = sys(
            libc::SYS_execveat,
            [number, c"".as_ptr() as usize, arguments, environment, flags, 0],
        );
        done.err().unwrap_or(libc::ENOEXEC)
    }
}
