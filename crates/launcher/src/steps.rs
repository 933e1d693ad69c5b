//! One sandbox's plan as the steps of its first process.

use std::ffi::{CStr, CString};

use dsec_sys::{Error, Fd, Place, Result, Step};
use serde::Deserialize;

use crate::sight;

/// Slots of the descriptors that steps hand on.
pub mod slot {
    pub const STAGE: usize = 0;
    pub const ROOT: usize = 1;
    pub const DEV: usize = 2;
    pub const PTS: usize = 3;
    pub const SYS: usize = 4;
    pub const SYSFS: usize = 5;
    pub const PROC: usize = 6;
    pub const NULL: usize = 7;
    pub const EMPTY: usize = 8;
    pub const SCRATCH: usize = 9;
    pub const BOTH: usize = 10;
}

/// A volume or data layer: its directory on the node and its path in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Extra {
    pub source: String,
    pub target: String,
    pub read_only: bool,
}

/// All that one launch needs. Numbers named `..fd` are the caller's descriptors, used and left open.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Cell {
    pub hostname: String,
    /// Host id of the sandbox's root; its ids are the 65,536 from here.
    pub base: u32,
    /// Host id that aether runs as.
    pub agent_id: u32,
    /// Directories of mounted layers, lowest first.
    pub layers: Vec<String>,
    /// Directory with `upper` and `work`.
    pub writable: String,
    pub extras: Vec<Extra>,
    /// What of the kernel is shown from a file of the host's: a name of `sight::VIEWS`, and the file.
    pub views: Vec<(String, String)>,
    pub shm_bytes: u64,
    pub stage_fd: i32,
    pub user_fd: i32,
    pub net_fd: i32,
    pub ipc_fd: i32,
    pub uts_fd: i32,
    pub program_fd: i32,
    pub null_fd: i32,
    pub listener_fd: i32,
    /// v2 cgroup in which aether starts, and the one below which it makes a group for each command.
    pub home_fd: i32,
    pub work_fd: i32,
    /// v1 `tasks` of the sandbox's limits, and of the group in which aether itself stays.
    pub tasks_fds: Vec<i32>,
    pub agent_tasks_fds: Vec<i32>,
    #[serde(with = "serde_bytes")]
    pub filter: Vec<u8>,
    pub capabilities: u64,
    pub no_new_privileges: bool,
    /// The sandbox's own addresses beside the loopback's.
    pub addresses: Vec<String>,
    pub nameservers: Vec<String>,
}

/// Trees that were made ready outside, by descriptor.
pub struct Trees {
    pub root: i32,
    /// Beside `Cell::extras`.
    pub extras: Vec<i32>,
    /// Beside `Cell::views`.
    pub views: Vec<i32>,
    /// `Cell::work_fd` as a tree of its own.
    pub work: i32,
}

/// Descriptor numbers that aether finds its own at; 3 is the boot record.
pub mod number {
    pub const LISTENER: u32 = 4;
    pub const USERNS: u32 = 5;
    pub const CGROUP: u32 = 6;
    pub const DEVPTS: u32 = 7;
    pub const TASKS: u32 = 8;
}

fn text(value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::new("launch", value.replace('\0', "\\0"), libc::EINVAL))
}

const NEW_MOUNTS: i32 = libc::CLONE_NEWNS;
const NEW_CGROUP: i32 = libc::CLONE_NEWCGROUP;
const NEW_UTS: i32 = libc::CLONE_NEWUTS;
const NEW_IPC: i32 = libc::CLONE_NEWIPC;
/// The namespace that the process itself is made in.
pub const NEW_PID: i32 = libc::CLONE_NEWPID;
const NEW_NET: i32 = libc::CLONE_NEWNET;

/// Files that name the sandbox to its own programs, and say who resolves names for it.
///
/// A host name of its own stands beside its own address, so that a server bound to it is reached by neighbours of its group.
fn names(cell: &Cell) -> Result<Vec<Step>> {
    let hostname = &cell.hostname;
    let mut hosts = String::new();
    if cell.addresses.is_empty() {
        hosts.push_str(&format!("127.0.0.1\tlocalhost {hostname}\n"));
    } else {
        hosts.push_str("127.0.0.1\tlocalhost\n");
    }
    hosts.push_str("::1\tlocalhost ip6-localhost ip6-loopback\n");
    for address in &cell.addresses {
        hosts.push_str(&format!("{address}\t{hostname}\n"));
    }
    let mut resolvers = String::new();
    for address in &cell.nameservers {
        resolvers.push_str(&format!("nameserver {address}\n"));
    }
    let file = |name: &'static CStr, content: &str| -> Result<Step> {
        Ok(Step::File {
            root: Fd::Slot(slot::ROOT),
            parent: c"etc",
            name,
            text: text(content)?,
            // An image's own would name neither this sandbox nor its resolver.
            instead: !cell.addresses.is_empty(),
        })
    };
    Ok(vec![
        file(c"hostname", &format!("{hostname}\n"))?,
        file(c"hosts", &hosts)?,
        file(c"resolv.conf", &resolvers)?,
    ])
}

fn extras(cell: &Cell, trees: &Trees) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    for (extra, tree) in cell.extras.iter().zip(&trees.extras) {
        let on = Place::inside(Fd::Slot(slot::ROOT), &extra.target)
            .ok_or_else(|| Error::new("mount", extra.target.clone(), libc::EINVAL))?;
        steps.push(Step::Attach {
            tree: Fd::Parent(*tree),
            on,
            missing_ok: false,
        });
    }
    Ok(steps)
}

fn join(fd: i32, kind: i32) -> Step {
    Step::Join {
        fd: Fd::Parent(fd),
        kind,
    }
}

fn enlist(fds: &[i32]) -> impl Iterator<Item = Step> + '_ {
    fds.iter().map(|fd| Step::Enlist { tasks: Fd::Parent(*fd) })
}

/// The steps in their order; `boot_fd` holds aether's boot record.
///
/// # Errors
/// EINVAL for a target that is no absolute path inside, or text with a NUL.
pub fn steps(cell: &Cell, trees: &Trees, boot_fd: i32) -> Result<Vec<Step>> {
    let mut steps = vec![
        join(cell.stage_fd, NEW_MOUNTS),
        Step::Unshare { flags: NEW_MOUNTS },
        join(cell.net_fd, NEW_NET),
        join(cell.ipc_fd, NEW_IPC),
        join(cell.uts_fd, NEW_UTS),
        Step::Hostname {
            name: text(&cell.hostname)?,
        },
        // Whatever is made from here on belongs to the sandbox's root, as on its own overlay.
        Step::FsIds { id: cell.base },
        Step::OpenRoot {
            path: c"/",
            slot: slot::STAGE,
        },
        Step::Attach {
            tree: Fd::Parent(trees.root),
            on: Place::Fixed {
                dir: Fd::Slot(slot::STAGE),
                path: c"r",
                make: false,
            },
            missing_ok: false,
        },
        Step::OpenRoot {
            path: c"/r",
            slot: slot::ROOT,
        },
    ];
    steps.extend(names(cell)?);
    steps.extend(sight::dev(cell.base, cell.shm_bytes));
    steps.extend(sight::sys(cell.user_fd));
    steps.extend(sight::proc());
    steps.extend(sight::views(cell, trees)?);
    steps.extend(extras(cell, trees)?);
    steps.push(Step::Pivot {
        root: Fd::Slot(slot::ROOT),
    });
    // The cgroup namespace is made where the commands will live, so that they see themselves at its root.
    steps.extend(enlist(&cell.tasks_fds));
    steps.push(Step::Unshare { flags: NEW_CGROUP });
    steps.extend(enlist(&cell.agent_tasks_fds));
    steps.push(Step::Settle);
    steps.push(Step::Become { id: cell.agent_id });
    let null = Fd::Parent(cell.null_fd);
    let mut fds = vec![null, null, null, Fd::Parent(boot_fd)];
    fds.extend([cell.listener_fd, cell.user_fd, trees.work].map(Fd::Parent));
    fds.push(Fd::Slot(slot::PTS));
    fds.extend(cell.tasks_fds.iter().copied().map(Fd::Parent));
    steps.push(Step::Arrange {
        fds,
        program: Fd::Parent(cell.program_fd),
    });
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell() -> Cell {
        Cell {
            hostname: "h".into(),
            base: 100_000,
            agent_id: 165_536,
            layers: vec!["/l".into()],
            writable: "/w".into(),
            extras: vec![Extra {
                source: "/v".into(),
                target: "/data/v".into(),
                read_only: true,
            }],
            views: vec![("meminfo".into(), "/m".into())],
            shm_bytes: 1 << 20,
            stage_fd: 20,
            user_fd: 21,
            net_fd: 22,
            ipc_fd: 23,
            uts_fd: 24,
            program_fd: 25,
            null_fd: 26,
            listener_fd: 27,
            home_fd: 28,
            work_fd: 29,
            tasks_fds: vec![30, 31, 32],
            agent_tasks_fds: vec![33],
            filter: Vec::new(),
            capabilities: 0,
            no_new_privileges: false,
            addresses: Vec::new(),
            nameservers: Vec::new(),
        }
    }

    fn made() -> Vec<Step> {
        let trees = Trees {
            root: 40,
            extras: vec![41],
            views: vec![44],
            work: 43,
        };
        steps(&cell(), &trees, 42).unwrap_or_default()
    }

    fn place(steps: &[Step], wanted: impl Fn(&Step) -> bool) -> usize {
        steps.iter().position(wanted).unwrap_or(usize::MAX)
    }

    #[test]
    fn power_is_given_up_after_everything_that_needs_it_and_descriptors_last() {
        let steps = made();
        let pivot = place(&steps, |s| matches!(s, Step::Pivot { .. }));
        let cgroup = place(&steps, |s| matches!(s, Step::Unshare { flags } if *flags == NEW_CGROUP));
        let become_nobody = place(&steps, |s| matches!(s, Step::Become { id: 165_536 }));
        assert!(pivot < cgroup && cgroup < become_nobody);
        assert_eq!(become_nobody + 2, steps.len());
        assert!(matches!(steps.last(), Some(Step::Arrange { .. })));
    }

    #[test]
    fn it_begins_on_the_stage_so_that_no_mount_of_the_host_is_copied() {
        let steps = made();
        assert!(matches!(steps[0], Step::Join { fd: Fd::Parent(20), kind } if kind == NEW_MOUNTS));
        assert!(matches!(steps[1], Step::Unshare { flags } if flags == NEW_MOUNTS));
    }

    #[test]
    fn aether_finds_its_descriptors_where_the_boot_record_says() {
        let steps = made();
        let Some(Step::Arrange { fds, program }) = steps.last() else {
            panic!("no arrangement");
        };
        let at = |number: u32| fds.get(number as usize).copied();
        assert_eq!(*program, Fd::Parent(25));
        assert_eq!(at(3), Some(Fd::Parent(42)));
        assert_eq!(at(number::LISTENER), Some(Fd::Parent(27)));
        assert_eq!(at(number::USERNS), Some(Fd::Parent(21)));
        assert_eq!(at(number::CGROUP), Some(Fd::Parent(43)));
        assert_eq!(at(number::DEVPTS), Some(Fd::Slot(slot::PTS)));
        assert_eq!(at(number::TASKS), Some(Fd::Parent(30)));
        assert_eq!(fds.len(), 11);
    }

    #[test]
    fn a_target_that_climbs_is_refused() {
        let mut cell = cell();
        cell.extras[0].target = "/data/../..".into();
        let trees = Trees {
            root: 40,
            extras: vec![41],
            views: vec![44],
            work: 43,
        };
        assert_eq!(steps(&cell, &trees, 42).err().map(|e| e.errno), Some(libc::EINVAL));
    }
}
