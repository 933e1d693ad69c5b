//! What of a file the page cache holds.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{check, Error, Result};

/// `cachestat(2)`, the same number on all architectures (kernel 6.5).
const SYS_CACHESTAT: libc::c_long = 451;
const PAGE: u64 = 4096;

#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of the file at `path` that the page cache holds now.
///
/// # Errors
/// ENOENT, EACCES; ENOSYS on a kernel older than 6.5; EOPNOTSUPP on hugetlbfs.
pub fn cached_bytes(path: &str) -> Result<u64> {
    let file = File::open(path).map_err(|e| Error::from_io("open", Path::new(path), &e))?;
    let range = Range { offset: 0, length: 0 };
    let mut stat = Stat::default();
    // SAFETY: both pointers are to live structures of the kernel's layout; the descriptor is open; flags must be 0.
    let r = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &range, &mut stat, 0) };
    check(r, "cachestat", path)?;
    Ok(stat.cached * PAGE)
}
