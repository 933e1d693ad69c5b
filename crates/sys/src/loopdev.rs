//! A file as a block device, for the pool alone.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr;

use crate::error::{check, Error, Result};

const LOOP_CTL_GET_FREE: u64 = 0x4C82;
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const ATTEMPTS: u32 = 64;

#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

fn open(path: &str, flags: i32) -> Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|e| Error::from_io("open", Path::new(path), &e))
}

fn configure(device: &File, backing: &File, flags: u32) -> std::result::Result<(), i32> {
    // SAFETY: LoopConfig is plain numbers, for which zero means the default.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = backing.as_raw_fd() as u32;
    config.info.flags = flags;
    // SAFETY: the struct is the one that LOOP_CONFIGURE reads, and lives past the call.
    let r = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, ptr::from_ref(&config)) };
    if r < 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
    }
    Ok(())
}

/// A loop device over the file at `path`: its name, and a descriptor to keep until it is mounted.
///
/// The device lets go of itself with its last user. Direct I/O where the file's file system can, to cache once, not twice.
///
/// # Errors
/// ENOSPC where every free device was taken by others meanwhile.
pub fn loop_attach(path: &str) -> Result<(String, OwnedFd)> {
    let backing = open(path, libc::O_CLOEXEC)?;
    let control = open("/dev/loop-control", libc::O_CLOEXEC)?;
    for _ in 0..ATTEMPTS {
        // SAFETY: a request without an argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
        let number = check(number.into(), "loop get free", "/dev/loop-control")?;
        let name = format!("/dev/loop{number}");
        let device = open(&name, libc::O_CLOEXEC)?;
        let direct = configure(&device, &backing, LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO);
        let done = match direct {
            Err(libc::EINVAL) => configure(&device, &backing, LO_FLAGS_AUTOCLEAR),
            other => other,
        };
        match done {
            Ok(()) => return Ok((name, device.into())),
            Err(libc::EBUSY) => {}
            Err(errno) => return Err(Error::new("loop configure", name, errno)),
        }
    }
    Err(Error::new("loop configure", path, libc::ENOSPC))
}
