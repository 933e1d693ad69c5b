//! Pre-content events: the kernel asks before a range of a marked file is read (kernel 6.14).

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::error::{check, Result};

const CLASS_PRE_CONTENT: u32 = 0x08;
const UNLIMITED_QUEUE: u32 = 0x10;
const UNLIMITED_MARKS: u32 = 0x20;
const PRE_ACCESS: u64 = 0x0010_0000;
const ALLOW: u32 = 1;
const DENY: u32 = 2;

/// Bytes of one event: the kernel's metadata and its record of the range.
pub const EVENT_BYTES: usize = 48;
const METADATA_BYTES: u16 = 24;
const INFO_RANGE: u8 = 6;

/// One question of the kernel's: may `count` bytes at `offset` of the file behind `fd` be read?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeEvent {
    pub fd: i32,
    pub pid: i32,
    pub offset: u64,
    pub count: u64,
}

/// A group for pre-content events. Its queue is unlimited: a full queue lets readers through.
///
/// The descriptor survives exec, so that the group does: when its last descriptor closes, every waiting reader goes on.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; EINVAL on a kernel without pre-content events.
pub fn fanotify_group() -> Result<OwnedFd> {
    let flags = CLASS_PRE_CONTENT | UNLIMITED_QUEUE | UNLIMITED_MARKS;
    let opened = libc::O_RDONLY | libc::O_LARGEFILE;
    // SAFETY: plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_fanotify_init, flags, opened) };
    let fd = check(fd, "fanotify_init", "")?;
    // SAFETY: the kernel made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn mark(group: BorrowedFd<'_>, file: BorrowedFd<'_>, flags: u32) -> Result<()> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let name = crate::error::c_string("fanotify_mark", &path)?;
    // SAFETY: the name is NUL-terminated and lives past the call; the descriptors are open.
    let r = unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, PRE_ACCESS, libc::AT_FDCWD, name.as_ptr()) };
    check(r.into(), "fanotify_mark", &path)?;
    Ok(())
}

/// From now on the kernel asks `group` before `file` is read through descriptors opened after this call.
///
/// # Errors
/// EOPNOTSUPP where the file's file system has no pre-content events; ENOSPC; EINVAL.
pub fn fanotify_watch(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<()> {
    mark(group, file, libc::FAN_MARK_ADD)
}

/// The kernel asks no more about `file`; questions already asked still wait for their answers.
///
/// # Errors
/// ENOENT where `file` was not watched.
pub fn fanotify_unwatch(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<()> {
    mark(group, file, libc::FAN_MARK_REMOVE)
}

/// Answers the question with descriptor `number`: `errno` 0 lets the reader on, another reaches it as its error.
///
/// # Errors
/// ENOENT where nobody waits for this answer any more.
pub fn fanotify_answer(group: BorrowedFd<'_>, number: i32, errno: i32) -> Result<()> {
    let response = if errno == 0 {
        ALLOW
    } else {
        DENY | ((errno as u32 & 0xff) << 24)
    };
    let words = [number as u32, response];
    // SAFETY: the buffer is eight bytes of plain numbers, as struct fanotify_response.
    let r = unsafe { libc::write(group.as_raw_fd(), words.as_ptr().cast(), 8) };
    check(r as libc::c_long, "fanotify answer", "")?;
    Ok(())
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// The events in what `read` left in a buffer that was zero before; ends at the first that is none.
#[must_use]
pub fn range_events(mut bytes: &[u8]) -> Vec<RangeEvent> {
    let mut events = Vec::new();
    while let Some(event) = first(bytes) {
        let length = number(bytes, 0).map_or(0, u32::from_le_bytes) as usize;
        events.push(event);
        bytes = bytes.get(length..).unwrap_or(&[]);
    }
    events
}

fn first(bytes: &[u8]) -> Option<RangeEvent> {
    let length = u32::from_le_bytes(number(bytes, 0)?);
    if (length as usize) < usize::from(METADATA_BYTES) {
        return None;
    }
    let mut event = RangeEvent {
        fd: i32::from_le_bytes(number(bytes, 16)?),
        pid: i32::from_le_bytes(number(bytes, 20)?),
        // Without a range, all of the file is meant.
        offset: 0,
        count: u64::MAX,
    };
    let mut at = usize::from(u16::from_le_bytes(number(bytes, 6)?));
    while at + 4 <= length as usize {
        let kind = number::<1>(bytes, at)?[0];
        let size = usize::from(u16::from_le_bytes(number(bytes, at + 2)?));
        if kind == INFO_RANGE {
            event.offset = u64::from_le_bytes(number(bytes, at + 8)?);
            event.count = u64::from_le_bytes(number(bytes, at + 16)?);
        }
        at += size.max(4);
    }
    Some(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(fd: i32, offset: u64, count: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(48u32.to_le_bytes());
        bytes.extend([3, 0]);
        bytes.extend(METADATA_BYTES.to_le_bytes());
        bytes.extend(PRE_ACCESS.to_le_bytes());
        bytes.extend(fd.to_le_bytes());
        bytes.extend(77i32.to_le_bytes());
        bytes.extend([INFO_RANGE, 0]);
        bytes.extend(24u16.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(offset.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes
    }

    #[test]
    fn a_buffer_is_read_up_to_its_first_zero() {
        let mut bytes = event(5, 4096, 65536);
        bytes.extend(event(6, 1 << 40, 1));
        bytes.extend([0; 96]);
        let seen = range_events(&bytes);
        let wanted = |fd, offset, count| RangeEvent {
            fd,
            pid: 77,
            offset,
            count,
        };
        assert_eq!(seen, [wanted(5, 4096, 65536), wanted(6, 1 << 40, 1)]);
    }

    #[test]
    fn an_event_without_a_range_means_the_whole_file() {
        let mut bytes = event(5, 1, 1);
        bytes.truncate(24);
        bytes[0] = 24;
        assert_eq!(
            range_events(&bytes),
            [RangeEvent {
                fd: 5,
                pid: 77,
                offset: 0,
                count: u64::MAX
            }]
        );
    }
}
