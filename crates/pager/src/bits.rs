//! A set of chunks in a mapped file: bit n of the file, least significant first, is chunk n.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use dsec_sys::Mapping;

pub struct Bits {
    map: Mapping,
    count: u32,
}

fn bytes(count: u32) -> u64 {
    u64::from(count).div_ceil(8)
}

impl Bits {
    /// The set in the file at `path`, which is made where it is missing, and emptied where its length is another.
    pub fn open(path: &Path, count: u32) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)?;
        if file.metadata()?.len() != bytes(count) {
            file.set_len(0)?;
            file.set_len(bytes(count))?;
        }
        Self::over(&file, count)
    }

    fn over(file: &File, count: u32) -> io::Result<Self> {
        let map = Mapping::new(file, bytes(count) as usize, true);
        let map = map.map_err(|e| io::Error::from_raw_os_error(e.errno))?;
        Ok(Self { map, count })
    }

    pub fn has(&self, chunk: u32) -> bool {
        let byte = self.map.bytes().get(chunk as usize / 8);
        byte.is_some_and(|b| b.load(Acquire) & bit(chunk) != 0)
    }

    /// Whether it was not there before.
    pub fn set(&self, chunk: u32) -> bool {
        let byte = self.map.bytes().get(chunk as usize / 8);
        byte.is_some_and(|b| b.fetch_or(bit(chunk), AcqRel) & bit(chunk) == 0)
    }

    /// Whether it was there before.
    pub fn clear(&self, chunk: u32) -> bool {
        let byte = self.map.bytes().get(chunk as usize / 8);
        byte.is_some_and(|b| b.fetch_and(!bit(chunk), AcqRel) & bit(chunk) != 0)
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.count).filter(|chunk| self.has(*chunk))
    }
}

fn bit(chunk: u32) -> u8 {
    1 << (chunk % 8)
}
