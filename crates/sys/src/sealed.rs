//! Files in memory that nobody can change any more.

use std::ffi::CString;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::error::{check, Error, Result};

const MFD_NOEXEC_SEAL: u32 = 0x8;
const MFD_EXEC: u32 = 0x10;

/// A sealed memory file with `data` in it, read from its beginning; `program` makes it executable.
///
/// # Errors
/// As the kernel gives them; EACCES where the host forbids executable memory files.
pub fn sealed_file(name: &str, data: &[u8], program: bool) -> Result<OwnedFd> {
    let name_c = CString::new(name).map_err(|_| Error::new("memfd_create", name, libc::EINVAL))?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | if program { MFD_EXEC } else { MFD_NOEXEC_SEAL };
    // SAFETY: the name is a NUL-terminated string that lives past the call.
    let fd = unsafe { libc::memfd_create(name_c.as_ptr(), flags) };
    check(fd.into(), "memfd_create", name)?;
    // SAFETY: the kernel made this descriptor for us.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(data)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .map_err(|e| Error::from_io("write", Path::new(name), &e))?;
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    // SAFETY: plain numbers.
    let r = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    check(r.into(), "fcntl", name)?;
    Ok(file.into())
}

/// A descriptor of the caller's, by number, for one call.
#[must_use]
pub fn borrow<'a>(number: i32) -> BorrowedFd<'a> {
    // SAFETY: the caller holds it open over the call; a wrong number is refused by the kernel with EBADF.
    unsafe { BorrowedFd::borrow_raw(number) }
}
