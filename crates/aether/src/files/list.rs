//! file_list: a directory's entries, and theirs, without following a symlink below it.

use dsec_proto::{FileListRequest, FilesReply, Reply};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;

use super::entries::{checked, info};
use super::wire::Wire;
use super::Done;
use crate::failure::Failure;

/// Entries, and bytes of their paths, in one reply.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 256 * 1024;
/// Directories open at once; deeper ones are listed but not entered.
const MOST_OPEN: usize = 512;

/// Names in a directory, sorted; "." and ".." left out. At most `most`.
pub fn names(directory: &OwnedFd, most: usize) -> Result<Vec<std::ffi::CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
        if names.len() >= most {
            break;
        }
    }
    names.sort();
    Ok(names)
}

/// A directory's descriptor for reading; `name` itself may not be a symlink.
pub fn open_below(parent: impl AsFd, name: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

struct Level {
    directory: OwnedFd,
    path: String,
    names: std::vec::IntoIter<std::ffi::CString>,
}

pub fn list(wire: &mut Wire<'_>, request: &FileListRequest) -> Done {
    let path = checked(&request.path)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let failed = |errno| Failure::file(errno, path);
    let root = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
    let mut left = usize::try_from(request.limit).unwrap_or(usize::MAX);
    let first = names(&root, left).map_err(failed)?;
    let mut levels = vec![Level {
        directory: root,
        path: path.trim_end_matches('/').to_owned(),
        names: first.into_iter(),
    }];
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while let Some(level) = levels.last_mut() {
        let next = if left == 0 { None } else { level.names.next() };
        let Some(name) = next else {
            levels.pop();
            continue;
        };
        let Ok(stat) = rustix::fs::statat(&level.directory, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            // Removed since it was read.
            continue;
        };
        let below = format!("{}/{}", level.path, name.to_string_lossy());
        let kind = FileType::from_raw_mode(stat.st_mode);
        let target = match kind {
            FileType::Symlink => rustix::fs::readlinkat(&level.directory, &name, Vec::new()).ok(),
            _ => None,
        };
        let target = target.map(|target| target.to_string_lossy().into_owned());
        bytes += below.len() + target.as_ref().map_or(0, String::len);
        batch.push(info(below.clone(), &stat, target));
        left -= 1;
        if batch.len() >= BATCH || bytes >= BATCH_BYTES {
            wire.reply(&Reply::Files(FilesReply {
                items: std::mem::take(&mut batch),
            }))?;
            bytes = 0;
        }
        let depth = u32::try_from(levels.len()).unwrap_or(u32::MAX);
        if kind == FileType::Directory && depth < request.depth.max(1) && levels.len() < MOST_OPEN {
            enter(&mut levels, &name, below, left);
        }
    }
    if !batch.is_empty() {
        wire.reply(&Reply::Files(FilesReply { items: batch }))?;
    }
    wire.done()?;
    Ok(())
}

/// A directory that may not be read, or is one no more, is listed without its entries.
fn enter(levels: &mut Vec<Level>, name: &std::ffi::CStr, path: String, most: usize) {
    let Some(level) = levels.last() else { return };
    let Ok(directory) = open_below(&level.directory, name) else {
        return;
    };
    if let Ok(names) = names(&directory, most) {
        levels.push(Level {
            directory,
            path,
            names: names.into_iter(),
        });
    }
}
