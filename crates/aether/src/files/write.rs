//! file_write: whole or not at all.

use std::io::Write;
use std::path::{Path, PathBuf};

use dsec_proto::{FileWriteRequest, Reply, WrittenReply};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, CWD};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::entries::{checked, kind_of, make_parents};
use super::read::open_regular;
use super::wire::{Gone, Wire};
use super::{Done, Halt};
use crate::failure::Failure;

const MOST_LINKS: usize = 40;

pub fn write(wire: &mut Wire<'_>, request: &FileWriteRequest) -> Done {
    let path = checked(&request.path)?;
    if request.make_parents {
        if let Some(parent) = Path::new(path).parent() {
            make_parents(parent)?;
        }
    }
    let written = if request.append {
        append(wire, request, path)?
    } else {
        replace(wire, request, path)?
    };
    wire.reply(&Reply::Written(written))?;
    Ok(())
}

/// Takes the whole input into `file`.
fn store(wire: &mut Wire<'_>, file: OwnedFd, path: &str) -> Result<(WrittenReply, std::fs::File), Halt> {
    let mut file = std::fs::File::from(file);
    let (mut hash, mut size) = (Sha256::new(), 0u64);
    wire.each(|part| {
        hash.update(part);
        size += part.len() as u64;
        file.write_all(part).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Failure::file(errno, path)
        })
    })?;
    Ok((
        WrittenReply {
            size,
            sha256: hex(&hash.finalize()),
        },
        file,
    ))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where the bytes go when `path` is a symlink: to what it points at, as for any other writer.
fn follow(path: &str) -> Result<(PathBuf, Option<Stat>), Failure> {
    let mut path = PathBuf::from(path);
    for _ in 0..MOST_LINKS {
        let shown = path.to_string_lossy().into_owned();
        match rustix::fs::statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok((path, None)),
            Err(errno) => return Err(Failure::file(errno, &shown)),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                let target = std::fs::read_link(&path)
                    .map_err(|error| Failure::file(Errno::from_io_error(&error).unwrap_or(Errno::IO), &shown))?;
                path = path.parent().unwrap_or(Path::new("/")).join(target);
            }
            Ok(stat) => return Ok((path, Some(stat))),
        }
    }
    Err(Failure::file(Errno::LOOP, &path.to_string_lossy()))
}

/// Writes a file without a name, then puts it in the target's place. What was there keeps its owner and, unless one is asked, its mode.
fn replace(wire: &mut Wire<'_>, request: &FileWriteRequest, path: &str) -> Result<WrittenReply, Halt> {
    let (target, old) = follow(path)?;
    if let Some(stat) = &old {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let detail = format!("{path} is a {}, not a regular file", kind_of(stat));
            return Err(Failure::invalid("file", detail).into());
        }
    }
    let (Some(parent), Some(_)) = (target.parent(), target.file_name()) else {
        return Err(Failure::invalid("file", format!("{path} is no file's name")).into());
    };
    let failed = |errno: Errno| Failure::file(errno, path);
    let (written, file) = store(wire, nameless(parent, path)?, path)?;
    let mode = request.mode.or(old.as_ref().map(|stat| stat.st_mode)).unwrap_or(0o644) & 0o7777;
    if let Some(stat) = &old {
        // Refused to all but root, for whom alone it would change anything.
        let owner = (
            rustix::fs::Uid::from_raw(stat.st_uid),
            rustix::fs::Gid::from_raw(stat.st_gid),
        );
        let _ = rustix::fs::fchown(&file, Some(owner.0), Some(owner.1));
    }
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(failed)?;
    let beside = parent.join(format!(".dsec-{}", random(path)?));
    rustix::fs::linkat(&file, "", CWD, &beside, AtFlags::EMPTY_PATH).map_err(failed)?;
    rustix::fs::rename(&beside, &target).map_err(|errno| {
        let _ = rustix::fs::unlink(&beside);
        failed(errno)
    })?;
    Ok(written)
}

/// A new file in `parent` that has no name yet: a writer that is killed leaves nothing.
fn nameless(parent: &Path, path: &str) -> Result<OwnedFd, Failure> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    rustix::fs::open(parent, flags, Mode::from_raw_mode(0o600)).map_err(|errno| Failure::file(errno, path))
}

fn random(path: &str) -> Result<String, Failure> {
    let mut random = [0u8; 12];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::file(errno, path))?;
    Ok(hex(&random))
}

/// Writes at the end; when the input does not come whole, the file is cut back to what it was.
fn append(wire: &mut Wire<'_>, request: &FileWriteRequest, path: &str) -> Result<WrittenReply, Halt> {
    let (file, stat) = open_regular(path, OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
    let again = file.try_clone().map_err(|_| Gone)?;
    match store(wire, file, path) {
        Ok((written, file)) => {
            if let Some(mode) = request.mode {
                let mode = Mode::from_raw_mode(mode & 0o7777);
                rustix::fs::fchmod(&file, mode).map_err(|errno| Failure::file(errno, path))?;
            }
            Ok(written)
        }
        Err(halt) => {
            let _ = rustix::fs::ftruncate(&again, u64::try_from(stat.st_size).unwrap_or(0));
            Err(halt)
        }
    }
}
