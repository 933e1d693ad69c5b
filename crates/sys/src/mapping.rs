//! Files mapped into memory, seen as atomics: whoever else has them mapped or writes them breaks no rule of the language.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, AtomicU8, Ordering};

use crate::error::{check, Error, Result};

/// A shared mapping of the first bytes of a file.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
}

// SAFETY: the memory is only reached through atomics and system calls.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `length` bytes of `file`, which must have them; a length of 0 maps nothing.
    ///
    /// # Errors
    /// EINVAL where the file is shorter; ENOMEM; EACCES.
    pub fn new(file: &File, length: usize, writable: bool) -> Result<Self> {
        let has = file
            .metadata()
            .map_err(|e| Error::from_io("fstat", Path::new(""), &e))?
            .len();
        if has < length as u64 {
            return Err(Error::new(
                "mmap",
                "a file shorter than what is to be mapped",
                libc::EINVAL,
            ));
        }
        if length == 0 {
            return Ok(Self {
                start: NonNull::<u64>::dangling().cast(),
                length,
                writable,
            });
        }
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping at a place of the kernel's choice, of an open file that is as long.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(Error::last("mmap", ""));
        }
        let start = NonNull::new(at.cast()).ok_or_else(|| Error::new("mmap", "", libc::ENOMEM))?;
        Ok(Self {
            start,
            length,
            writable,
        })
    }

    #[must_use]
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: the mapping is this long, lives as long as self, and AtomicU8 has the layout of a byte.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.length) }
    }

    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: as bytes(); a mapping (and the dangling start of an empty one) is aligned for words.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.length / 8) }
    }

    /// A copy of `N` bytes at `at`; None beyond the end.
    #[must_use]
    pub fn copy<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let cells = self.bytes().get(at..at.checked_add(N)?)?;
        let mut out = [0; N];
        for (to, from) in out.iter_mut().zip(cells) {
            *to = from.load(Ordering::Relaxed);
        }
        Some(out)
    }

    /// One `read` of `file` straight into the mapping, `at` and `length` in bytes: what the kernel gave is there even if this
    /// process ends before it can look.
    ///
    /// # Errors
    /// EINVAL outside the mapping or where it is not writable; else as read(2).
    pub fn read_from(&self, file: BorrowedFd<'_>, at: usize, length: usize) -> Result<usize> {
        if !self.writable || at.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(Error::new("read", "a mapping", libc::EINVAL));
        }
        // SAFETY: the range was checked to lie in the mapping, which is writable.
        let r = unsafe { libc::read(file.as_raw_fd(), self.start.as_ptr().add(at).cast(), length) };
        Ok(check(r as libc::c_long, "read", "")? as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: this very mapping was made by new(), and no slice of it outlives self.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn file(bytes: &[u8]) -> File {
        File::from(crate::sealed_file("mapping-test", bytes, false).unwrap())
    }

    #[test]
    fn copies_stay_inside() {
        let map = Mapping::new(&file(b"0123456789"), 10, false).unwrap();
        assert_eq!(map.copy::<4>(6), Some(*b"6789"));
        assert_eq!(map.copy::<4>(7), None);
        assert_eq!(map.copy::<4>(usize::MAX), None);
        assert!(Mapping::new(&file(b"0123"), 5, false).is_err());
        assert!(Mapping::new(&file(b""), 0, false).unwrap().bytes().is_empty());
    }

    #[test]
    fn a_read_only_mapping_is_not_read_into() {
        let source = file(b"abc");
        let map = Mapping::new(&source, 3, false).unwrap();
        assert_eq!(map.read_from(source.as_fd(), 0, 3).unwrap_err().errno, libc::EINVAL);
    }
}
