//! A file system of data files, one a layer, for kernels without pre-content events. Read-only; EROFS is mounted from its files.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use crate::shared::Question;

/// The root's number; a layer's is its place and this more.
pub const FIRST_NODE: u64 = 2;
pub const HEAD: usize = 40;
const VERSION: u32 = 7;
const MINOR: u32 = 31;
const READ_AHEAD: u32 = 128 * 1024;
/// The most that one request reads.
pub const MAX_READ: u32 = 1024 * 1024;
const ASYNC_READ: u32 = 1;
const PARALLEL_DIROPS: u32 = 1 << 18;
const MAX_PAGES: u32 = 1 << 22;
/// EROFS has a page cache of its own above: one here would be a second, with a read-ahead of its own.
const DIRECT_IO: u32 = 1;
/// Seconds that the kernel may go on without asking again: contents never change, and names go only with the last mount.
const VALID: u64 = 60;

/// What the kernel asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    Lookup = 1,
    Forget = 2,
    Getattr = 3,
    Open = 14,
    Read = 15,
    Statfs = 17,
    Release = 18,
    Flush = 25,
    Init = 26,
    Interrupt = 36,
    Destroy = 38,
    BatchForget = 42,
}

const CODES: [Code; 12] = [
    Code::Lookup,
    Code::Forget,
    Code::Getattr,
    Code::Open,
    Code::Read,
    Code::Statfs,
    Code::Release,
    Code::Flush,
    Code::Init,
    Code::Interrupt,
    Code::Destroy,
    Code::BatchForget,
];

/// A request of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked<'a> {
    /// None: one that this file system does not have.
    pub code: Option<Code>,
    pub unique: u64,
    pub node: u64,
    pub body: &'a [u8],
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

impl<'a> Asked<'a> {
    /// None where the bytes are no request.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let length = word(bytes, 0) as usize;
        if length < HEAD || length > bytes.len() {
            return None;
        }
        let number = word(bytes, 4);
        Some(Self {
            code: CODES.into_iter().find(|code| *code as u32 == number),
            unique: long(bytes, 8),
            node: long(bytes, 16),
            body: &bytes[HEAD..length],
        })
    }

    /// Offset and size of a read.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        (long(self.body, 8), u64::from(word(self.body, 16).min(MAX_READ)))
    }

    /// The name of a lookup.
    #[must_use]
    pub fn name(&self) -> &'a [u8] {
        self.body.split(|b| *b == 0).next().unwrap_or(self.body)
    }
}

fn send(device: &OwnedFd, unique: u64, error: i32, body: &[&[u8]]) -> Result<(), i32> {
    let length = 16 + body.iter().map(|b| b.len()).sum::<usize>();
    let mut head = [0; 16];
    head[..4].copy_from_slice(&(length as u32).to_le_bytes());
    head[4..8].copy_from_slice(&(-error).to_le_bytes());
    head[8..].copy_from_slice(&unique.to_le_bytes());
    let mut parts = vec![io::IoSlice::new(&head)];
    parts.extend(body.iter().map(|b| io::IoSlice::new(b)));
    rustix::io::writev(device.as_fd(), &parts).map_err(|e| e.raw_os_error())?;
    Ok(())
}

/// # Errors
/// The kernel's errno; ENOENT where nobody waits any more.
pub fn answer_error(device: &OwnedFd, unique: u64, errno: i32) -> Result<(), i32> {
    send(device, unique, errno, &[])
}

/// Answers a read from the data file, whose chunks there are known to be right.
///
/// # Errors
/// As `answer_error`.
pub fn answer_read(device: &OwnedFd, question: &Question, data: &File) -> Result<(), i32> {
    let mut bytes = vec![0; question.count.min(u64::from(MAX_READ)) as usize];
    let mut got = 0;
    while got < bytes.len() {
        match data.read_at(&mut bytes[got..], question.offset + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return answer_error(device, question.ident, libc::EIO),
        }
    }
    send(device, question.ident, 0, &[&bytes[..got]])
}

fn words(list: &[u32]) -> Vec<u8> {
    list.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// # Errors
/// As `answer_error`.
pub fn answer_init(device: &OwnedFd, asked: &Asked<'_>) -> Result<(), i32> {
    if word(asked.body, 0) < VERSION || (word(asked.body, 0) == VERSION && word(asked.body, 4) < MINOR) {
        return answer_error(device, asked.unique, libc::EPROTO);
    }
    let flags = word(asked.body, 12) & (ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES);
    // major, minor, max_readahead, flags, max_background | congestion_threshold, max_write, time_gran, max_pages, padding.
    let pages = MAX_READ / 4096;
    let body = words(&[
        VERSION,
        MINOR,
        READ_AHEAD,
        flags,
        64 | 48 << 16,
        4096,
        1,
        pages,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]);
    send(device, asked.unique, 0, &[&body])
}

/// struct fuse_attr: a directory without a size, or a file of `size` bytes.
fn attributes(node: u64, size: Option<u64>) -> Vec<u8> {
    let mut body = Vec::new();
    for value in [node, size.unwrap_or(0), size.unwrap_or(0).div_ceil(512), 0, 0, 0] {
        body.extend(value.to_le_bytes());
    }
    let mode = if size.is_some() {
        libc::S_IFREG | 0o444
    } else {
        libc::S_IFDIR | 0o555
    };
    body.extend(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]));
    body
}

/// # Errors
/// As `answer_error`.
pub fn answer_attributes(device: &OwnedFd, unique: u64, node: u64, size: Option<u64>) -> Result<(), i32> {
    let head = [VALID.to_le_bytes(), [0; 8]].concat();
    send(device, unique, 0, &[&head, &attributes(node, size)])
}

/// # Errors
/// As `answer_error`.
pub fn answer_entry(device: &OwnedFd, unique: u64, node: u64, generation: u64, size: u64) -> Result<(), i32> {
    let mut head = Vec::new();
    // A place may be another layer's later: names are asked for each time, and a generation tells the two apart.
    for value in [node, generation, 0, VALID, 0] {
        head.extend(value.to_le_bytes());
    }
    send(device, unique, 0, &[&head, &attributes(node, Some(size))])
}

/// # Errors
/// As `answer_error`.
pub fn answer_open(device: &OwnedFd, unique: u64) -> Result<(), i32> {
    send(device, unique, 0, &[&words(&[0, 0, DIRECT_IO, 0])])
}

/// # Errors
/// As `answer_error`.
pub fn answer_empty(device: &OwnedFd, unique: u64) -> Result<(), i32> {
    send(device, unique, 0, &[])
}

/// # Errors
/// As `answer_error`.
pub fn answer_statfs(device: &OwnedFd, unique: u64) -> Result<(), i32> {
    let mut body = vec![0; 40];
    body.extend(words(&[4096, 255, 4096, 0]));
    body.extend(vec![0; 24]);
    send(device, unique, 0, &[&body])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_within_their_bytes() {
        let mut bytes = words(&[60, 15, 9, 0, 5, 0, 0, 0, 0, 0]);
        bytes.extend([0; 8]);
        bytes.extend(8192u64.to_le_bytes());
        bytes.extend(words(&[4096]));
        let asked = Asked::parse(&bytes).unwrap();
        assert_eq!((asked.code, asked.unique, asked.node), (Some(Code::Read), 9, 5));
        assert_eq!(asked.range(), (8192, 4096));
        assert_eq!(Asked::parse(&bytes[..59]), None);
        assert_eq!(Asked::parse(&[0; 80]), None);
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(attributes(2, Some(5)).len(), 88);
    }
}
