//! file_read.

use dsec_proto::{FileReadRequest, FileReply, Reply};
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::entries::{checked, info, kind_of};
use super::wire::Wire;
use super::Done;
use crate::failure::Failure;

const CHUNK: usize = 256 * 1024;
/// Most bytes of a file that does not know its size (those of /proc).
const MOST_UNSIZED: u64 = 64 * 1024 * 1024;

/// Opens a regular file without ever waiting: not for a pipe's writer, not for a device.
pub fn open_regular(path: &str, flags: OFlags) -> Result<(OwnedFd, Stat), Failure> {
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o666)).map_err(|errno| Failure::file(errno, path))?;
    let stat = rustix::fs::fstat(&file).map_err(|errno| Failure::file(errno, path))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((file, stat)),
        _ => Err(Failure::invalid(
            "file",
            format!("{path} is a {}, not a regular file", kind_of(&stat)),
        )),
    }
}

pub fn read(wire: &mut Wire<'_>, request: &FileReadRequest) -> Done {
    let path = checked(&request.path)?;
    let (file, stat) = open_regular(path, OFlags::RDONLY)?;
    wire.reply(&Reply::File(FileReply {
        info: info(path.to_owned(), &stat, None),
    }))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    // A file that grows while it is read ends where it ended at first.
    let known = if size > 0 {
        size.saturating_sub(request.offset)
    } else {
        MOST_UNSIZED
    };
    let mut left = known.min(request.length.unwrap_or(u64::MAX));
    let mut offset = request.offset;
    let mut buffer = vec![0; CHUNK];
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        let got = match rustix::io::pread(&file, &mut buffer[..most], offset) {
            Ok(0) => break,
            Ok(got) => got,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(Failure::file(errno, path).into()),
        };
        wire.data(&buffer[..got])?;
        offset += got as u64;
        left -= got as u64;
    }
    wire.done()?;
    Ok(())
}
