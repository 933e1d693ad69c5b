//! The few btrfs calls that a pool needs: subvolumes, simple quotas, ids.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

use crate::error::{check, Error, Result};

const MAGIC: u64 = 0x94 << 8;
const SUBVOL_CREATE_V2: u64 = write_code(24, size_of::<VolumeArgs>());
const SNAP_CREATE_V2: u64 = write_code(23, size_of::<VolumeArgs>());
const SNAP_DESTROY: u64 = write_code(15, size_of::<NameArgs>());
const QUOTA_CTL: u64 = read_write_code(40, size_of::<QuotaArgs>());
const QGROUP_LIMIT: u64 = (2 << 30) | ((size_of::<LimitArgs>() as u64) << 16) | MAGIC | 43;
const INO_LOOKUP: u64 = read_write_code(18, size_of::<LookupArgs>());
const FS_INFO: u64 = (2 << 30) | ((size_of::<FsInfo>() as u64) << 16) | MAGIC | 31;

const QUOTA_ENABLE_SIMPLE: u64 = 4;
const LIMIT_REFERENCED: u64 = 1;
const FIRST_FREE_ID: u64 = 256;
const SUBVOL_READ_ONLY: u64 = 2;

const fn write_code(number: u64, size: usize) -> u64 {
    (1 << 30) | ((size as u64) << 16) | MAGIC | number
}

const fn read_write_code(number: u64, size: usize) -> u64 {
    (3 << 30) | ((size as u64) << 16) | MAGIC | number
}

#[repr(C)]
struct VolumeArgs {
    fd: i64,
    transid: u64,
    flags: u64,
    size: u64,
    inherit: u64,
    unused: [u64; 2],
    name: [u8; 4040],
}

#[repr(C)]
struct NameArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct QuotaArgs {
    command: u64,
    status: u64,
}

#[repr(C)]
struct LimitArgs {
    group: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved: [u64; 2],
}

#[repr(C)]
struct LookupArgs {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

#[repr(C)]
struct FsInfo {
    max_id: u64,
    devices: u64,
    fsid: [u8; 16],
    rest: [u8; 992],
}

fn open(op: &'static str, path: &str) -> Result<File> {
    File::open(path).map_err(|e| Error::from_io(op, Path::new(path), &e))
}

fn named<const N: usize>(op: &'static str, name: &str) -> Result<[u8; N]> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() > 255 || bytes.contains(&b'/') || bytes.contains(&0) {
        return Err(Error::new(op, name, libc::EINVAL));
    }
    let mut field = [0; N];
    field[..bytes.len()].copy_from_slice(bytes);
    Ok(field)
}

fn request<T>(op: &'static str, path: &str, on: &File, code: u64, args: &mut T) -> Result<()> {
    // SAFETY: each code above is computed from the size of the struct that it is used with, which is ours alone here.
    let r = unsafe { libc::ioctl(on.as_raw_fd(), code as _, ptr::from_mut(args)) };
    check(r.into(), op, path).map(|_| ())
}

/// Makes an empty subvolume `name` in the directory `parent`.
///
/// # Errors
/// EEXIST, ENOSPC, ENOTTY where `parent` is not on btrfs.
pub fn subvolume_create(parent: &str, name: &str) -> Result<()> {
    let op = "subvolume create";
    let mut args = VolumeArgs {
        fd: 0,
        transid: 0,
        flags: 0,
        size: 0,
        inherit: 0,
        unused: [0; 2],
        name: named(op, name)?,
    };
    request(op, name, &open(op, parent)?, SUBVOL_CREATE_V2, &mut args)
}

/// Makes `name` in `parent` a snapshot of the subvolume `source`.
///
/// # Errors
/// As for `subvolume_create`.
pub fn subvolume_snapshot(source: &str, parent: &str, name: &str, read_only: bool) -> Result<()> {
    let op = "subvolume snapshot";
    let source = open(op, source)?;
    let mut args = VolumeArgs {
        fd: source.as_raw_fd().into(),
        transid: 0,
        flags: if read_only { SUBVOL_READ_ONLY } else { 0 },
        size: 0,
        inherit: 0,
        unused: [0; 2],
        name: named(op, name)?,
    };
    request(op, name, &open(op, parent)?, SNAP_CREATE_V2, &mut args)
}

/// Removes the subvolume `name` of `parent`; the kernel frees its space in the background.
///
/// # Errors
/// ENOENT where there is none, EINVAL where it is no subvolume.
pub fn subvolume_delete(parent: &str, name: &str) -> Result<()> {
    let op = "subvolume delete";
    let mut args = NameArgs {
        fd: 0,
        name: named(op, name)?,
    };
    request(op, name, &open(op, parent)?, SNAP_DESTROY, &mut args)
}

/// Turns simple quotas on: what a subvolume writes is charged to it, at once and for good.
///
/// # Errors
/// EINVAL on kernels before 6.7.
pub fn quota_enable_simple(path: &str) -> Result<()> {
    let mut args = QuotaArgs {
        command: QUOTA_ENABLE_SIMPLE,
        status: 0,
    };
    request("quota enable", path, &open("quota enable", path)?, QUOTA_CTL, &mut args)
}

/// Limits what the subvolume at `path` may hold, in bytes of data and metadata.
///
/// # Errors
/// ENOTCONN where quotas are off.
pub fn subvolume_limit(path: &str, bytes: u64) -> Result<()> {
    let mut args = LimitArgs {
        group: 0,
        flags: LIMIT_REFERENCED,
        max_referenced: bytes,
        max_exclusive: 0,
        reserved: [0; 2],
    };
    request(
        "quota limit",
        path,
        &open("quota limit", path)?,
        QGROUP_LIMIT,
        &mut args,
    )
}

/// The id of the subvolume that `path` is in.
///
/// # Errors
/// ENOTTY where `path` is not on btrfs.
pub fn subvolume_id(path: &str) -> Result<u64> {
    let mut args = LookupArgs {
        tree: 0,
        object: FIRST_FREE_ID,
        name: [0; 4080],
    };
    request(
        "subvolume id",
        path,
        &open("subvolume id", path)?,
        INO_LOOKUP,
        &mut args,
    )?;
    Ok(args.tree)
}

/// The file system's UUID, as /sys/fs/btrfs names it.
///
/// # Errors
/// ENOTTY where `path` is not on btrfs.
pub fn filesystem_id(path: &str) -> Result<String> {
    let mut args = FsInfo {
        max_id: 0,
        devices: 0,
        fsid: [0; 16],
        rest: [0; 992],
    };
    request(
        "file system id",
        path,
        &open("file system id", path)?,
        FS_INFO,
        &mut args,
    )?;
    let hex: String = args.fsid.iter().map(|b| format!("{b:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    Ok(parts.join("-"))
}
