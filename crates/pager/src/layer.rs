//! One attached layer: which chunks are here, which are on their way, and who waits for them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};

use crate::desk::{Desk, Pending};
use crate::files::{Files, Sets};
use crate::shared::{lock, Counter};
use crate::source::Source;
use dsec_pages::format::{sha256, Hash, BLOCK, MAX_CHUNK};
use dsec_pages::wire::{Limits, Mechanism};

/// The hashes of zeros, by blocks.
static ZEROS: OnceLock<Vec<Hash>> = OnceLock::new();

fn zeros() -> Vec<Hash> {
    let zeros = vec![0; MAX_CHUNK as usize];
    let most = u64::from(MAX_CHUNK) / BLOCK;
    (0..=most).map(|n| sha256(&zeros[..(n * BLOCK) as usize])).collect()
}

/// Streams of reads that are told apart when reading ahead.
const STREAMS: usize = 16;

/// What is on its way, and the readers' habits.
#[derive(Default)]
struct Flow {
    coming: HashMap<u32, Vec<Arc<Pending>>>,
    /// Chunk numbers right behind the last reads of each stream.
    streams: Vec<u32>,
    trace: Option<Trace>,
}

#[derive(Default)]
struct Trace {
    seen: HashSet<u32>,
    order: Vec<u32>,
}

pub struct Layer {
    pub slot: usize,
    pub hex: String,
    pub mechanism: Mechanism,
    pub limits: Limits,
    pub files: Files,
    pub data: Arc<File>,
    pub source: RwLock<Arc<Source>>,
    pub running: AtomicUsize,
    pub whole: AtomicBool,
    /// Whether the kernel was told to ask before anything could mount the data: then it will, whenever it is told again.
    pub watched_from_start: bool,
    /// Times that something was taken away.
    evictions: AtomicU64,
    desk: Arc<Desk>,
    sets: Sets,
    present: AtomicU32,
    present_bytes: AtomicU64,
    /// Seconds since `born`, plus one, at which a chunk was last asked for.
    touched: Vec<AtomicU32>,
    /// The same of when its bytes in the data file were last known to be right.
    checked: Vec<AtomicU32>,
    born: Instant,
    flow: Mutex<Flow>,
    /// Held by who looks whether chunks are here and marks them touched; exclusively by who takes some away.
    gate: RwLock<()>,
}

/// What `Layer::new` is made of.
pub struct Parts {
    pub slot: usize,
    pub hex: String,
    pub mechanism: Mechanism,
    pub limits: Limits,
    pub files: Files,
    pub data: File,
    pub source: Arc<Source>,
    pub sets: Sets,
    pub watched_from_start: bool,
}

impl Layer {
    pub fn new(desk: Arc<Desk>, parts: Parts) -> Self {
        let count = parts.files.chunks.len();
        let layer = Self {
            slot: parts.slot,
            hex: parts.hex,
            mechanism: parts.mechanism,
            limits: parts.limits,
            files: parts.files,
            data: Arc::new(parts.data),
            source: RwLock::new(parts.source),
            running: AtomicUsize::new(0),
            whole: AtomicBool::new(parts.sets.whole),
            watched_from_start: parts.watched_from_start,
            evictions: AtomicU64::new(0),
            desk,
            sets: parts.sets,
            present: AtomicU32::new(0),
            present_bytes: AtomicU64::new(0),
            touched: (0..count).map(|_| AtomicU32::new(0)).collect(),
            checked: (0..count).map(|_| AtomicU32::new(0)).collect(),
            born: Instant::now(),
            flow: Mutex::default(),
            gate: RwLock::new(()),
        };
        layer.learn_present();
        layer
    }

    /// Counts what is here; a chunk of zeros always is, as a hole.
    fn learn_present(&self) {
        let present = &self.sets.present;
        let hashes = ZEROS.get_or_init(zeros);
        for chunk in 0..self.files.chunks.len() {
            let blocks = self.size(chunk) / BLOCK;
            if hashes.get(blocks as usize) == Some(&self.files.hash(chunk)) {
                present.set(chunk);
            }
        }
        let (mut count, mut bytes) = (0, 0);
        for chunk in present.iter() {
            count += 1;
            bytes += self.size(chunk);
        }
        self.present.store(count, Relaxed);
        self.present_bytes.store(bytes, Relaxed);
    }

    pub fn size(&self, chunk: u32) -> u64 {
        let bytes = self.files.chunks.bytes(chunk);
        bytes.end - bytes.start
    }

    pub fn source(&self) -> Arc<Source> {
        let source = self.source.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        Arc::clone(&source)
    }

    pub fn has(&self, chunk: u32) -> bool {
        self.sets.present.has(chunk)
    }

    /// Whether the chunk may be here from before the host went down, and is to be checked.
    pub fn doubtful(&self, chunk: u32) -> bool {
        self.sets.doubt.has(chunk)
    }

    pub fn count(&self, counter: Counter, more: u64) {
        self.desk.shared.count(self.slot, counter, more);
    }

    /// Chunks and bytes that are here.
    pub fn here(&self) -> (u32, u64) {
        (self.present.load(Acquire), self.present_bytes.load(Acquire))
    }

    pub fn all_here(&self) -> bool {
        self.present.load(Acquire) == self.files.chunks.len()
    }

    fn now(&self) -> u32 {
        self.born.elapsed().as_secs() as u32 + 1
    }

    fn touch(&self, chunks: Range<u32>) {
        let now = self.now();
        for cell in self
            .touched
            .iter()
            .take(chunks.end as usize)
            .skip(chunks.start as usize)
        {
            cell.store(now, Relaxed);
        }
    }

    /// Checks the chunks that are here and were not checked lately; one that the local disk spoilt is not here any more.
    fn distrust(&self, chunks: Range<u32>) {
        for chunk in chunks.filter(|chunk| self.has(*chunk)) {
            let Some(checked) = self.checked.get(chunk as usize) else {
                return;
            };
            let (last, now) = (checked.load(Relaxed), self.now());
            if last > 0 && f64::from(now - last) <= self.limits.check_seconds && self.limits.check_seconds > 0.0 {
                continue;
            }
            if self.check(chunk) {
                checked.store(now, Relaxed);
                continue;
            }
            let _alone = self.gate.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            // Again, since it may have been evicted, or fetched anew, while it was looked at.
            if self.has(chunk) && !self.check(chunk) {
                self.count(Counter::LocalWrong, 1);
                self.forget(chunk);
            }
        }
    }

    /// The chunk is not here any more.
    fn forget(&self, chunk: u32) -> bool {
        let was = self.sets.present.clear(chunk);
        if was {
            self.evictions.fetch_add(1, AcqRel);
            self.present.fetch_sub(1, AcqRel);
            self.present_bytes.fetch_sub(self.size(chunk), AcqRel);
        }
        was
    }

    /// Takes a question in: answers it if its chunks are here, else lets it wait, and gives the chunks to fetch for it.
    pub fn ask(&self, pending: &Arc<Pending>) -> Vec<u32> {
        let question = &pending.question;
        let chunks = self.files.chunks.covering(question.offset, question.count);
        self.distrust(chunks.clone());
        let gate = self.gate.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.touch(chunks.clone());
        self.count(Counter::Events, 1);
        let mut flow = lock(&self.flow);
        if let Some(trace) = &mut flow.trace {
            let new: Vec<u32> = chunks.clone().filter(|c| trace.seen.insert(*c)).collect();
            trace.order.extend(new);
        }
        let mut claimed = Vec::new();
        let mut waits = false;
        for chunk in chunks.clone().filter(|c| !self.has(*c)) {
            pending.more();
            waits = true;
            flow.coming
                .entry(chunk)
                .or_insert_with(|| {
                    claimed.push(chunk);
                    Vec::new()
                })
                .push(Arc::clone(pending));
        }
        let ahead = self.read_ahead(&mut flow, &chunks, !claimed.is_empty());
        claimed.extend(ahead);
        drop((flow, gate));
        if !waits {
            self.count(Counter::Hits, 1);
        }
        pending.less(true);
        claimed
    }

    /// The chunks behind `asked` that are worth fetching with them, for a stream of reads from a far store; claims them.
    fn read_ahead(&self, flow: &mut Flow, asked: &Range<u32>, missing: bool) -> Vec<u32> {
        let known = flow
            .streams
            .iter()
            .position(|next| asked.contains(next) || asked.end == *next);
        if let Some(at) = known {
            flow.streams.remove(at);
        } else if flow.streams.len() == STREAMS {
            flow.streams.remove(0);
        }
        flow.streams.push(asked.end);
        let ideal = self.source().ideal();
        if known.is_none() || !missing || ideal == 0 {
            return Vec::new();
        }
        let mut bytes: u64 = asked.clone().map(|c| self.size(c)).sum();
        let mut ahead = Vec::new();
        for chunk in asked.end..self.files.chunks.len() {
            bytes += self.size(chunk);
            if bytes > ideal {
                break;
            }
            if !self.has(chunk) && !flow.coming.contains_key(&chunk) {
                flow.coming.insert(chunk, Vec::new());
                ahead.push(chunk);
            }
        }
        ahead
    }

    /// Claims a chunk for a fetch that nobody waits for; false where it is here or on its way.
    pub fn claim(&self, chunk: u32) -> bool {
        let mut flow = lock(&self.flow);
        if chunk >= self.files.chunks.len() || self.has(chunk) || flow.coming.contains_key(&chunk) {
            return false;
        }
        flow.coming.insert(chunk, Vec::new());
        true
    }

    /// The bytes of a claimed chunk, checked before: writes them and lets the readers on.
    ///
    /// # Errors
    /// What the local disk says; the chunk is still claimed then.
    pub fn fill(&self, chunk: u32, bytes: &[u8]) -> std::io::Result<()> {
        self.data.write_all_at(bytes, self.files.chunks.bytes(chunk).start)?;
        self.count(Counter::BytesFilled, bytes.len() as u64);
        self.count(Counter::ChunksFilled, 1);
        self.arrived(chunk);
        Ok(())
    }

    /// A claimed chunk is in the data file.
    pub fn arrived(&self, chunk: u32) {
        if self.sets.present.set(chunk) {
            self.present.fetch_add(1, AcqRel);
            self.present_bytes.fetch_add(self.size(chunk), AcqRel);
        }
        self.sets.doubt.clear(chunk);
        if let Some(checked) = self.checked.get(chunk as usize) {
            checked.store(self.now(), Relaxed);
        }
        self.finish(chunk, true);
    }

    /// A claimed chunk cannot be had.
    pub fn failed(&self, chunk: u32) {
        self.finish(chunk, false);
    }

    fn finish(&self, chunk: u32, good: bool) {
        let gate = self.gate.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let waiting = lock(&self.flow).coming.remove(&chunk).unwrap_or_default();
        if !waiting.is_empty() {
            self.touch(chunk..chunk + 1);
        }
        drop(gate);
        for pending in waiting {
            pending.waited();
            pending.less(good);
        }
    }

    /// Reads what the data file has of a chunk and says whether it is right.
    pub fn check(&self, chunk: u32) -> bool {
        let bytes = self.files.chunks.bytes(chunk);
        let mut found = vec![0; (bytes.end - bytes.start) as usize];
        self.data.read_exact_at(&mut found, bytes.start).is_ok() && sha256(&found) == self.files.hash(chunk)
    }

    /// Lets go, with an error, of readers that waited for the layer's time while its store gave nothing for as long.
    pub fn let_go(&self) {
        let limit = Duration::from_secs_f64(self.limits.wait_seconds);
        let silent = self.source().silent();
        let is_late = |waited: Duration| waited > limit && silent.is_none_or(|silent| silent > limit);
        let late: Vec<Arc<Pending>> = {
            let flow = lock(&self.flow);
            let waiting = flow.coming.values().flatten().filter(|p| is_late(p.since.elapsed()));
            waiting.cloned().collect()
        };
        late.iter().for_each(|pending| pending.refuse());
    }

    /// Lets go, with an error, of all that wait.
    pub fn refuse_all(&self) {
        let waiting: Vec<Arc<Pending>> = lock(&self.flow).coming.values().flatten().cloned().collect();
        waiting.iter().for_each(|pending| pending.refuse());
    }

    /// Tells who makes layers whole, if this one may be.
    pub fn settled(&self) {
        if self.all_here() && !self.whole.load(Acquire) {
            self.desk.ring();
        }
    }

    pub fn is_busy(&self) -> bool {
        !lock(&self.flow).coming.is_empty()
    }

    /// Punches holes for the chunks of `ranges` that are here, on nobody's way and not asked for within `quiet`. Bytes freed.
    ///
    /// # Errors
    /// What the local disk says; what was freed before is.
    pub fn evict(&self, ranges: &[(u32, u32)], quiet: Duration) -> std::io::Result<u64> {
        use rustix::fs::{fallocate, FallocateFlags};
        let present = &self.sets.present;
        let mut freed = 0;
        for chunk in ranges
            .iter()
            .flat_map(|(from, to)| *from..(*to).min(self.files.chunks.len()))
        {
            let place = self.files.place(chunk);
            if place.is_none_or(|p| p.is_zeros()) || !present.has(chunk) {
                continue;
            }
            let gate = self.gate.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            let now = u64::from(self.now());
            let last = u64::from(self.touched.get(chunk as usize).map_or(0, |t| t.load(Relaxed)));
            if (last > 0 && now - last < quiet.as_secs()) || lock(&self.flow).coming.contains_key(&chunk) {
                continue;
            }
            if self.forget(chunk) {
                let bytes = self.files.chunks.bytes(chunk);
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&*self.data, how, bytes.start, bytes.end - bytes.start)?;
                freed += bytes.end - bytes.start;
            }
            drop(gate);
        }
        self.count(Counter::Evicted, freed);
        Ok(freed)
    }

    /// Begins a trace, goes on with the one there is, or ends it; gives the order of first touches since it was begun.
    pub fn trace(&self, on: bool) -> Vec<u32> {
        let mut flow = lock(&self.flow);
        let trace = flow.trace.take().unwrap_or_default();
        let order = trace.order.clone();
        flow.trace = on.then_some(trace);
        order
    }

    /// Brings a layer that has all its chunks to the disk; gives what `become_whole` wants to know.
    ///
    /// # Errors
    /// What the local disk says.
    pub fn settle(&self) -> std::io::Result<Option<u64>> {
        let evictions = self.evictions.load(Acquire);
        if self.whole.load(Acquire) || !self.all_here() {
            return Ok(None);
        }
        self.data.sync_data()?;
        Ok(Some(evictions))
    }

    /// Calls the layer whole, on the disk too, unless something was taken away since `settle`. Whether it now is and was not.
    ///
    /// # Errors
    /// What the local disk says.
    pub fn become_whole(&self, evictions: u64) -> std::io::Result<bool> {
        let _alone = self.gate.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !self.all_here() || self.evictions.load(Acquire) != evictions || self.whole.load(Acquire) {
            return Ok(false);
        }
        self.files.declare(true)?;
        self.whole.store(true, SeqCst);
        Ok(true)
    }

    /// Says that some of a whole layer may be taken away; the kernel asks about it again by now.
    ///
    /// # Errors
    /// What the local disk says.
    pub fn become_partial(&self) -> std::io::Result<()> {
        self.files.declare(false)?;
        self.whole.store(false, SeqCst);
        Ok(())
    }
}
