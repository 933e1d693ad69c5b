//! tree_write: unpacks a tar below a directory. Every parent is resolved beneath it by the kernel (openat2), so neither a
//! name nor a symlink, of the archive or of somebody racing it, leads outside.

use std::ffi::CString;
use std::io::Read;
use std::path::Path;

use dsec_proto::{Reply, TreeWriteRequest, WrittenReply};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, CWD};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use tar::EntryType;

use super::entries::{checked, make_parents};
use super::wire::{Incoming, Wire};
use super::write::hex;
use super::{Done, Halt};
use crate::failure::Failure;

/// Longest path given to the kernel at once.
const LONGEST_PATH: usize = 4000;

/// The archive's bytes, counted and hashed as they pass.
struct Hashed<'h, R>(R, &'h mut Sha256, &'h mut u64);

impl<R: Read> Read for Hashed<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let size = self.0.read(out)?;
        self.1.update(&out[..size]);
        *self.2 += size as u64;
        Ok(size)
    }
}

/// One entry's name: its directory's components and its own.
struct Name {
    shown: String,
    parents: Vec<CString>,
    last: CString,
}

struct Unpack {
    root: OwnedFd,
    /// Modes and times of directories, set when all below them is there.
    directories: Vec<(OwnedFd, Mode, i64)>,
}

pub fn tree_write(wire: &mut Wire<'_>, request: &TreeWriteRequest) -> Done {
    let path = checked(&request.path)?;
    make_parents(Path::new(path))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|errno| Failure::file(errno, path))?;
    let (mut hash, mut size) = (Sha256::new(), 0);
    let mut incoming = Incoming::new(wire);
    let unpacked = Unpack {
        root,
        directories: Vec::new(),
    }
    .archive(Hashed(&mut incoming, &mut hash, &mut size));
    if incoming.gone {
        return Err(Halt::Gone);
    }
    unpacked?;
    wire.reply(&Reply::Written(WrittenReply {
        size,
        sha256: hex(&hash.finalize()),
    }))?;
    Ok(())
}

fn broken(error: &std::io::Error) -> Failure {
    Failure::invalid("archive", format!("not a whole tar: {error}"))
}

fn refused(shown: &str, why: &str) -> Failure {
    Failure::invalid("archive", format!("{shown}: {why}"))
}

fn kernel(errno: Errno, shown: &str) -> Failure {
    match errno {
        // How openat2 says that a path leaves the directory it has to stay in.
        Errno::XDEV => refused(shown, "leads outside the target"),
        errno => Failure::file(errno, shown),
    }
}

impl Unpack {
    fn archive(mut self, input: impl Read) -> Result<(), Failure> {
        let mut archive = tar::Archive::new(input);
        for entry in archive.entries().map_err(|error| broken(&error))? {
            let mut entry = entry.map_err(|error| broken(&error))?;
            if let Some(name) = split(&entry.path_bytes())? {
                self.entry(&mut entry, &name)?;
            }
        }
        for (directory, mode, mtime) in self.directories.iter().rev() {
            // A directory of another owner keeps what it has.
            let _ = rustix::fs::fchmod(directory, *mode);
            let _ = rustix::fs::futimens(directory, &times(*mtime));
        }
        // What follows the end marks still belongs to the stream.
        let mut input = archive.into_inner();
        std::io::copy(&mut input, &mut std::io::sink()).map_err(|error| broken(&error))?;
        Ok(())
    }

    fn entry(&mut self, entry: &mut tar::Entry<'_, impl Read>, name: &Name) -> Result<(), Failure> {
        let kind = entry.header().entry_type();
        let mode = Mode::from_raw_mode(entry.header().mode().unwrap_or(0o644) & 0o7777);
        let mtime = entry
            .header()
            .mtime()
            .ok()
            .and_then(|time| i64::try_from(time).ok())
            .unwrap_or(0);
        let failed = |errno| kernel(errno, &name.shown);
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let parent = self.parent(name)?;
                clear(&parent, name)?;
                file(entry, &parent, name, mode, mtime)
            }
            EntryType::Directory => self.directory(name, mode, mtime),
            EntryType::Symlink => {
                let target = link_target(entry, name)?;
                let parent = self.parent(name)?;
                clear(&parent, name)?;
                rustix::fs::symlinkat(&target, &parent, &name.last).map_err(failed)
            }
            EntryType::Link => {
                let target = link_target(entry, name)?;
                let target =
                    split(target.as_bytes())?.ok_or_else(|| refused(&name.shown, "links to the target itself"))?;
                let (from, parent) = (self.parent(&target)?, self.parent(name)?);
                clear(&parent, name)?;
                rustix::fs::linkat(&from, &target.last, &parent, &name.last, AtFlags::empty()).map_err(failed)
            }
            EntryType::Fifo => {
                let parent = self.parent(name)?;
                clear(&parent, name)?;
                rustix::fs::mknodat(&parent, &name.last, FileType::Fifo, mode, 0).map_err(failed)
            }
            EntryType::XGlobalHeader => Ok(()),
            EntryType::Char | EntryType::Block => Err(refused(&name.shown, "is a device node")),
            other => Err(refused(&name.shown, &format!("is of unknown kind {other:?}"))),
        }
    }

    fn directory(&mut self, name: &Name, mode: Mode, mtime: i64) -> Result<(), Failure> {
        let parent = self.parent(name)?;
        let failed = |errno| kernel(errno, &name.shown);
        match rustix::fs::mkdirat(&parent, &name.last, Mode::from_raw_mode(0o700)) {
            Ok(()) => {}
            // A symlink to a directory of the tree counts as one, as every other step through it does.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let all: Vec<CString> = name.parents.iter().chain([&name.last]).cloned().collect();
        let directory = beneath(self.root.as_fd(), &all, OFlags::RDONLY).map_err(failed)?;
        self.directories.push((directory, mode, mtime));
        if self.directories.len() >= 512 {
            // Descriptors are bounded: the oldest get their modes early, unless that would shut us out of them.
            for (directory, mode, mtime) in self.directories.drain(..256) {
                let _ = rustix::fs::fchmod(&directory, mode | Mode::RWXU);
                let _ = rustix::fs::futimens(&directory, &times(mtime));
            }
        }
        Ok(())
    }

    /// The directory that an entry goes into, made where missing.
    fn parent(&self, name: &Name) -> Result<OwnedFd, Failure> {
        let root = self.root.as_fd();
        let failed = |errno| kernel(errno, &name.shown);
        match beneath(root, &name.parents, OFlags::PATH) {
            Err(Errno::NOENT) => {}
            result => return result.map_err(failed),
        }
        for end in 1..=name.parents.len() {
            let above = beneath(root, &name.parents[..end - 1], OFlags::PATH).map_err(failed)?;
            match rustix::fs::mkdirat(&above, &name.parents[end - 1], Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        beneath(root, &name.parents, OFlags::PATH).map_err(failed)
    }
}

/// Opens a directory by its components, without leaving `root` at any step.
fn beneath(root: BorrowedFd<'_>, components: &[CString], access: OFlags) -> Result<OwnedFd, Errno> {
    let flags = access | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let length: usize = components.iter().map(|part| part.as_bytes().len() + 1).sum();
    if length < LONGEST_PATH {
        let parts: Vec<&[u8]> = components.iter().map(|part| part.as_bytes()).collect();
        let path = if parts.is_empty() {
            b".".to_vec()
        } else {
            parts.join(&b'/')
        };
        return rustix::fs::openat2(root, path.as_slice(), flags, Mode::empty(), resolve);
    }
    let (first, rest) = components.split_at(components.len() / 2);
    let half = beneath(root, first, OFlags::PATH)?;
    beneath(half.as_fd(), rest, access)
}

/// Takes away what stands at an entry's place, unless it is a directory: nothing is ever written through it.
fn clear(parent: &OwnedFd, name: &Name) -> Result<(), Failure> {
    match rustix::fs::unlinkat(parent, &name.last, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => Err(Failure::file(Errno::EXIST, &name.shown)),
        Err(errno) => Err(kernel(errno, &name.shown)),
    }
}

fn file(
    entry: &mut tar::Entry<'_, impl Read>,
    parent: &OwnedFd,
    name: &Name,
    mode: Mode,
    mtime: i64,
) -> Result<(), Failure> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let failed = |errno| kernel(errno, &name.shown);
    let created = rustix::fs::openat(parent, &name.last, flags, Mode::from_raw_mode(0o600)).map_err(failed)?;
    let mut file = std::fs::File::from(created);
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let size = entry.read(&mut buffer).map_err(|error| broken(&error))?;
        if size == 0 {
            break;
        }
        std::io::Write::write_all(&mut file, &buffer[..size])
            .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    }
    rustix::fs::fchmod(&file, mode).map_err(failed)?;
    rustix::fs::futimens(&file, &times(mtime)).map_err(failed)
}

fn times(seconds: i64) -> Timestamps {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

fn link_target(entry: &tar::Entry<'_, impl Read>, name: &Name) -> Result<CString, Failure> {
    let target = entry
        .link_name_bytes()
        .ok_or_else(|| refused(&name.shown, "is a link to nothing"))?;
    CString::new(target.into_owned()).map_err(|_| refused(&name.shown, "links to a name with a NUL"))
}

/// The components of a name; None for the target itself.
fn split(path: &[u8]) -> Result<Option<Name>, Failure> {
    let shown = String::from_utf8_lossy(path).into_owned();
    if path.first() == Some(&b'/') {
        return Err(refused(&shown, "is absolute"));
    }
    let mut parts = Vec::new();
    for part in path.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(refused(&shown, "holds ..")),
            part => parts.push(CString::new(part).map_err(|_| refused(&shown, "holds a NUL"))?),
        }
    }
    Ok(parts.pop().map(|last| Name {
        shown,
        parents: parts,
        last,
    }))
}
