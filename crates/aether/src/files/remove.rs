//! file_remove: by descriptor from the parent down, so that a directory swapped for a symlink meanwhile leads nowhere.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dsec_proto::FileRemoveRequest;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, CWD};
use rustix::io::Errno;

use super::entries::checked;
use super::list::{names, open_below};
use super::wire::Wire;
use super::Done;
use crate::failure::Failure;

/// Names taken of a directory at once; removing them makes room for the next.
const BATCH: usize = 4096;
/// Rounds over one directory in which others keep making entries.
const ROUNDS: usize = 100_000;

pub fn remove(wire: &mut Wire<'_>, request: &FileRemoveRequest) -> Done {
    let path = checked(&request.path)?;
    let whole = Path::new(path);
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else {
        return Err(Failure::invalid("file", format!("{path} cannot be removed")).into());
    };
    let failed = |errno| Failure::file(errno, path);
    let name = CString::new(name.as_bytes()).map_err(|_| failed(Errno::INVAL))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = rustix::fs::openat(CWD, OsStr::new(parent), flags, Mode::empty()).map_err(failed)?;
    match rustix::fs::unlinkat(&parent, &name, AtFlags::empty()) {
        Ok(()) => {}
        Err(Errno::ISDIR) if request.recursive => remove_tree(&parent, &name).map_err(failed)?,
        Err(Errno::ISDIR) => rustix::fs::unlinkat(&parent, &name, AtFlags::REMOVEDIR).map_err(failed)?,
        Err(errno) => return Err(failed(errno).into()),
    }
    wire.done()?;
    Ok(())
}

struct Level {
    directory: OwnedFd,
    /// Its name in the level above.
    name: CString,
    names: std::vec::IntoIter<CString>,
    rounds: usize,
}

fn level(parent: impl AsFd, name: &CStr) -> Result<Level, Errno> {
    let directory = open_below(parent, name)?;
    let names = names(&directory, BATCH)?;
    Ok(Level {
        directory,
        name: name.to_owned(),
        names: names.into_iter(),
        rounds: 0,
    })
}

/// Removes a directory and all below it. Depth costs descriptors, so a path of unusual depth ends with EMFILE.
fn remove_tree(parent: &OwnedFd, name: &CStr) -> Result<(), Errno> {
    let mut levels = vec![level(parent, name)?];
    while let Some(last) = levels.last_mut() {
        if let Some(entry) = last.names.next() {
            match rustix::fs::unlinkat(&last.directory, &entry, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => match level(&last.directory, &entry) {
                    Ok(below) => levels.push(below),
                    // Swapped or removed meanwhile: the next round sees what is there then.
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                    Err(errno) => return Err(errno),
                },
                Err(errno) => return Err(errno),
            }
            continue;
        }
        let more = names(&last.directory, BATCH)?;
        if !more.is_empty() && last.rounds < ROUNDS {
            last.rounds += 1;
            last.names = more.into_iter();
            continue;
        }
        let Some(done) = levels.pop() else { return Ok(()) };
        let above = levels.last().map_or(parent, |level| &level.directory);
        match rustix::fs::unlinkat(above, &done.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
