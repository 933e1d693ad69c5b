//! One cgroup a command, so that all that it started can be ended at once.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};

/// Commands that have ended but left processes behind.
const MOST_LINGERING: usize = 4096;
/// Lingering groups looked at when a child has ended.
const SWEEP: usize = 64;

/// A cgroup directory of our own making.
pub struct Group {
    name: String,
    directory: OwnedFd,
    /// cgroup.kill was written: the kernel then kills whatever is cloned into it later too (seen, 6.18), so it is not used again.
    killed: Cell<bool>,
}

pub struct Groups {
    parent: OwnedFd,
    count: Cell<u64>,
    /// An empty group for the next command: making and removing one costs more than a quick command itself.
    spare: RefCell<Option<Group>>,
    lingering: RefCell<Vec<Group>>,
    swept: Cell<usize>,
}

impl Group {
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, file, flags, Mode::empty())?;
        rustix::io::write(&file, text.as_bytes())?;
        Ok(())
    }

    fn read(&self, file: &str) -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, file, flags, Mode::empty())?;
        let mut text = vec![0; 4096];
        let mut size = 0;
        loop {
            let got = rustix::io::read(&file, &mut text[size..])?;
            if got == 0 {
                text.truncate(size);
                return Ok(text);
            }
            size += got;
            text.resize(size + 4096, 0);
        }
    }

    /// Ends every process of it, and those that they are about to make.
    pub fn kill(&self) -> io::Result<()> {
        self.killed.set(true);
        self.write("cgroup.kill", "1")
    }

    /// Stops every process of it, or lets them go on.
    pub fn freeze(&self, stop: bool) -> io::Result<()> {
        self.write("cgroup.freeze", if stop { "1" } else { "0" })
    }

    /// Processes in it now.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let text = self.read("cgroup.procs")?;
        let lines = text.split(|&byte| byte == b'\n');
        Ok(lines
            .filter_map(|line| std::str::from_utf8(line).ok()?.parse().ok())
            .collect())
    }

    pub fn is_empty(&self) -> bool {
        self.read("cgroup.events")
            .is_ok_and(|text| text.windows(11).any(|part| part == b"populated 0"))
    }
}

impl Groups {
    pub fn new(parent: OwnedFd) -> Self {
        Self {
            parent,
            count: Cell::new(0),
            spare: RefCell::default(),
            lingering: RefCell::default(),
            swept: Cell::new(0),
        }
    }

    /// An empty group; None when too many ended commands have left processes behind.
    pub fn acquire(&self) -> io::Result<Option<Group>> {
        if let Some(group) = self.spare.take() {
            return Ok(Some(group));
        }
        if self.lingering.borrow().len() >= MOST_LINGERING {
            return Ok(None);
        }
        self.count.set(self.count.get() + 1);
        let name = format!("c{}", self.count.get());
        rustix::fs::mkdirat(&self.parent, &name, Mode::from_raw_mode(0o755))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.parent, &name, flags, Mode::empty()) {
            Ok(directory) => Ok(Some(Group {
                name,
                directory,
                killed: Cell::new(false),
            })),
            Err(error) => {
                self.remove(&name);
                Err(error.into())
            }
        }
    }

    /// Takes a group back; it is removed, or kept for the next command, once it is empty.
    pub fn release(&self, group: Group) {
        if !group.is_empty() {
            self.lingering.borrow_mut().push(group);
        } else if !group.killed.get() && self.spare.borrow().is_none() {
            self.spare.replace(Some(group));
        } else {
            self.remove(&group.name);
        }
    }

    /// Removes lingering groups that have become empty; to be called when children have ended.
    pub fn sweep(&self) {
        let mut lingering = self.lingering.borrow_mut();
        for _ in 0..SWEEP.min(lingering.len()) {
            let at = self.swept.get() % lingering.len();
            if lingering[at].is_empty() {
                self.remove(&lingering.swap_remove(at).name);
                if lingering.is_empty() {
                    lingering.shrink_to_fit();
                    return;
                }
            } else {
                self.swept.set(at + 1);
            }
        }
    }

    fn remove(&self, name: &str) {
        // A group that cannot be removed now goes with the sandbox.
        let _ = rustix::fs::unlinkat(&self.parent, name, AtFlags::REMOVEDIR);
    }
}
