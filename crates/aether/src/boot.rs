//! What the launcher hands over: the boot record of schema/aether.toml at descriptor 3, and the descriptors it names.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::fs::{FileType, Mode, OFlags};

/// Longest boot record: the seccomp program is most of it.
const LONGEST_RECORD: u64 = 256 * 1024;
const BOOT_DESCRIPTOR: u32 = 3;

#[derive(Debug, thiserror::Error)]
pub enum BootError {
    #[error("{0}")]
    Kernel(#[from] dsec_sys::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("boot record: {0}")]
    Record(#[from] dsec_proto::FrameError),
    #[error("boot record of version {0}, which this aether does not know")]
    Version(u32),
    #[error("no seccomp program in the boot record")]
    NoFilter,
    #[error("/dev/null of the sandbox is not the null device")]
    Null,
}

/// The sandbox that aether serves: how its commands get into it.
pub struct Sandbox {
    pub userns: OwnedFd,
    pub cgroup: OwnedFd,
    pub tasks: Vec<OwnedFd>,
    pub devpts: OwnedFd,
    pub null: OwnedFd,
    pub filter: Vec<u8>,
    pub capabilities: u64,
    pub no_new_privileges: bool,
    pub began: Instant,
}

impl Sandbox {
    pub fn task_files(&self) -> Vec<BorrowedFd<'_>> {
        self.tasks.iter().map(AsFd::as_fd).collect()
    }

    pub fn milliseconds(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The sandbox, and the listening socket.
pub fn read() -> Result<(Sandbox, OwnedFd), BootError> {
    let mut file = File::from(dsec_sys::adopt_descriptor(BOOT_DESCRIPTOR)?);
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(LONGEST_RECORD).read_to_end(&mut bytes)?;
    let boot = dsec_proto::decode_boot(&bytes)?;
    if boot.version != dsec_proto::VERSION {
        return Err(BootError::Version(boot.version));
    }
    if boot.filter.is_empty() || !boot.filter.len().is_multiple_of(8) {
        return Err(BootError::NoFilter);
    }
    let own = dsec_sys::adopt_descriptor;
    let sandbox = Sandbox {
        userns: own(boot.userns)?,
        cgroup: own(boot.cgroup)?,
        tasks: boot.tasks.iter().map(|&number| own(number)).collect::<Result<_, _>>()?,
        devpts: own(boot.devpts)?,
        null: null_device()?,
        filter: boot.filter.into_vec(),
        capabilities: boot.capabilities,
        no_new_privileges: boot.no_new_privileges,
        began: Instant::now(),
    };
    raise_soft_limit();
    Ok((sandbox, own(boot.listener)?))
}

/// Opened once, before anything of the sandbox runs, so that nothing can be put in its place.
fn null_device() -> Result<OwnedFd, BootError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
    let null = rustix::fs::open("/dev/null", flags, Mode::empty()).map_err(io::Error::from)?;
    let stat = rustix::fs::fstat(&null).map_err(io::Error::from)?;
    let is_null =
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == rustix::fs::makedev(1, 3);
    if is_null {
        Ok(null)
    } else {
        Err(BootError::Null)
    }
}

/// As many descriptors as the host allows: every command and connection holds some.
fn raise_soft_limit() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    // A refusal leaves the old limit, under which aether answers `limit_reached` earlier.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
}
