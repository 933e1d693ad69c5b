//! One request to a store: read, decode, check, write; again where that helps.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::gauge::MOST;
use crate::layer::Layer;
use crate::shared::{lock, Counter};
use crate::source::{pieces, Job, Source};
use crate::store::StoreError;
use dsec_pages::format::{sha256, Place, MAX_CHUNK};

/// Times that a chunk is asked for when what comes is wrong or missing.
const ATTEMPTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// However well a store serves others, no chunk is tried for longer than this many times the layer's time.
const PATIENCE: u32 = 4;
/// Bytes of packs in memory at once, over all stores.
const IN_FLIGHT: u64 = 64 * 1024 * 1024;

/// What of a buffer a thread keeps between requests.
const KEPT: usize = 512 * 1024;

static BUDGET: Budget = Budget {
    free: Mutex::new(IN_FLIGHT),
    freed: Condvar::new(),
};

struct Budget {
    free: Mutex<u64>,
    freed: Condvar,
}

struct Held(u64);

impl Budget {
    fn take(&self, bytes: u64) -> Held {
        let short = |free: &mut u64| *free < bytes;
        let mut free = self
            .freed
            .wait_while(lock(&self.free), short)
            .unwrap_or_else(PoisonError::into_inner);
        *free -= bytes;
        Held(bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *lock(&BUDGET.free) += self.0;
        BUDGET.freed.notify_all();
    }
}

/// What a thread keeps between requests.
#[derive(Default)]
pub struct Scratch {
    stored: Vec<u8>,
    plain: Vec<u8>,
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Scratch {
    /// The bytes of a chunk of `size` as they are stored; None where they cannot be it.
    fn plain(&mut self, at: usize, place: &Place, size: usize) -> Option<&[u8]> {
        let stored = self.stored.get(at..at + place.length as usize)?;
        if !place.compressed {
            return (stored.len() == size).then_some(stored);
        }
        if self.zstd.is_none() {
            self.zstd = zstd::bulk::Decompressor::new().ok();
        }
        self.plain.resize(MAX_CHUNK as usize, 0);
        let room = self.plain.get_mut(..size)?;
        let got = self.zstd.as_mut()?.decompress_to_buffer(stored, room).ok()?;
        (got == size).then(|| &self.plain[..size])
    }
}

/// Why chunks of a request are not here yet.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Trouble {
    Wrong,
    Away,
}

/// Carries a job out to its end: each of its chunks has come or failed, and whoever waits for it knows.
pub fn run(job: &Job, scratch: &mut Scratch) {
    fetch(job, scratch);
    scratch.stored.truncate(KEPT);
    scratch.stored.shrink_to(KEPT);
    job.layer.settled();
}

fn fetch(job: &Job, scratch: &mut Scratch) {
    let began = Instant::now();
    let layer = &job.layer;
    let mut left = job.chunks.clone();
    left.retain(|chunk| !found(layer, *chunk));
    let (mut wrong, mut pause) = (0, FIRST_PAUSE);
    while !left.is_empty() {
        // Asked for each time: the server may have named another store meanwhile.
        let source = &layer.source();
        let (missing, trouble) = attempt(source, job, left, scratch);
        left = missing;
        if left.is_empty() {
            return;
        }
        wrong += u32::from(trouble == Trouble::Wrong);
        if wrong >= ATTEMPTS || is_over(source, layer, began) {
            left.drain(..).for_each(|chunk| layer.failed(chunk));
            return;
        }
        if trouble == Trouble::Away {
            source.pause(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        layer.count(Counter::Refetched, left.len() as u64);
    }
}

/// Whether a store has stayed away for the layer's time: since the job began and since it last gave anything.
fn is_over(source: &Source, layer: &Layer, began: Instant) -> bool {
    let limit = Duration::from_secs_f64(layer.limits.wait_seconds);
    let waited = began.elapsed();
    let silent = source.silent().map_or(waited, |silent| silent.min(waited));
    silent >= limit || waited >= limit * PATIENCE
}

/// A chunk that the disk has from before the host went down needs no fetch if it is right.
fn found(layer: &Layer, chunk: u32) -> bool {
    let here = layer.doubtful(chunk) && layer.check(chunk);
    if here {
        layer.arrived(chunk);
    }
    here
}

/// Asks once for each run of `chunks`; gives those that did not come, and the lesser trouble.
fn attempt(source: &Source, job: &Job, chunks: Vec<u32>, scratch: &mut Scratch) -> (Vec<u32>, Trouble) {
    let layer = &job.layer;
    let mut missing = Vec::new();
    let mut trouble = Trouble::Away;
    for piece in pieces(layer, chunks, MOST) {
        match read(source, layer, &piece.chunks, scratch) {
            Ok((start, _held)) => {
                for chunk in piece.chunks {
                    if !accept(layer, chunk, start, scratch) {
                        trouble = Trouble::Wrong;
                        missing.push(chunk);
                    }
                }
            }
            Err(error) => {
                layer.count(Counter::StoreErrors, 1);
                if matches!(error, StoreError::Missing(_)) {
                    trouble = Trouble::Wrong;
                }
                missing.extend(piece.chunks);
            }
        }
    }
    (missing, trouble)
}

/// Reads a run of chunks into the scratch; gives the offset in the pack that it begins at, and the hold on memory.
fn read(source: &Source, layer: &Layer, chunks: &[u32], scratch: &mut Scratch) -> Result<(u64, Held), StoreError> {
    let bad = || StoreError::Missing("the map has no place for the chunk".to_owned());
    let places = || chunks.iter().filter_map(|chunk| layer.files.place(*chunk));
    let start = places().map(|p| p.offset).min().ok_or_else(bad)?;
    let end = places().map(|p| p.offset + p.length).max().ok_or_else(bad)?;
    let pack = places().next().and_then(|p| layer.files.pack(p.pack)).ok_or_else(bad)?;
    let length = u64::from(end - start).min(MOST + u64::from(MAX_CHUNK) * 2);
    let held = BUDGET.take(length);
    scratch.stored.resize(length as usize, 0);
    let asked = Instant::now();
    source.store().read(&pack, start.into(), &mut scratch.stored)?;
    source.observe(length, asked.elapsed());
    layer.count(Counter::Fetches, 1);
    layer.count(Counter::BytesFetched, length);
    Ok((start.into(), held))
}

/// Checks a chunk of what was read and, if it is right, writes it and lets its readers on.
fn accept(layer: &Layer, chunk: u32, start: u64, scratch: &mut Scratch) -> bool {
    let size = layer.size(chunk) as usize;
    let Some(place) = layer.files.place(chunk).filter(|p| !p.is_zeros()) else {
        return false;
    };
    let at = u64::from(place.offset).saturating_sub(start) as usize;
    let right = scratch
        .plain(at, &place, size)
        .filter(|plain| sha256(plain) == layer.files.hash(chunk));
    let Some(plain) = right else {
        layer.count(Counter::WrongBytes, 1);
        return false;
    };
    if let Err(error) = layer.fill(chunk, plain) {
        eprintln!("dsec-pager: layer {}: cannot write chunk {chunk}: {error}", layer.hex);
        layer.failed(chunk);
    }
    true
}
