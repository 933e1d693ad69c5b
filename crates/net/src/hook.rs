//! The programs that judge and watch sandboxes' packets, and the events they write.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use aya::maps::{Map, MapData, RingBuf};
use aya::programs::tc::{qdisc_add_clsact, NlOptions, SchedClassifier, TcAttachOptions, TcAttachType};
use aya::{include_bytes_aligned, Btf, Ebpf, EbpfLoader};
use dsec_sys::{Error, Result};

static POLICY: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/policy.bpf.o"));
static OBSERVE: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/observe.bpf.o"));

/// The loaded programs. Their maps are pinned, and outlive them; so do the devices that they hang on.
pub struct Hook {
    policy: Mutex<Ebpf>,
    observer: Mutex<Ebpf>,
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

/// Hangs a program on a device of the calling thread's namespace, which holds it until the device goes.
fn attach(programs: &Mutex<Ebpf>, name: &str, device: &str, side: TcAttachType) -> Result<()> {
    let mut programs = programs.lock().unwrap_or_else(PoisonError::into_inner);
    let failed = |e: aya::programs::ProgramError| named("bpf attach", &e);
    let program: &mut SchedClassifier = programs
        .program_mut(name)
        .ok_or_else(|| Error::new("bpf attach", name, libc::ENOENT))?
        .try_into()
        .map_err(failed)?;
    // Not by tcx: the kernel waits there for all CPUs at each attachment, while nobody else can change a network.
    let way = TcAttachOptions::Netlink(NlOptions::default());
    let id = program.attach_with_options(device, side, way).map_err(failed)?;
    // Its end would take the program off the device.
    std::mem::forget(program.take_link(id).map_err(failed)?);
    Ok(())
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
            policy: Mutex::new(policy),
            observer: Mutex::new(observer),
            events: Mutex::new(events),
        })
    }

    /// Has what passes a device judged: what comes from the sandbox, and what goes to it. In the calling thread's namespace.
    pub(crate) fn judge(&self, device: &str) -> Result<()> {
        qdisc_add_clsact(device).map_err(|e| named("clsact", &e))?;
        attach(&self.policy, "from_sandbox", device, TcAttachType::Ingress)?;
        attach(&self.policy, "to_sandbox", device, TcAttachType::Egress)
    }

    /// Has it noted which process begins a connection at a sandbox's own end. In the calling thread's namespace.
    pub(crate) fn watch(&self, device: &str) -> Result<()> {
        qdisc_add_clsact(device).map_err(|e| named("clsact", &e))?;
        attach(&self.observer, "observe", device, TcAttachType::Egress)
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
