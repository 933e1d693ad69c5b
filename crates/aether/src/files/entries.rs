//! stat, mkdir, move.

use std::path::Path;

use dsec_proto::{FileInfo, FileMkdirRequest, FileMoveRequest, FileReply, FileStatRequest, Reply};
use rustix::fs::{AtFlags, FileType, Mode, RenameFlags, Stat, CWD};
use rustix::io::Errno;

use super::wire::Wire;
use super::Done;
use crate::failure::Failure;

/// A path as the operations take it: without NUL, from the root.
pub fn checked(path: &str) -> Result<&str, Failure> {
    if path.contains('\0') {
        return Err(Failure::invalid("file", "a path may not hold a NUL"));
    }
    if !path.starts_with('/') {
        return Err(Failure::invalid("file", format!("{path} is not absolute")));
    }
    Ok(path)
}

pub fn kind_of(stat: &Stat) -> &'static str {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => "dir",
        FileType::Symlink => "symlink",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::CharacterDevice => "char",
        FileType::BlockDevice => "block",
        _ => "file",
    }
}

pub fn info(path: String, stat: &Stat, target: Option<String>) -> FileInfo {
    FileInfo {
        path,
        kind: kind_of(stat).to_owned(),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_ns: stat
            .st_mtime
            .saturating_mul(1_000_000_000)
            .saturating_add(i64::try_from(stat.st_mtime_nsec).unwrap_or(0)),
        target,
    }
}

pub fn stat(wire: &mut Wire<'_>, request: &FileStatRequest) -> Done {
    let path = checked(&request.path)?;
    let flags = if request.follow {
        AtFlags::empty()
    } else {
        AtFlags::SYMLINK_NOFOLLOW
    };
    let stat = rustix::fs::statat(CWD, path, flags).map_err(|errno| Failure::file(errno, path))?;
    let target = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            let target = rustix::fs::readlink(path, Vec::new()).map_err(|errno| Failure::file(errno, path))?;
            Some(target.to_string_lossy().into_owned())
        }
        _ => None,
    };
    wire.reply(&Reply::File(FileReply {
        info: info(path.to_owned(), &stat, target),
    }))?;
    Ok(())
}

pub fn mkdir(wire: &mut Wire<'_>, request: &FileMkdirRequest) -> Done {
    let path = checked(&request.path)?;
    let mode = Mode::from_raw_mode(request.mode & 0o7777);
    if request.parents {
        if let Some(parent) = Path::new(path).parent() {
            make_parents(parent)?;
        }
    }
    match rustix::fs::mkdir(path, mode) {
        // The mask of new files is not for a mode that was asked for.
        Ok(()) => rustix::fs::chmod(path, mode).map_err(|errno| Failure::file(errno, path))?,
        Err(Errno::EXIST) if request.parents && Path::new(path).is_dir() => {}
        Err(errno) => return Err(Failure::file(errno, path).into()),
    }
    wire.done()?;
    Ok(())
}

/// Makes what is missing of a directory's path.
pub fn make_parents(path: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(path).map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        Failure::file(errno, &path.to_string_lossy())
    })
}

pub fn rename(wire: &mut Wire<'_>, request: &FileMoveRequest) -> Done {
    let (source, target) = (checked(&request.source)?, checked(&request.target)?);
    let flags = if request.replace {
        RenameFlags::empty()
    } else {
        RenameFlags::NOREPLACE
    };
    match rustix::fs::renameat_with(CWD, source, CWD, target, flags) {
        Ok(()) => {}
        Err(Errno::XDEV) => {
            let detail = format!(
                "{source} and {target} are on different file systems, or {source} is a directory of an image layer"
            );
            return Err(Failure::new("unsupported", "file", detail).into());
        }
        Err(errno) => return Err(Failure::file(errno, &format!("{source} to {target}")).into()),
    }
    wire.done()?;
    Ok(())
}
