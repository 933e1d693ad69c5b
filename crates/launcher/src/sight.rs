//! What a sandbox sees of the kernel: its /proc, /sys and /dev.

use std::ffi::{CStr, CString};

use dsec_sys::{
    Error, Fd, Place, Result, Step, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY,
};

use crate::steps::{slot, Cell, Trees};

const QUIET: u64 = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;

/// Hidden in /proc. Their owner, host root, is outside every sandbox's map, so most could not be opened anyway.
const PROC_MASKED: [&CStr; 17] = [
    c"acpi",
    c"asound",
    c"cmdline",
    c"interrupts",
    c"kcore",
    c"keys",
    c"key-users",
    c"kmsg",
    c"kpagecgroup",
    c"kpagecount",
    c"kpageflags",
    c"latency_stats",
    // Triggers of its files cost the host memory and time that no group is charged for, and each waits for RCU as it ends.
    c"pressure",
    c"sched_debug",
    c"scsi",
    c"sysrq-trigger",
    c"timer_list",
];

/// Read-only in /proc.
const PROC_READ_ONLY: [&CStr; 4] = [c"bus", c"fs", c"irq", c"sys"];

/// All that is shown of sysfs: what programs size themselves by, and the sandbox's own network devices.
const SYS_SHOWN: [&CStr; 4] = [
    c"devices/system/cpu",
    c"devices/system/node",
    c"devices/virtual/net",
    c"class/net",
];

/// The directories of every sandbox's /sys, parents first: those that parts of sysfs are mounted on, and those that programs
/// expect to exist, kept empty. The stage holds them once for all sandboxes: a file system less in each.
pub const SYS_SKELETON: [&str; 13] = [
    "block",
    "bus",
    "class",
    "class/net",
    "devices",
    "devices/system",
    "devices/system/cpu",
    "devices/system/node",
    "devices/virtual",
    "devices/virtual/net",
    "fs",
    "fs/cgroup",
    "kernel",
];

/// What can be shown from a file of the host's instead of the kernel's own: its name, and where it is.
const VIEWS: [(&str, usize, &CStr); 6] = [
    ("meminfo", slot::PROC, c"meminfo"),
    ("loadavg", slot::PROC, c"loadavg"),
    ("cpuinfo", slot::PROC, c"cpuinfo"),
    ("online", slot::SYS, c"devices/system/cpu/online"),
    ("possible", slot::SYS, c"devices/system/cpu/possible"),
    ("present", slot::SYS, c"devices/system/cpu/present"),
];

/// The usual six: name, major, minor.
const DEVICES: [(&CStr, u32, u32); 6] = [
    (c"null", 1, 3),
    (c"zero", 1, 5),
    (c"full", 1, 7),
    (c"random", 1, 8),
    (c"urandom", 1, 9),
    (c"tty", 5, 0),
];

const DEV_LINKS: [(&CStr, &CStr); 5] = [
    (c"fd", c"/proc/self/fd"),
    (c"stdin", c"/proc/self/fd/0"),
    (c"stdout", c"/proc/self/fd/1"),
    (c"stderr", c"/proc/self/fd/2"),
    (c"ptmx", c"pts/ptmx"),
];

fn fixed(dir: usize, path: &'static CStr) -> Place {
    Place::Fixed {
        dir: Fd::Slot(dir),
        path,
        make: true,
    }
}

fn option(key: &'static CStr, value: &str) -> (&'static CStr, Option<CString>) {
    (key, CString::new(value).ok())
}

fn new_fs(fstype: &'static CStr, options: &[(&'static CStr, &str)], attributes: u64, on: Place, slot: usize) -> Step {
    Step::NewFs {
        fstype,
        options: options.iter().map(|(k, v)| option(k, v)).collect(),
        attributes,
        on,
        slot,
    }
}

/// /dev: six devices, links, a shm, terminals of its own. Its files belong to the sandbox's root, `base`.
///
/// One file system holds /dev and /dev/shm, `shm_bytes` together: each one more in a sandbox makes the kernel's records of every
/// memory group longer.
pub fn dev(base: u32, shm_bytes: u64) -> Vec<Step> {
    let (dev, both) = (Fd::Slot(slot::DEV), Fd::Slot(slot::BOTH));
    let (root, size) = (base.to_string(), shm_bytes.to_string());
    let mut options = vec![(c"uid", root.as_str()), (c"gid", root.as_str())];
    options.extend([(c"mode", "755"), (c"size", size.as_str()), (c"nr_inodes", "66560")]);
    let attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
    let part = |path, mode, attributes, on, slot| {
        [
            Step::Directory { dir: both, path, mode },
            Step::Clone {
                dir: both,
                path,
                attributes,
                users: None,
                slot,
            },
            Step::Attach {
                tree: Fd::Slot(slot),
                on,
                missing_ok: false,
            },
        ]
    };
    let mut steps = vec![new_fs(
        c"tmpfs",
        &options,
        attributes,
        fixed(slot::STAGE, c"t"),
        slot::BOTH,
    )];
    steps.extend(part(c"dev", 0o755, attributes, fixed(slot::ROOT, c"dev"), slot::DEV));
    steps.extend(DEVICES.map(|(path, major, minor)| Step::Device {
        dir: dev,
        path,
        major,
        minor,
    }));
    steps.extend(DEV_LINKS.map(|(path, target)| Step::Link { dir: dev, path, target }));
    steps.extend(part(c"shm", 0o1777, QUIET, fixed(slot::DEV, c"shm"), slot::SCRATCH));
    let tty = (base + 5).to_string();
    let options = [
        (c"gid", tty.as_str()),
        (c"mode", "620"),
        (c"ptmxmode", "666"),
        (c"max", "256"),
    ];
    let attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
    steps.push(new_fs(
        c"devpts",
        &options,
        attributes,
        fixed(slot::DEV, c"pts"),
        slot::PTS,
    ));
    steps
}

/// /proc of the new PID namespace, with what concerns the host hidden or read-only.
pub fn proc() -> Vec<Step> {
    let proc = Fd::Slot(slot::PROC);
    let mut steps = vec![
        new_fs(c"proc", &[], QUIET, fixed(slot::ROOT, c"proc"), slot::PROC),
        Step::Clone {
            dir: Fd::Slot(slot::DEV),
            path: c"null",
            attributes: 0,
            users: None,
            slot: slot::NULL,
        },
        Step::Clone {
            dir: Fd::Slot(slot::SYS),
            path: c"block",
            attributes: 0,
            users: None,
            slot: slot::EMPTY,
        },
    ];
    for path in PROC_READ_ONLY {
        steps.push(Step::Clone {
            dir: proc,
            path,
            attributes: QUIET | MOUNT_ATTR_RDONLY,
            users: None,
            slot: slot::SCRATCH,
        });
        steps.push(Step::Attach {
            tree: Fd::Slot(slot::SCRATCH),
            on: fixed(slot::PROC, path),
            missing_ok: false,
        });
    }
    steps.extend(PROC_MASKED.map(|path| Step::Mask {
        dir: proc,
        path,
        file: Fd::Slot(slot::NULL),
        directory: Fd::Slot(slot::EMPTY),
    }));
    steps
}

/// /sys: the stage's read-only tree of empty directories, as the sandbox's root's own by the map of `users`, with the few parts of
/// sysfs that programs read.
///
/// Sysfs itself is mounted on the stage, which the sandbox leaves behind.
pub fn sys(users: i32) -> Vec<Step> {
    let attributes = QUIET | MOUNT_ATTR_RDONLY;
    let mut steps = vec![
        Step::Clone {
            dir: Fd::Slot(slot::STAGE),
            path: c"y",
            attributes,
            users: Some(Fd::Parent(users)),
            slot: slot::SYS,
        },
        Step::Attach {
            tree: Fd::Slot(slot::SYS),
            on: fixed(slot::ROOT, c"sys"),
            missing_ok: false,
        },
        new_fs(c"sysfs", &[], attributes, fixed(slot::STAGE, c"s"), slot::SYSFS),
    ];
    for path in SYS_SHOWN {
        steps.push(Step::Clone {
            dir: Fd::Slot(slot::SYSFS),
            path,
            attributes: 0,
            users: None,
            slot: slot::SCRATCH,
        });
        steps.push(Step::Attach {
            tree: Fd::Slot(slot::SCRATCH),
            on: fixed(slot::SYS, path),
            missing_ok: false,
        });
    }
    steps
}

/// Files of the host's over the kernel's own, by `VIEWS`; over what this kernel does not have, nothing.
///
/// # Errors
/// EINVAL for a name that is not among them.
pub fn views(cell: &Cell, trees: &Trees) -> Result<Vec<Step>> {
    let pairs = cell.views.iter().zip(&trees.views);
    pairs
        .map(|((wanted, _), tree)| {
            let known = VIEWS.iter().find(|(name, ..)| name == wanted);
            let (_, dir, path) = *known.ok_or_else(|| Error::new("view", wanted.clone(), libc::EINVAL))?;
            let on = Place::Fixed {
                dir: Fd::Slot(dir),
                path,
                make: false,
            };
            Ok(Step::Attach {
                tree: Fd::Parent(*tree),
                on,
                missing_ok: true,
            })
        })
        .collect()
}
