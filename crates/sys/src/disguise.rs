//! Acting under other ids for a moment, in this thread alone.

use crate::error::{check, Result};

const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 4;

/// While it lives, this thread has other ids but keeps its capabilities; dropping it gives the old ids back.
///
/// The C library's own calls would change every thread of the process; these change one.
pub struct Disguise {
    before: Before,
}

enum Before {
    FsIds,
    Effective,
}

fn securebits(bits: libc::c_ulong) -> Result<()> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits, 0, 0, 0) };
    check(r.into(), "prctl", "securebits").map(|_| ())
}

impl Disguise {
    /// New files, and the file systems mounted now, belong to `id`.
    ///
    /// # Errors
    /// EPERM without CAP_SETPCAP.
    pub fn file_system(id: u32) -> Result<Self> {
        securebits(SECBIT_NO_SETUID_FIXUP)?;
        // SAFETY: plain numbers; both calls concern this thread alone.
        unsafe {
            libc::syscall(libc::SYS_setfsgid, id);
            libc::syscall(libc::SYS_setfsuid, id);
        }
        Ok(Self { before: Before::FsIds })
    }

    /// A user namespace made now is owned by `id`.
    ///
    /// # Errors
    /// EPERM without CAP_SETPCAP or CAP_SETUID.
    pub fn effective(id: u32) -> Result<Self> {
        securebits(SECBIT_NO_SETUID_FIXUP)?;
        let guard = Self {
            before: Before::Effective,
        };
        // SAFETY: plain numbers; the raw call concerns this thread alone.
        let r = unsafe { libc::syscall(libc::SYS_setresuid, -1_i32, id, -1_i32) };
        check(r, "setresuid", "")?;
        Ok(guard)
    }
}

impl Drop for Disguise {
    fn drop(&mut self) {
        // SAFETY: plain numbers; the calls concern this thread alone, whose real ids are those it goes back to.
        let restored = unsafe {
            match self.before {
                Before::FsIds => {
                    libc::syscall(libc::SYS_setfsuid, libc::geteuid());
                    libc::syscall(libc::SYS_setfsgid, libc::getegid());
                    0
                }
                Before::Effective => libc::syscall(libc::SYS_setresuid, -1_i32, libc::getuid(), -1_i32),
            }
        };
        // A thread that cannot get its own ids back must not go on as another user.
        if restored != 0 || securebits(0).is_err() {
            std::process::abort();
        }
    }
}
