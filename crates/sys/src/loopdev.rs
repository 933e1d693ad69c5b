//! A file as a block device, for the pool alone.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr;

use crate::error::{check, Error, Result};

const LOOP_CTL_GET_FREE: u64 = 0x4C82;
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LOOP_GET_STATUS64: u64 = 0x4C05;
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

/// The loop device that lies over `backing` already. While it is open here it does not let go of itself.
fn attached(backing: &File) -> Result<Option<(String, File)>> {
    let told = |path: &Path, error: &std::io::Error| Error::from_io("loop status", path, error);
    let metadata = backing
        .metadata()
        .map_err(|error| told(Path::new("/proc/self/fd"), &error))?;
    let folder = Path::new("/sys/block");
    for entry in folder.read_dir().map_err(|error| told(folder, &error))? {
        let entry = entry.map_err(|error| told(folder, &error))?;
        if !entry.path().join("loop/backing_file").exists() {
            continue;
        }
        let name = format!("/dev/{}", entry.file_name().to_string_lossy());
        // One that lets go just now cannot be opened, or has no status: its file system has ended.
        let Ok(device) = open(&name, libc::O_CLOEXEC) else {
            continue;
        };
        // SAFETY: LoopInfo is plain numbers.
        let mut info: LoopInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the struct is the one that LOOP_GET_STATUS64 fills, and lives past the call.
        let r = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64 as _, ptr::from_mut(&mut info)) };
        if r == 0 && info.device == metadata.dev() && info.inode == metadata.ino() {
            return Ok(Some((name, device)));
        }
    }
    Ok(None)
}

/// A loop device over the file at `path`: its name, and a descriptor to keep until it is mounted.
///
/// The device lets go of itself with its last user. Direct I/O where the file's file system can, to cache once, not twice.
/// A device that is there already is given again, for btrfs takes two devices over one file for two file systems, which
/// would overwrite each other (temporary fsid, since Linux 6.7). `fresh`: refused instead.
///
/// # Errors
/// ENOSPC where every free device was taken by others meanwhile; EBUSY where one is there and `fresh` is asked for.
pub fn loop_attach(path: &str, fresh: bool) -> Result<(String, OwnedFd)> {
    let backing = open(path, libc::O_CLOEXEC)?;
    if let Some((name, device)) = attached(&backing)? {
        if fresh {
            return Err(Error::new("loop attach", path, libc::EBUSY));
        }
        return Ok((name, device.into()));
    }
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
