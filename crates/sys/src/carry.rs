//! Carries out steps in the new process: raw calls only, no allocation, nothing of the parent's written but its report.

use std::ffi::CStr;

use crate::mountfd::{
    MountAttr, FSCONFIG_CMD_CREATE, FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, MOUNT_ATTR_IDMAP, MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY, MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH,
    OPEN_TREE_CLOEXEC, OPEN_TREE_CLONE,
};
use crate::raw::call;
use crate::step::{Fd, Place, Step, SLOTS};

pub(crate) type Done = Result<isize, i32>;

const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
const RESOLVE_NO_SYMLINKS: u64 = 0x04;
const RESOLVE_IN_ROOT: u64 = 0x10;
const PATH_DIR: i32 = libc::O_PATH | libc::O_CLOEXEC | libc::O_DIRECTORY;
const PATH_ANY: i32 = libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW;

#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

pub(crate) struct Carrier {
    slots: [i32; SLOTS],
}

/// One raw call as a Result.
pub(crate) fn sys(number: libc::c_long, args: [usize; 6]) -> Done {
    // SAFETY: each caller in this crate passes numbers, or pointers into steps that the parent keeps until we are done.
    let value = unsafe { call(number, args) };
    if value < 0 {
        return Err(-value as i32);
    }
    Ok(value)
}

fn ptr(text: &CStr) -> usize {
    text.as_ptr() as usize
}

fn openat2(dir: i32, path: &CStr, flags: i32, mode: u64, resolve: u64) -> Result<i32, i32> {
    let how = OpenHow {
        flags: flags as u64,
        mode,
        resolve,
    };
    let how_ptr = std::ptr::from_ref(&how) as usize;
    let fd = sys(
        libc::SYS_openat2,
        [dir as usize, ptr(path), how_ptr, size_of::<OpenHow>(), 0, 0],
    )?;
    Ok(fd as i32)
}

fn mkdirat(dir: i32, path: &CStr, mode: u32) -> Done {
    match sys(libc::SYS_mkdirat, [dir as usize, ptr(path), mode as usize, 0, 0, 0]) {
        Err(libc::EEXIST) => Ok(0),
        other => other,
    }
}

pub(crate) fn close(fd: i32) {
    // A close that fails has closed all the same, and the process is about to exec.
    let _ = sys(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
}

/// Takes a copy of the table of descriptors that was shared so far, without those above `most`.
///
/// A server of thousands of sandboxes holds a descriptor for each: neither copied here nor closed again later.
pub(crate) fn forget_above(most: i32) -> Done {
    let first = most.max(2) as usize + 1;
    sys(
        libc::SYS_close_range,
        [first, u32::MAX as usize, libc::CLOSE_RANGE_UNSHARE as usize, 0, 0, 0],
    )
}

fn write_all(fd: i32, data: &[u8]) -> Done {
    let mut done = 0;
    while done < data.len() {
        let rest = &data[done..];
        done += sys(
            libc::SYS_write,
            [fd as usize, rest.as_ptr() as usize, rest.len(), 0, 0, 0],
        )? as usize;
    }
    Ok(0)
}

fn clone_tree(dir: i32, path: &CStr, attributes: u64, users: Option<i32>) -> Result<i32, i32> {
    let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH as u32 | libc::AT_SYMLINK_NOFOLLOW as u32;
    let tree = sys(libc::SYS_open_tree, [dir as usize, ptr(path), flags as usize, 0, 0, 0])? as i32;
    if attributes != 0 || users.is_some() {
        set_attributes(tree, attributes, users)?;
    }
    Ok(tree)
}

fn set_attributes(mount: i32, attributes: u64, users: Option<i32>) -> Done {
    let attr = MountAttr {
        attr_set: attributes | users.map_or(0, |_| MOUNT_ATTR_IDMAP),
        attr_clr: 0,
        propagation: 0,
        userns_fd: users.map_or(0, |fd| fd as u64),
    };
    let attr_ptr = std::ptr::from_ref(&attr) as usize;
    let (empty, flags) = (ptr(c""), libc::AT_EMPTY_PATH as usize);
    let size = size_of::<MountAttr>();
    sys(
        libc::SYS_mount_setattr,
        [mount as usize, empty, flags, attr_ptr, size, 0],
    )
}

fn attach(tree: i32, place: i32) -> Done {
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    let empty = ptr(c"");
    sys(
        libc::SYS_move_mount,
        [tree as usize, empty, place as usize, empty, flags as usize, 0],
    )
}

impl Carrier {
    pub(crate) fn new() -> Self {
        Self { slots: [-1; SLOTS] }
    }

    pub(crate) fn fd(&self, fd: Fd) -> i32 {
        match fd {
            Fd::Parent(number) => number,
            Fd::Slot(slot) => self.slots.get(slot).copied().unwrap_or(-1),
        }
    }

    pub(crate) fn keep(&mut self, slot: usize, fd: i32) {
        if let Some(place) = self.slots.get_mut(slot) {
            *place = fd;
        }
    }

    /// A descriptor of the directory or file to mount on.
    fn place(&self, place: &Place) -> Result<i32, i32> {
        match place {
            Place::Fixed { dir, path, make } => self.fixed(self.fd(*dir), path, *make),
            Place::Inside { root, prefixes, names } => {
                let root = self.fd(*root);
                let mut at = root;
                for (prefix, name) in prefixes.iter().zip(names) {
                    let resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;
                    let next = match openat2(root, prefix, PATH_DIR, 0, resolve) {
                        Err(libc::ENOENT) => {
                            sys(libc::SYS_mkdirat, [at as usize, ptr(name), 0o755, 0, 0, 0])?;
                            openat2(at, name, PATH_DIR, 0, RESOLVE_NO_SYMLINKS)
                        }
                        found => found,
                    }?;
                    if at != root {
                        close(at);
                    }
                    at = next;
                }
                Ok(at)
            }
        }
    }

    fn fixed(&self, dir: i32, path: &CStr, make: bool) -> Result<i32, i32> {
        match openat2(dir, path, PATH_ANY, 0, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS) {
            Err(libc::ENOENT) if make => {
                mkdirat(dir, path, 0o755)?;
                openat2(dir, path, PATH_ANY, 0, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
            }
            other => other,
        }
    }

    fn new_fs(&mut self, step: &Step) -> Done {
        let Step::NewFs {
            fstype,
            options,
            attributes,
            on,
            slot,
        } = step
        else {
            return Err(libc::EINVAL);
        };
        let fs = sys(libc::SYS_fsopen, [ptr(fstype), 1, 0, 0, 0, 0])? as usize;
        for (key, value) in options {
            let (command, value) = match value {
                Some(text) => (FSCONFIG_SET_STRING, ptr(text)),
                None => (FSCONFIG_SET_FLAG, 0),
            };
            sys(libc::SYS_fsconfig, [fs, command as usize, ptr(key), value, 0, 0])?;
        }
        sys(libc::SYS_fsconfig, [fs, FSCONFIG_CMD_CREATE as usize, 0, 0, 0, 0])?;
        let tree = sys(libc::SYS_fsmount, [fs, 1, *attributes as usize, 0, 0, 0])? as i32;
        close(fs as i32);
        let place = self.place(on)?;
        attach(tree, place)?;
        close(place);
        self.keep(*slot, tree);
        Ok(0)
    }

    fn attach_at(&self, tree: i32, on: &Place, missing_ok: bool) -> Done {
        let place = match self.place(on) {
            Err(libc::ENOENT) if missing_ok => return Ok(0),
            other => other?,
        };
        let done = attach(tree, place);
        close(place);
        done
    }

    fn mask(&self, dir: i32, path: &CStr, file: i32, directory: i32) -> Done {
        let place = match openat2(dir, path, PATH_ANY, 0, RESOLVE_NO_SYMLINKS) {
            Err(libc::ENOENT) => return Ok(0),
            other => other?,
        };
        let is_directory = openat2(place, c".", PATH_DIR, 0, 0);
        let cover = match is_directory {
            Ok(fd) => {
                close(fd);
                directory
            }
            Err(_) => file,
        };
        let attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
        let attributes = if is_directory.is_ok() {
            attributes | MOUNT_ATTR_NODEV
        } else {
            attributes
        };
        let tree = clone_tree(cover, c"", attributes, None)?;
        let done = attach(tree, place);
        close(tree);
        close(place);
        done
    }

    fn file(&self, root: i32, parent: &CStr, name: &CStr, text: &CStr, instead: bool) -> Done {
        let dir = match openat2(root, parent, PATH_DIR, 0, RESOLVE_NO_SYMLINKS) {
            Err(libc::ENOENT) => return Ok(0),
            other => other?,
        };
        if instead {
            match sys(libc::SYS_unlinkat, [dir as usize, ptr(name), 0, 0, 0, 0]) {
                Ok(_) | Err(libc::ENOENT | libc::EISDIR) => {}
                Err(errno) => {
                    close(dir);
                    return Err(errno);
                }
            }
        }
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let made = openat2(dir, name, flags, 0o644, RESOLVE_NO_SYMLINKS);
        close(dir);
        match made {
            Err(libc::EEXIST) => Ok(0),
            Err(errno) => Err(errno),
            Ok(fd) => {
                let done = write_all(fd, text.to_bytes());
                close(fd);
                done
            }
        }
    }

    /// One step of those that shape what the sandbox sees; the others are in `myself`.
    pub(crate) fn carry(&mut self, step: &Step) -> Done {
        match step {
            Step::Join { fd, kind } => sys(libc::SYS_setns, [self.fd(*fd) as usize, *kind as usize, 0, 0, 0, 0]),
            Step::Unshare { flags } => sys(libc::SYS_unshare, [*flags as usize, 0, 0, 0, 0, 0]),
            Step::Hostname { name } => sys(libc::SYS_sethostname, [ptr(name), name.as_bytes().len(), 0, 0, 0, 0]),
            Step::OpenRoot { path, slot } => {
                let fd = openat2(libc::AT_FDCWD, path, PATH_DIR, 0, 0)?;
                self.keep(*slot, fd);
                Ok(0)
            }
            Step::NewFs { .. } => self.new_fs(step),
            Step::Clone {
                dir,
                path,
                attributes,
                users,
                slot,
            } => {
                let users = users.map(|fd| self.fd(fd));
                let tree = clone_tree(self.fd(*dir), path, *attributes, users)?;
                self.keep(*slot, tree);
                Ok(0)
            }
            Step::Attach { tree, on, missing_ok } => self.attach_at(self.fd(*tree), on, *missing_ok),
            Step::Mask {
                dir,
                path,
                file,
                directory,
            } => self.mask(self.fd(*dir), path, self.fd(*file), self.fd(*directory)),
            Step::Directory { dir, path, mode } => mkdirat(self.fd(*dir), path, *mode),
            Step::Device {
                dir,
                path,
                major,
                minor,
            } => {
                let device = libc::makedev(*major, *minor) as usize;
                let mode = (libc::S_IFCHR | 0o666) as usize;
                sys(
                    libc::SYS_mknodat,
                    [self.fd(*dir) as usize, ptr(path), mode, device, 0, 0],
                )
            }
            Step::Link { dir, path, target } => sys(
                libc::SYS_symlinkat,
                [ptr(target), self.fd(*dir) as usize, ptr(path), 0, 0, 0],
            ),
            Step::File {
                root,
                parent,
                name,
                text,
                instead,
            } => self.file(self.fd(*root), parent, name, text, *instead),
            other => self.carry_self(other),
        }
    }
}
