//! tree_read: a PAX tar of a tree, names relative to it, symlinks as they are.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dsec_proto::TreeReadRequest;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, CWD};
use rustix::io::Errno;

use super::entries::checked;
use super::list::{names, open_below};
use super::wire::Wire;
use super::{Done, Halt};
use crate::failure::Failure;

const BLOCK: usize = 512;
const CHUNK: usize = 256 * 1024;
/// Files of several names that are remembered; further ones are written once for each name.
const MOST_LINKS: usize = 100_000;
/// Largest number in the eleven octal digits of a header.
const MOST_OCTAL: u64 = 0o777_7777_7777;

struct Level {
    directory: OwnedFd,
    prefix: Vec<u8>,
    names: std::vec::IntoIter<CString>,
}

struct Walk<'w, 'a> {
    wire: &'w mut Wire<'a>,
    links: HashMap<(u64, u64), Vec<u8>>,
    buffer: Vec<u8>,
}

pub fn tree_read(wire: &mut Wire<'_>, request: &TreeReadRequest) -> Done {
    let path = checked(&request.path)?;
    let failed = |errno| Failure::file(errno, path);
    let stat = rustix::fs::statat(CWD, path, AtFlags::empty()).map_err(failed)?;
    let mut walk = Walk {
        wire,
        links: HashMap::new(),
        buffer: vec![0; CHUNK],
    };
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let root = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
        walk.tree(root, path)?;
    } else {
        let whole = Path::new(path);
        let name = whole.file_name().ok_or_else(|| failed(Errno::INVAL))?;
        let name = CString::new(name.as_bytes()).map_err(|_| failed(Errno::INVAL))?;
        let parent = whole.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::openat(CWD, parent, flags, Mode::empty()).map_err(failed)?;
        walk.entry(parent.as_fd(), &name, name.as_bytes(), &stat, path)?;
    }
    walk.wire.data(&[0; 2 * BLOCK])?;
    walk.wire.done()?;
    Ok(())
}

impl Walk<'_, '_> {
    fn tree(&mut self, root: OwnedFd, path: &str) -> Result<(), Halt> {
        let first = names(&root, usize::MAX).map_err(|errno| Failure::file(errno, path))?;
        let mut levels = vec![Level {
            directory: root,
            prefix: Vec::new(),
            names: first.into_iter(),
        }];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.next() else {
                levels.pop();
                continue;
            };
            let full = [level.prefix.as_slice(), name.as_bytes()].concat();
            let shown = format!("{path}/{}", String::from_utf8_lossy(&full));
            let stat = match rustix::fs::statat(&level.directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // Removed since it was listed.
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(Failure::file(errno, &shown).into()),
            };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                self.entry(level.directory.as_fd(), &name, &full, &stat, &shown)?;
                continue;
            }
            let directory = match open_below(&level.directory, &name) {
                Ok(directory) => directory,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => return Err(Failure::file(errno, &shown).into()),
            };
            let prefix = [full.as_slice(), b"/"].concat();
            let head = head(b'5', &prefix, b"", &stat, 0);
            self.wire.data(&head)?;
            let below = names(&directory, usize::MAX).map_err(|errno| Failure::file(errno, &shown))?;
            levels.push(Level {
                directory,
                prefix,
                names: below.into_iter(),
            });
        }
        Ok(())
    }

    /// Anything but a directory. Sockets have no place in an archive and are left out.
    fn entry(&mut self, parent: impl AsFd, name: &CStr, full: &[u8], stat: &Stat, shown: &str) -> Result<(), Halt> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        let identity = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&identity) {
                let head = head(b'1', full, first, stat, 0);
                return Ok(self.wire.data(&head)?);
            }
            if self.links.len() < MOST_LINKS {
                self.links.insert(identity, full.to_vec());
            }
        }
        match kind {
            FileType::RegularFile => self.file(parent, name, full, shown),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new());
                let target = target.map_err(|errno| Failure::file(errno, shown))?;
                Ok(self.wire.data(&head(b'2', full, target.as_bytes(), stat, 0))?)
            }
            FileType::Fifo => Ok(self.wire.data(&head(b'6', full, b"", stat, 0))?),
            FileType::CharacterDevice => Ok(self.wire.data(&head(b'3', full, b"", stat, 0))?),
            FileType::BlockDevice => Ok(self.wire.data(&head(b'4', full, b"", stat, 0))?),
            _ => Ok(()),
        }
    }

    /// The size is fixed when the file is opened: what shrinks meanwhile is filled with zeros, what grows is cut.
    fn file(&mut self, parent: impl AsFd, name: &CStr, full: &[u8], shown: &str) -> Result<(), Halt> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(Failure::file(errno, shown).into()),
        };
        let stat = rustix::fs::fstat(&file).map_err(|errno| Failure::file(errno, shown))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let head = head(b'0', full, b"", &stat, size);
        self.wire.data(&head)?;
        let mut left = size;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            let got = match rustix::io::read(&file, &mut self.buffer[..most]) {
                Ok(0) => {
                    self.buffer[..most].fill(0);
                    most
                }
                Ok(got) => got,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(Failure::file(errno, shown).into()),
            };
            self.wire.data(&self.buffer[..got])?;
            left -= got as u64;
        }
        let rest = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        if rest > 0 {
            self.wire.data(&[0; BLOCK][rest..])?;
        }
        Ok(())
    }
}

/// The header of an entry, after a PAX header for what does not fit in it.
fn head(kind: u8, name: &[u8], link: &[u8], stat: &Stat, size: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(BLOCK);
    let mut records = Vec::new();
    let mtime = stat.st_mtime;
    if std::str::from_utf8(name).is_err() || std::str::from_utf8(link).is_err() {
        record(&mut records, "hdrcharset", b"BINARY");
    }
    if name.len() > 100 || !name.is_ascii() {
        record(&mut records, "path", name);
    }
    if link.len() > 100 || !link.is_ascii() {
        record(&mut records, "linkpath", link);
    }
    if size > MOST_OCTAL {
        record(&mut records, "size", size.to_string().as_bytes());
    }
    if mtime < 0 {
        record(&mut records, "mtime", mtime.to_string().as_bytes());
    }
    if !records.is_empty() {
        out.extend_from_slice(&block(
            b'x',
            b"././@PaxHeader",
            b"",
            (0o644, 0, 0),
            records.len() as u64,
            0,
        ));
        let padded = records.len().next_multiple_of(BLOCK);
        records.resize(padded, 0);
        out.extend_from_slice(&records);
    }
    let owner = (stat.st_mode & 0o7777, stat.st_uid, stat.st_gid);
    out.extend_from_slice(&block(
        kind,
        name,
        link,
        owner,
        size.min(MOST_OCTAL),
        u64::try_from(mtime).unwrap_or(0),
    ));
    out
}

/// `LENGTH KEY=VALUE\n`, where LENGTH counts itself.
fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn block(kind: u8, name: &[u8], link: &[u8], owner: (u32, u32, u32), size: u64, mtime: u64) -> [u8; BLOCK] {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(owner.0);
    header.set_uid(owner.1.into());
    header.set_gid(owner.2.into());
    header.set_size(size);
    header.set_mtime(mtime.min(MOST_OCTAL));
    if let Some(ustar) = header.as_ustar_mut() {
        let fit = |text: &[u8]| text.len().min(100);
        ustar.name[..fit(name)].copy_from_slice(&name[..fit(name)]);
        ustar.linkname[..fit(link)].copy_from_slice(&link[..fit(link)]);
    }
    header.set_cksum();
    *header.as_bytes()
}

#[cfg(test)]
mod tests {
    use super::record;

    #[test]
    fn a_record_counts_itself() {
        for size in [1usize, 5, 88, 89, 90, 91, 92, 93, 985, 986, 987, 988, 989, 990, 9999] {
            let mut out = Vec::new();
            record(&mut out, "path", &vec![b'a'; size]);
            let text = String::from_utf8_lossy(&out);
            let length = text.split(' ').next().and_then(|text| text.parse().ok());
            assert_eq!(length, Some(out.len()), "{size}");
        }
    }
}
