//! System calls with owned descriptors and named errors: the only crate of the workspace that may say `unsafe`.

mod bpf;
mod btrfs;
mod cache;
mod carry;
mod child;
mod child_init;
mod child_socket;
mod disguise;
mod error;
mod fanotify;
mod keeper;
mod loopdev;
mod mapping;
mod mount;
mod mountfd;
mod myself;
mod namespaces;
mod netns;
mod raw;
mod sealed;
mod spawn;
mod step;

pub use bpf::BpfMap;
pub use btrfs::{
    filesystem_id, quota_enable_simple, subvolume_create, subvolume_delete, subvolume_id, subvolume_limit,
    subvolume_snapshot,
};
pub use cache::cached_bytes;
pub use child::{launch, Entry, Launch, Report, Stage, Streams, REPORT};
pub use child_init::*;
pub use child_socket::receive_descriptor;
pub use disguise::Disguise;
pub use error::{Error, Result};
pub use fanotify::{
    fanotify_answer, fanotify_group, fanotify_unwatch, fanotify_watch, range_events, RangeEvent, EVENT_BYTES,
};
pub use keeper::{adopt, ignore_signals, keep, only_open_here};
pub use loopdev::loop_attach;
pub use mapping::Mapping;
pub use mount::{mount, mount_erofs, umount};
pub use mountfd::{
    detached, idmapped_clone, overlay, plain_clone, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
};
pub use namespaces::{make_namespaces, make_stage, Namespaces, IDS};
pub use netns::{device_index, duplicate, make_netns, socket_in, this_netns, within};
pub use sealed::{borrow, sealed_file};
pub use spawn::{spawn, wait, Program, Spawned};
pub use step::{Fd, Place, Step, SLOTS};
