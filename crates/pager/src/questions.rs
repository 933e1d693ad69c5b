//! Taking the kernel's questions. A thread that takes some hands the taking on to another before it works on them, so that a
//! question whose answer is here never waits behind one whose answer is not.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use dsec_sys::{range_events, RangeEvent};
use rustix::fs::{Mode, OFlags};

use crate::desk::{told, Pending};
use crate::engine::Engine;
use crate::fetch::Scratch;
use crate::fuse::{self, Asked, Code, FIRST_NODE};
use crate::layer::Layer;
use crate::shared::{lock, Asker, Cell, Counter, Question};
use dsec_pages::format::unhex;

/// Questions taken at once: neighbouring ones become one request.
const BATCH: usize = 16;
/// Workers that may die over one question before it is answered with an error.
const MAX_TRIES: u64 = 3;
const ROOM_PAUSE: Duration = Duration::from_millis(1);

/// Threads that wait to take questions of one kind.
struct Desks {
    engine: Arc<Engine>,
    asker: Asker,
    taking: Mutex<()>,
    idle: AtomicUsize,
}

/// Begins to take questions of one kind.
pub fn serve(engine: &Arc<Engine>, asker: Asker) {
    let desks = Arc::new(Desks {
        engine: Arc::clone(engine),
        asker,
        taking: Mutex::new(()),
        idle: AtomicUsize::new(0),
    });
    another(&desks);
}

fn another(desks: &Arc<Desks>) {
    let desks = Arc::clone(desks);
    desks.idle.fetch_add(1, SeqCst);
    let builder = thread::Builder::new()
        .name("questions".to_owned())
        .stack_size(512 * 1024);
    let theirs = Arc::clone(&desks);
    if builder.spawn(move || take_for_ever(&theirs)).is_err() {
        desks.idle.fetch_sub(1, SeqCst);
    }
}

fn take_for_ever(desks: &Arc<Desks>) {
    let mut scratch = Scratch::default();
    loop {
        let asked = take(desks);
        if asked.is_none() && desks.asker == Asker::Fuse {
            // Unmounted: the others see it too.
            return;
        }
        // The last one that waited hands over to a new one; those that come back are used before more are made.
        if desks.idle.fetch_sub(1, SeqCst) == 1 {
            another(desks);
        }
        if let Some(asked) = asked {
            answer(&desks.engine, &asked, &mut scratch);
        }
        desks.idle.fetch_add(1, SeqCst);
    }
}

/// A question with the layer that it is about.
type Taken = (Question, usize, Option<Arc<Layer>>);

/// The next questions, noted where a next worker finds them. None where the kernel will ask no more.
fn take(desks: &Arc<Desks>) -> Option<Vec<Taken>> {
    let _one = lock(&desks.taking);
    let engine = &desks.engine;
    let shared = &engine.desk.shared;
    while shared.room() < 2 * BATCH {
        // All places are taken: the kernel keeps the rest, and some are given free by answers.
        thread::park_timeout(ROOM_PAUSE);
    }
    match desks.asker {
        Asker::Fanotify => {
            let group = engine.desk.group()?;
            match shared.take(Asker::Fanotify, group.as_fd(), BATCH) {
                Ok(bytes) => Some(
                    range_events(&bytes)
                        .iter()
                        .filter_map(|e| note_event(engine, e))
                        .collect(),
                ),
                Err(error) => {
                    if error.errno != libc::EINTR {
                        eprintln!("dsec-pager: taking events: {error}");
                        thread::park_timeout(ROOM_PAUSE);
                    }
                    Some(Vec::new())
                }
            }
        }
        Asker::Fuse => {
            let device = engine.desk.fuse()?;
            match shared.take(Asker::Fuse, device.as_fd(), 1) {
                Ok(bytes) => Some(note_request(engine, &bytes).into_iter().collect()),
                // Unmounted.
                Err(error) if error.errno == libc::ENODEV => None,
                Err(_) => Some(Vec::new()),
            }
        }
    }
}

fn note_event(engine: &Engine, event: &RangeEvent) -> Option<Taken> {
    let desk = &engine.desk;
    let layer = engine.by_descriptor(event.fd);
    let slot = layer.as_ref().map_or(usize::MAX, |layer| layer.slot);
    let question = Question {
        asker: Asker::Fanotify,
        ident: event.fd as u64,
        layer: slot,
        offset: event.offset,
        count: event.count,
        tries: 0,
    };
    if layer.is_none() {
        // No layer's: let go of, or of a worker that could not take it over. Nothing is known to be right about it.
        desk.refuse(&question, None);
        return None;
    }
    let place = desk.shared.note(&question)?;
    Some((question, place, layer))
}

fn answer(engine: &Engine, taken: &[Taken], scratch: &mut Scratch) {
    let mut wanted: Vec<(Arc<Layer>, Vec<u32>)> = Vec::new();
    for (question, place, layer) in taken {
        let Some(layer) = layer else { continue };
        let pending = Pending::new(Arc::clone(&engine.desk), Arc::clone(&layer.data), *place, *question);
        let claimed = layer.ask(&pending);
        if claimed.is_empty() {
            continue;
        }
        match wanted.iter_mut().find(|(known, _)| Arc::ptr_eq(known, layer)) {
            Some((_, chunks)) => chunks.extend(claimed),
            None => wanted.push((Arc::clone(layer), claimed)),
        }
    }
    for (layer, chunks) in wanted {
        layer.source().fetch(&layer, chunks, scratch);
    }
}

/// Works on what a worker before this one took and did not answer.
pub fn resume(engine: &Arc<Engine>) {
    let shared = &engine.desk.shared;
    let mut kept: HashSet<RawFd> = shared
        .kept_layers()
        .iter()
        .flat_map(|(_, k)| [k.data, k.request])
        .collect();
    kept.extend(
        [Cell::Group, Cell::Listener, Cell::Lock, Cell::Fuse]
            .iter()
            .filter_map(|c| shared.descriptor(*c)),
    );
    let noted = shared.noted();
    let known: HashSet<u64> = noted.iter().map(|(_, q)| q.ident).collect();
    let mut taken: Vec<Taken> = Vec::new();
    for (place, question) in noted {
        let layer = engine.by_slot(question.layer).filter(|_| question.tries <= MAX_TRIES);
        match layer {
            Some(layer) => taken.push((question, place, Some(layer))),
            None => engine.desk.refuse(&question, Some(place)),
        }
    }
    // Taken, but its taker died before it could note it. An answer to one that was answered harms nobody.
    for event in range_events(&shared.taken(Asker::Fanotify)) {
        let open = rustix::fs::fstat(dsec_sys::borrow(event.fd)).is_ok();
        if open && !kept.contains(&event.fd) && !known.contains(&(event.fd as u64)) {
            taken.extend(note_event(engine, &event));
        }
    }
    if engine.desk.fuse().is_some() {
        let request = shared.taken(Asker::Fuse);
        let again = Asked::parse(&request).is_some_and(|asked| !known.contains(&asked.unique));
        if again {
            taken.extend(note_request(engine, &request));
        }
    }
    let engine = Arc::clone(engine);
    // Each by a thread's own work, so that one whose store is away holds up no other.
    for one in taken {
        let engine = Arc::clone(&engine);
        thread::spawn(move || answer(&engine, &[one], &mut Scratch::default()));
    }
}

/// Answers a FUSE request that needs no chunk; notes a read.
fn note_request(engine: &Engine, bytes: &[u8]) -> Option<Taken> {
    let asked = Asked::parse(bytes)?;
    let device = engine.desk.fuse()?;
    let layer = asked
        .node
        .checked_sub(FIRST_NODE)
        .and_then(|slot| engine.by_slot(slot as usize));
    let size = |layer: &Layer| layer.files.chunks.data_bytes();
    let opens = |layer: &Layer, more: u64| engine.desk.shared.count(layer.slot, Counter::Opens, more);
    let sent = match (asked.code, &layer) {
        (Some(Code::Forget | Code::BatchForget | Code::Interrupt | Code::Destroy), _) => Ok(()),
        (Some(Code::Init), _) => fuse::answer_init(device, &asked),
        (Some(Code::Statfs), _) => fuse::answer_statfs(device, asked.unique),
        (Some(Code::Lookup), _) => look_up(engine, &asked),
        (Some(Code::Getattr), None) if asked.node < FIRST_NODE => {
            fuse::answer_attributes(device, asked.unique, asked.node, None)
        }
        (Some(Code::Getattr), Some(layer)) => {
            fuse::answer_attributes(device, asked.unique, asked.node, Some(size(layer)))
        }
        (Some(Code::Open), Some(layer)) => {
            // Counted once it is taken: a worker after this one may answer it again.
            fuse::answer_open(device, asked.unique).map(|()| opens(layer, 1))
        }
        (Some(Code::Release), _) => {
            let sent = fuse::answer_empty(device, asked.unique);
            sent.map(|()| layer.iter().for_each(|layer| opens(layer, u64::MAX)))
        }
        (Some(Code::Flush), _) => fuse::answer_empty(device, asked.unique),
        (Some(Code::Read), Some(layer)) => {
            let (offset, count) = asked.range();
            let question = Question {
                asker: Asker::Fuse,
                ident: asked.unique,
                layer: layer.slot,
                offset,
                count,
                tries: 0,
            };
            let place = engine.desk.shared.note(&question)?;
            return Some((question, place, Some(Arc::clone(layer))));
        }
        (None, _) => fuse::answer_error(device, asked.unique, libc::ENOSYS),
        (_, None) => fuse::answer_error(device, asked.unique, libc::ENOENT),
    };
    told(sent);
    None
}

fn look_up(engine: &Engine, asked: &Asked<'_>) -> Result<(), i32> {
    let Some(device) = engine.desk.fuse() else {
        return Ok(());
    };
    let hex = std::str::from_utf8(asked.name()).unwrap_or("");
    match (engine.layer(hex), unhex(hex)) {
        (Ok(layer), Some(hash)) => {
            let generation = hash[..8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            let node = layer.slot as u64 + FIRST_NODE;
            fuse::answer_entry(device, asked.unique, node, generation, layer.files.chunks.data_bytes())
        }
        _ => fuse::answer_error(device, asked.unique, libc::ENOENT),
    }
}

static MOUNTING: OnceLock<Mutex<()>> = OnceLock::new();

/// Mounts the file system of data files, once.
pub fn mount_fuse(engine: &Arc<Engine>, target: &Path) -> dsec_sys::Result<()> {
    let desk = &engine.desk;
    let _one = lock(MOUNTING.get_or_init(Mutex::default));
    if desk.fuse().is_some() {
        return Ok(());
    }
    let os = |op: &'static str| move |e: std::io::Error| dsec_sys::Error::from_io(op, target, &e);
    std::fs::create_dir_all(target).map_err(os("mkdir"))?;
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR, Mode::empty()).map_err(|e| os("open")(e.into()))?;
    let options = format!(
        "fd={},rootmode=40555,user_id=0,group_id=0,allow_other",
        device.as_raw_fd()
    );
    let flags = libc::MS_RDONLY | libc::MS_NODEV | libc::MS_NOSUID | libc::MS_NOEXEC;
    dsec_sys::mount(
        "dsec-pager",
        &target.to_string_lossy(),
        "fuse.dsec-pager",
        flags,
        &options,
    )?;
    desk.shared.set_descriptor(Cell::Fuse, device.as_raw_fd());
    let number = device.into_raw_fd();
    desk.set_fuse(dsec_sys::adopt(number)?);
    serve(engine, Asker::Fuse);
    Ok(())
}
