//! A store in use: what is to be fetched from it, by how many threads, in which pieces.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::fetch::{self, Scratch};
use crate::gauge::{Gauge, MOST};
use crate::layer::Layer;
use crate::shared::lock;
use crate::store::Store;

/// Requests at once to one store.
const THREADS: usize = 16;
/// Of them, at most for what nobody waits for.
const BACKGROUND: usize = 12;
/// Chunks of a feed that are looked at to make requests of.
const WINDOW: usize = 256;
/// Bytes of a pack that are read in vain rather than by another request.
const GAP: u32 = 4096;

/// Chunks to fetch, claimed, that lie one behind the other in one pack.
pub struct Job {
    pub layer: Arc<Layer>,
    pub chunks: Vec<u32>,
}

/// Chunks that are wanted when there is time: by a profile, or all of a layer. Not claimed.
struct Feed {
    layer: Arc<Layer>,
    chunks: VecDeque<u32>,
    depth: usize,
    running: usize,
    number: u64,
}

#[derive(Default)]
struct Work {
    demand: VecDeque<Job>,
    feeds: VecDeque<Feed>,
    running: usize,
    background: usize,
    threads: usize,
    /// Threads that wait for a ticket, those just started among them.
    idle: usize,
    /// Reasons to look for work that no thread has taken up yet.
    tickets: usize,
    fed: u64,
}

enum Next {
    Demand(Job),
    Background(Job, u64),
}

pub struct Source {
    pub url: String,
    store: RwLock<Arc<dyn Store>>,
    gauge: Mutex<Gauge>,
    ideal: AtomicU64,
    work: Mutex<Work>,
    ready: Condvar,
    /// Raised when other credentials come, so that what waits to try again does at once.
    changed: Condvar,
    changes: Mutex<u64>,
    born: Instant,
    /// Milliseconds after `born` of the last good answer, plus one.
    progress: AtomicU64,
}

impl Source {
    pub fn new(url: String, store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            url,
            store: RwLock::new(store),
            gauge: Mutex::default(),
            ideal: AtomicU64::new(0),
            work: Mutex::default(),
            ready: Condvar::new(),
            changed: Condvar::new(),
            changes: Mutex::default(),
            born: Instant::now(),
            progress: AtomicU64::new(0),
        })
    }

    pub fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn replace(&self, store: Arc<dyn Store>) {
        *self.store.write().unwrap_or_else(PoisonError::into_inner) = store;
        self.wake();
    }

    /// What waits to try again does so at once.
    pub fn wake(&self) {
        *lock(&self.changes) += 1;
        self.changed.notify_all();
    }

    /// Waits for `time`, or until the store was replaced.
    pub fn pause(&self, time: Duration) {
        let changes = lock(&self.changes);
        let before = *changes;
        drop(self.changed.wait_timeout_while(changes, time, |now| *now == before));
    }

    pub fn observe(&self, bytes: u64, took: Duration) {
        let mut gauge = lock(&self.gauge);
        gauge.observe(bytes, took);
        self.ideal.store(gauge.ideal(), Relaxed);
        drop(gauge);
        self.progress
            .store(self.born.elapsed().as_millis() as u64 + 1, Ordering::Release);
    }

    pub fn ideal(&self) -> u64 {
        self.ideal.load(Relaxed)
    }

    /// Seconds a request and seconds a byte, as measured.
    pub fn costs(&self) -> (f64, f64) {
        lock(&self.gauge).costs()
    }

    /// How long ago the store last gave something; None where it never did.
    pub fn silent(&self) -> Option<Duration> {
        let at = self.progress.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.born.elapsed().saturating_sub(Duration::from_millis(at)))
    }

    /// Has claimed chunks fetched; the caller's thread does the first part itself when there is a place for it.
    pub fn fetch(self: &Arc<Self>, layer: &Arc<Layer>, chunks: Vec<u32>, scratch: &mut Scratch) {
        let mut jobs = pieces(layer, chunks, MOST).into_iter();
        let mut mine = None;
        {
            let mut work = lock(&self.work);
            if work.running < THREADS && may_run(layer) {
                mine = jobs.next();
                work.running += usize::from(mine.is_some());
            }
            if mine.is_some() {
                layer.running.fetch_add(1, Relaxed);
            }
            let before = work.demand.len();
            work.demand.extend(jobs);
            let more = work.demand.len() - before;
            self.call(&mut work, more);
        }
        if let Some(job) = mine {
            fetch::run(&job, scratch);
            self.done(&job.layer, None);
        }
    }

    /// Has chunks fetched, in this order, when there is time for it.
    pub fn feed(self: &Arc<Self>, layer: &Arc<Layer>, chunks: impl Iterator<Item = u32>, depth: usize) {
        let mut work = lock(&self.work);
        work.fed += 1;
        let depth = depth.clamp(1, BACKGROUND);
        let feed = Feed {
            layer: Arc::clone(layer),
            chunks: chunks.collect(),
            depth,
            running: 0,
            number: work.fed,
        };
        work.feeds.push_back(feed);
        self.call(&mut work, depth);
    }

    /// Nothing more is fetched for a layer in the background.
    pub fn forget(&self, layer: &Layer) {
        lock(&self.work).feeds.retain(|feed| feed.layer.slot != layer.slot);
    }

    /// Sees to it that threads come for `more` jobs.
    fn call(self: &Arc<Self>, work: &mut Work, more: usize) {
        work.tickets = (work.tickets + more).min(THREADS);
        for _ in 0..more.min(work.idle) {
            self.ready.notify_one();
        }
        while work.threads < THREADS && work.idle < work.tickets {
            let source = Arc::clone(self);
            let thread = thread::Builder::new().name("fetch".to_owned()).stack_size(512 * 1024);
            if thread.spawn(move || source.serve()).is_err() {
                break;
            }
            work.threads += 1;
            work.idle += 1;
        }
    }

    fn next(&self) -> Next {
        let mut work = lock(&self.work);
        let next = pick(&mut work, self.ideal());
        if let Some(next) = next {
            return next;
        }
        work.idle += 1;
        drop(work);
        self.first()
    }

    /// The next job, for a thread that counts as idle.
    fn first(&self) -> Next {
        let mut work = lock(&self.work);
        loop {
            while work.tickets == 0 {
                work = self.ready.wait(work).unwrap_or_else(PoisonError::into_inner);
            }
            work.tickets -= 1;
            if let Some(next) = pick(&mut work, self.ideal()) {
                work.idle -= 1;
                return next;
            }
        }
    }

    fn serve(self: Arc<Self>) {
        let mut scratch = Scratch::default();
        let mut next = self.first();
        loop {
            let (job, feed) = match next {
                Next::Demand(job) => (job, None),
                Next::Background(job, feed) => (job, Some(feed)),
            };
            fetch::run(&job, &mut scratch);
            self.done(&job.layer, feed);
            drop(job);
            next = self.next();
        }
    }

    fn done(self: &Arc<Self>, layer: &Arc<Layer>, feed: Option<u64>) {
        let mut work = lock(&self.work);
        work.running -= 1;
        layer.running.fetch_sub(1, Relaxed);
        if let Some(number) = feed {
            work.background -= 1;
            if let Some(feed) = work.feeds.iter_mut().find(|f| f.number == number) {
                feed.running -= 1;
            }
        }
        if !work.demand.is_empty() || !work.feeds.is_empty() {
            self.call(&mut work, 1);
        }
    }
}

fn may_run(layer: &Layer) -> bool {
    layer.running.load(Relaxed) < layer.limits.concurrency
}

/// Takes the next job there may be, and its place.
fn pick(work: &mut Work, ideal: u64) -> Option<Next> {
    if work.running >= THREADS {
        return None;
    }
    if let Some(at) = work.demand.iter().position(|job| may_run(&job.layer)) {
        let job = work.demand.remove(at).map(|job| gather(work, job))?;
        work.running += 1;
        job.layer.running.fetch_add(1, Relaxed);
        return Some(Next::Demand(job));
    }
    if work.background >= BACKGROUND {
        return None;
    }
    for at in 0..work.feeds.len() {
        let feed = &mut work.feeds[at];
        if feed.running >= feed.depth || !may_run(&feed.layer) {
            continue;
        }
        if let Some(job) = bite(feed, ideal.max(256 * 1024)) {
            feed.running += 1;
            let number = feed.number;
            job.layer.running.fetch_add(1, Relaxed);
            work.running += 1;
            work.background += 1;
            return Some(Next::Background(job, number));
        }
    }
    work.feeds.retain(|feed| !feed.chunks.is_empty() || feed.running > 0);
    None
}

/// Joins to `job` what waits of the same layer right before or behind it in the pack.
fn gather(work: &mut Work, mut job: Job) -> Job {
    let mut at = 0;
    while at < work.demand.len() {
        let other = &work.demand[at];
        if Arc::ptr_eq(&other.layer, &job.layer) {
            let mut both = job.chunks.clone();
            both.extend(&other.chunks);
            let mut joined = pieces(&job.layer, both, MOST);
            if joined.len() == 1 {
                job.chunks = joined.remove(0).chunks;
                work.demand.remove(at);
                at = 0;
                continue;
            }
        }
        at += 1;
    }
    job
}

/// Claims the next chunks of a feed that make one request of at most `most` bytes.
fn bite(feed: &mut Feed, most: u64) -> Option<Job> {
    while let Some(first) = feed.chunks.pop_front() {
        if !feed.layer.claim(first) {
            continue;
        }
        let mut chunks = vec![first];
        let mut looked = 0;
        while looked < WINDOW.min(feed.chunks.len()) {
            let chunk = feed.chunks[looked];
            let mut more = chunks.clone();
            more.push(chunk);
            if pieces(&feed.layer, more.clone(), most).len() == 1 && feed.layer.claim(chunk) {
                chunks = more;
                feed.chunks.remove(looked);
            } else {
                looked += 1;
            }
        }
        return pieces(&feed.layer, chunks, most).pop();
    }
    None
}

/// Cuts chunks into jobs: each a run of one pack, of at most `most` stored bytes (one chunk always is one).
pub fn pieces(layer: &Arc<Layer>, mut chunks: Vec<u32>, most: u64) -> Vec<Job> {
    let key = |chunk: u32| {
        layer
            .files
            .place(chunk)
            .map_or((u32::MAX, 0, 0), |p| (p.pack, p.offset, p.offset + p.length))
    };
    chunks.sort_unstable_by_key(|c| key(*c));
    chunks.dedup();
    let mut jobs: Vec<Job> = Vec::new();
    let (mut pack, mut start, mut end) = (u32::MAX, 0u32, 0u32);
    for chunk in chunks {
        let (in_pack, from, to) = key(chunk);
        let near = in_pack == pack && from >= start && from <= end.saturating_add(GAP);
        if let (true, Some(job)) = (near && u64::from(to.max(end) - start) <= most, jobs.last_mut()) {
            job.chunks.push(chunk);
            end = end.max(to);
        } else {
            jobs.push(Job {
                layer: Arc::clone(layer),
                chunks: vec![chunk],
            });
            (pack, start, end) = (in_pack, from, to);
        }
    }
    jobs
}
