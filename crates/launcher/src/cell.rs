//! From a plan to a running aether: what is made ready outside, and the process that carries out the rest.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use dsec_proto::Boot;
use dsec_sys::{
    detached, idmapped_clone, overlay, plain_clone, sealed_file, spawn, Disguise, Error, Program, Result,
    MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY,
};
use serde::Serialize;

use crate::steps::{number, steps, Cell, Trees, NEW_PID};

/// A running aether, and how long its two halves took.
#[derive(Debug)]
pub struct Launched {
    pub pid: i32,
    pub pidfd: OwnedFd,
    pub rootfs: Duration,
    pub process: Duration,
}

const PROTOCOL: u32 = 1;

fn boot_record(cell: &Cell) -> Result<OwnedFd> {
    let tasks = (number::TASKS..).take(cell.tasks_fds.len()).collect();
    let boot = Boot {
        version: PROTOCOL,
        listener: number::LISTENER,
        userns: number::USERNS,
        cgroup: number::CGROUP,
        tasks,
        devpts: number::DEVPTS,
        filter: serde_bytes::ByteBuf::from(cell.filter.clone()),
        capabilities: cell.capabilities,
        no_new_privileges: cell.no_new_privileges,
    };
    let mut data = Vec::with_capacity(512 + cell.filter.len());
    boot.serialize(&mut rmp_serde::Serializer::new(&mut data).with_struct_map())
        .map_err(|e| Error::new("encode", e.to_string(), libc::EPROTO))?;
    sealed_file("boot", &data, false)
}

/// An overlay of `layers`, lowest first, and `writable`, all seen through the map of `user_fd`, whose root is `base`.
///
/// # Errors
/// The call that the kernel refused.
pub fn assemble(layers: &[String], writable: &str, user_fd: i32, base: u32) -> Result<OwnedFd> {
    let user = dsec_sys::borrow(user_fd);
    let read_only = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV;
    let layers = layers
        .iter()
        .map(|path| idmapped_clone(path, user, read_only))
        .collect::<Result<Vec<_>>>()?;
    let writable = idmapped_clone(writable, user, MOUNT_ATTR_NODEV)?;
    // An overlay acts with its mounter's ids: host root is not in the map of its layers.
    let _disguise = Disguise::file_system(base)?;
    overlay(&layers, &writable)
}

/// The sandbox's root, extra trees and views, detached.
fn trees(cell: &Cell) -> Result<(OwnedFd, Vec<OwnedFd>, Vec<OwnedFd>)> {
    let user = dsec_sys::borrow(cell.user_fd);
    let root = assemble(&cell.layers, &cell.writable, cell.user_fd, cell.base)?;
    let extras = cell
        .extras
        .iter()
        .map(|extra| {
            let limits = MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID;
            let limits = if extra.read_only {
                limits | MOUNT_ATTR_RDONLY
            } else {
                limits
            };
            idmapped_clone(&extra.source, user, limits)
        })
        .collect::<Result<Vec<_>>>()?;
    let limits = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
    let views = cell
        .views
        .iter()
        .map(|(_, file)| plain_clone(file, limits))
        .collect::<Result<Vec<_>>>()?;
    Ok((root, extras, views))
}

/// Starts aether as the first process of a sandbox.
///
/// # Errors
/// The call that the kernel refused. Nothing is left then but what the caller made.
pub fn launch(cell: &Cell) -> Result<Launched> {
    let begun = Instant::now();
    let (root, extras, views) = trees(cell)?;
    let rootfs = begun.elapsed();
    let boot = boot_record(cell)?;
    // aether's own descriptor of its groups must not be a way up to the host's root.
    let work = detached(dsec_sys::borrow(cell.work_fd))?;
    let ready = Trees {
        root: root.as_raw_fd(),
        extras: extras.iter().map(AsRawFd::as_raw_fd).collect(),
        views: views.iter().map(AsRawFd::as_raw_fd).collect(),
        work: work.as_raw_fd(),
    };
    let program = Program {
        steps: steps(cell, &ready, boot.as_raw_fd())?,
        arguments: vec![c"aether".to_owned()],
        environment: Vec::new(),
        namespaces: NEW_PID,
        cgroup: Some(cell.home_fd),
    };
    let spawned = spawn(&program)?;
    Ok(Launched {
        pid: spawned.pid,
        pidfd: spawned.pidfd,
        rootfs,
        process: begun.elapsed().checked_sub(rootfs).unwrap_or_default(),
    })
}
