//! The programs that judge and watch sandboxes' packets, and the events they write.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use aya::maps::{Map, MapData, RingBuf};
use aya::programs::SchedClassifier;
use aya::{include_bytes_aligned, Btf, Ebpf, EbpfLoader};
use dsec_sys::{attach_to_device, Error, Result, Side};

static POLICY: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/policy.bpf.o"));
static OBSERVE: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/observe.bpf.o"));

/// The loaded programs. Their maps are pinned, and outlive them; so do the devices that they hang on.
pub struct Hook {
    policy: Ebpf,
    observer: Ebpf,
    events: Mutex<RingBuf<MapData>>,
}

fn named(op: &'static str, error: &(dyn std::error::Error + 'static)) -> Error {
    let (mut text, mut errno, mut next) = (error.to_string(), libc::EINVAL, Some(error));
    while let Some(this) = next {
        if let Some(number) = this
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::raw_os_error)
        {
            errno = number;
        }
        text = this.to_string();
        next = this.source();
    }
    // The verifier's whole log may be in it; its end says why.
    let tail = text.char_indices().rev().nth(400).map_or(0, |(at, _)| at);
    Error::new(op, &text[tail..], errno)
}

fn loaded(object: &[u8], pins: &Path, btf: Option<&Btf>, names: &[&str]) -> Result<Ebpf> {
    let mut made = EbpfLoader::new()
        .btf(btf)
        .default_map_pin_directory(pins)
        .load(object)
        .map_err(|e| named("bpf load", &e))?;
    for name in names {
        let program: &mut SchedClassifier = made
            .program_mut(name)
            .ok_or_else(|| Error::new("bpf load", *name, libc::ENOENT))?
            .try_into()
            .map_err(|e: aya::programs::ProgramError| named("bpf load", &e))?;
        program.load().map_err(|e| named("bpf load", &e))?;
    }
    Ok(made)
}

fn attach(programs: &Ebpf, name: &str, device: u32, side: Side) -> Result<()> {
    let program: &SchedClassifier = programs
        .program(name)
        .ok_or_else(|| Error::new("bpf attach", name, libc::ENOENT))?
        .try_into()
        .map_err(|e: aya::programs::ProgramError| named("bpf attach", &e))?;
    let fd = program.fd().map_err(|e| named("bpf attach", &e))?;
    attach_to_device(fd.as_fd(), device, side)
}

impl Hook {
    /// Loads the programs on the maps that are pinned in `pins`, a directory of a bpffs, or on new ones pinned there.
    ///
    /// # Errors
    /// EPERM without privilege; EINVAL where the kernel cannot run them, with the end of its reasons.
    pub fn open(pins: &Path) -> Result<Self> {
        let policy = loaded(POLICY, pins, None, &["from_sandbox", "to_sandbox"])?;
        let btf = Btf::from_sys_fs().map_err(|e| named("btf", &e))?;
        let observer = loaded(OBSERVE, pins, Some(&btf), &["observe"])?;
        let data = MapData::from_pin(pins.join("events")).map_err(|e| named("bpf events", &e))?;
        let map = Map::from_map_data(data).map_err(|e| named("bpf events", &e))?;
        let events = RingBuf::try_from(map).map_err(|e| named("bpf events", &e))?;
        Ok(Self {
            policy,
            observer,
            events: Mutex::new(events),
        })
    }

    /// Has what passes a device judged: what comes from the sandbox, and what goes to it. In the calling thread's namespace.
    pub(crate) fn judge(&self, device: u32) -> Result<()> {
        attach(&self.policy, "from_sandbox", device, Side::Ingress)?;
        attach(&self.policy, "to_sandbox", device, Side::Egress)
    }

    /// Has it noted which process begins a connection at a sandbox's own end. In the calling thread's namespace.
    pub(crate) fn watch(&self, device: u32) -> Result<()> {
        attach(&self.observer, "observe", device, Side::Egress)
    }

    /// A descriptor that is readable while there are events.
    pub fn events_fd(&self) -> i32 {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).as_raw_fd()
    }

    /// Takes up to `most` events, oldest first.
    pub fn drain(&self, most: usize) -> Vec<Vec<u8>> {
        let mut ring = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::new();
        while found.len() < most {
            match ring.next() {
                Some(event) => found.push(event.to_vec()),
                None => break,
            }
        }
        found
    }
}
