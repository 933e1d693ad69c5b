//! The steps by which a new process becomes the first one of a sandbox: all they need is allocated before it exists.

use std::ffi::{CStr, CString};

/// A descriptor that a step uses: one of the parent's, or one that an earlier step left in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fd {
    Parent(i32),
    Slot(usize),
}

/// How many descriptors steps can hand to later steps.
pub const SLOTS: usize = 16;

/// One step of a new process. Steps run in order; the first that fails ends the process.
#[derive(Debug, Clone)]
pub enum Step {
    /// Joins a namespace.
    Join { fd: Fd, kind: i32 },
    /// Leaves for new namespaces of its own.
    Unshare { flags: i32 },
    /// Names the host, in a UTS namespace of its own.
    Hostname { name: CString },
    /// File-system ids, capabilities kept: whose the files made from here on are; their modes are as given.
    FsIds { id: u32 },
    /// Opens a directory of the process's root.
    OpenRoot { path: &'static CStr, slot: usize },
    /// Mounts a new file system on `on`, and keeps its root in `slot`.
    NewFs {
        fstype: &'static CStr,
        options: Vec<(&'static CStr, Option<CString>)>,
        attributes: u64,
        on: Place,
        slot: usize,
    },
    /// Makes a detached clone of what is at `path` below `dir` (`path` "" is `dir` itself), its owners shifted by the map of
    /// `users` if there is one.
    Clone {
        dir: Fd,
        path: &'static CStr,
        attributes: u64,
        users: Option<Fd>,
        slot: usize,
    },
    /// Attaches a detached tree. A `missing_ok` place that does not exist is passed over.
    Attach { tree: Fd, on: Place, missing_ok: bool },
    /// Hides what is at `path`: a file behind `file`, a directory behind `directory` (both cloned), if it exists.
    Mask {
        dir: Fd,
        path: &'static CStr,
        file: Fd,
        directory: Fd,
    },
    /// Makes a directory unless there is one.
    Directory { dir: Fd, path: &'static CStr, mode: u32 },
    /// Makes a character device.
    Device {
        dir: Fd,
        path: &'static CStr,
        major: u32,
        minor: u32,
    },
    /// Makes a symbolic link.
    Link {
        dir: Fd,
        path: &'static CStr,
        target: &'static CStr,
    },
    /// Writes a file, unless its directory is missing. What is under its name stays, or with `instead` makes way, a directory apart.
    File {
        root: Fd,
        parent: &'static CStr,
        name: &'static CStr,
        text: CString,
        instead: bool,
    },
    /// Writes "0" to a cgroup's `tasks`: moves this process, a single thread, there.
    Enlist { tasks: Fd },
    /// Makes `root` the process's root; the old one is gone.
    Pivot { root: Fd },
    /// A session of its own, no core files, signals and mask as a program expects them, first to go when the host is full.
    /// After Pivot, since it needs the new /proc.
    Settle,
    /// Takes an unprivileged id with no capability of any kind, for good.
    Become { id: u32 },
    /// Descriptors 0, 1, 2 ... become `fds`, in order (32 at most), then `program`, which a program does not inherit; all
    /// others are closed.
    Arrange { fds: Vec<Fd>, program: Fd },
}

/// Where something is mounted: on a detached tree's own root, or at a path inside a sandbox's root.
#[derive(Debug, Clone)]
pub enum Place {
    /// At a fixed name, one or more components, none of them a link; made if it is missing and `make`.
    Fixed { dir: Fd, path: &'static CStr, make: bool },
    /// At a caller's path below `root`, links followed inside `root` only; missing parts are made.
    Inside {
        root: Fd,
        prefixes: Vec<CString>,
        names: Vec<CString>,
    },
}

impl Place {
    /// A caller's absolute path below `root`, taken apart ahead of time. None for a path that names nothing or climbs.
    #[must_use]
    pub fn inside(root: Fd, path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
        if !path.starts_with('/') || parts.is_empty() || parts.contains(&"..") {
            return None;
        }
        let mut prefixes = Vec::new();
        let mut names = Vec::new();
        for end in 1..=parts.len() {
            prefixes.push(CString::new(parts[..end].join("/")).ok()?);
            names.push(CString::new(parts[end - 1]).ok()?);
        }
        Some(Self::Inside { root, prefixes, names })
    }
}

impl Fd {
    fn parents(self) -> i32 {
        match self {
            Self::Parent(number) => number,
            Self::Slot(_) => -1,
        }
    }
}

impl Step {
    /// The highest of the parent's descriptors that the step uses; -1 for none.
    #[must_use]
    pub fn highest(&self) -> i32 {
        match self {
            Self::Join { fd, .. } => fd.parents(),
            Self::NewFs { on, .. } => on.dir().parents(),
            Self::Clone { dir, users, .. } => dir.parents().max(users.map_or(-1, Fd::parents)),
            Self::Directory { dir, .. } | Self::Device { dir, .. } | Self::Link { dir, .. } => dir.parents(),
            Self::Attach { tree, on, .. } => tree.parents().max(on.dir().parents()),
            Self::Mask {
                dir, file, directory, ..
            } => dir.parents().max(file.parents()).max(directory.parents()),
            Self::File { root, .. } | Self::Pivot { root } => root.parents(),
            Self::Enlist { tasks } => tasks.parents(),
            Self::Arrange { fds, program } => fds.iter().map(|fd| fd.parents()).fold(program.parents(), i32::max),
            Self::Unshare { .. }
            | Self::Hostname { .. }
            | Self::FsIds { .. }
            | Self::OpenRoot { .. }
            | Self::Settle
            | Self::Become { .. } => -1,
        }
    }

    /// What the step does and to what, for an error about it.
    #[must_use]
    pub fn describe(&self) -> (&'static str, String) {
        let text = |c: &CStr| c.to_string_lossy().into_owned();
        match self {
            Self::Join { kind, .. } => ("setns", format!("{kind:#x}")),
            Self::Unshare { flags } => ("unshare", format!("{flags:#x}")),
            Self::Hostname { name } => ("sethostname", text(name)),
            Self::FsIds { id } => ("setfsuid", id.to_string()),
            Self::OpenRoot { path, .. } => ("open", text(path)),
            Self::NewFs { fstype, .. } => ("mount", text(fstype)),
            Self::Clone { path, .. } => ("open_tree", text(path)),
            Self::Attach { on, .. } => ("move_mount", on.describe()),
            Self::Mask { path, .. } => ("mask", text(path)),
            Self::Directory { path, .. } => ("mkdirat", text(path)),
            Self::Device { path, .. } => ("mknodat", text(path)),
            Self::Link { path, .. } => ("symlinkat", text(path)),
            Self::File { name, .. } => ("create", text(name)),
            Self::Enlist { .. } => ("write", "tasks".into()),
            Self::Pivot { .. } => ("pivot_root", String::new()),
            Self::Settle => ("settle", String::new()),
            Self::Become { id } => ("setresuid", id.to_string()),
            Self::Arrange { .. } => ("dup3", String::new()),
        }
    }
}

impl Place {
    fn dir(&self) -> Fd {
        match self {
            Self::Fixed { dir, .. } => *dir,
            Self::Inside { root, .. } => *root,
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Fixed { path, .. } => path.to_string_lossy().into_owned(),
            Self::Inside { prefixes, .. } => prefixes
                .last()
                .map_or_else(String::new, |p| format!("/{}", p.to_string_lossy())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_descriptor_that_a_step_uses_counts() {
        let place = |dir| Place::Fixed {
            dir,
            path: c"p",
            make: false,
        };
        let attach = |tree, dir| Step::Attach {
            tree,
            on: place(dir),
            missing_ok: false,
        };
        assert_eq!(attach(Fd::Parent(7), Fd::Slot(40)).highest(), 7);
        assert_eq!(attach(Fd::Slot(40), Fd::Parent(9)).highest(), 9);
        let arrange = Step::Arrange {
            fds: vec![Fd::Parent(30), Fd::Slot(99)],
            program: Fd::Parent(12),
        };
        assert_eq!(arrange.highest(), 30);
        assert_eq!(Step::Settle.highest(), -1);
    }

    #[test]
    fn a_target_that_climbs_or_names_nothing_is_refused() {
        for path in ["", "/", "relative", "/a/../b", "/..", "/./"] {
            assert!(Place::inside(Fd::Slot(0), path).is_none(), "{path}");
        }
    }

    #[test]
    fn a_target_is_taken_apart_from_the_root_down() {
        let Some(Place::Inside { prefixes, names, .. }) = Place::inside(Fd::Slot(0), "/srv//data/") else {
            panic!("refused");
        };
        assert_eq!(prefixes, [c"srv".to_owned(), c"srv/data".to_owned()]);
        assert_eq!(names, [c"srv".to_owned(), c"data".to_owned()]);
    }
}
