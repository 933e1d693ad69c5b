//! What outlives a worker: the numbers of open descriptors, the questions taken and not answered yet, and the counters, in a
//! memory file that the next worker maps again.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::Mutex;

use dsec_sys::{Error, Mapping, Result};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

const MAGIC: u64 = u64::from_le_bytes(*b"DSECPGR1");
const HEADER: usize = 64;
/// Layers at once; each keeps two descriptors.
pub const LAYERS: usize = 4096;
const LAYER_WORDS: usize = 32;
/// Questions at once; each keeps a descriptor. More of them wait in the kernel.
pub const SLOTS: usize = 8192;
const SLOT_WORDS: usize = 5;
const EVENTS_AT_ONCE: usize = 32;
const FANOTIFY_BUFFER: usize = EVENTS_AT_ONCE * dsec_sys::EVENT_BYTES;
/// What the kernel wants room for before it hands out a FUSE request.
const FUSE_BUFFER: usize = 64 * 1024;

const LAYERS_AT: usize = HEADER;
const SLOTS_AT: usize = LAYERS_AT + LAYERS * LAYER_WORDS;
const FANOTIFY_AT: usize = SLOTS_AT + SLOTS * SLOT_WORDS;
const FUSE_AT: usize = FANOTIFY_AT + FANOTIFY_BUFFER / 8;
const WORDS: usize = FUSE_AT + FUSE_BUFFER / 8;

/// Words of the header.
#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Cell {
    Group = 1,
    Listener,
    Lock,
    Fuse,
    /// Workers before this one.
    Restarts,
    /// Milliseconds that the keeper waits before it takes over.
    Delay,
    /// The keeper's process id.
    Keeper,
}

/// What is counted of a layer. The names are those of the answer to `stats`.
#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Counter {
    Events,
    Hits,
    Fetches,
    BytesFetched,
    BytesFilled,
    ChunksFilled,
    Waits,
    WaitUsTotal,
    WaitUsMax,
    Errors,
    Refetched,
    StoreErrors,
    WrongBytes,
    Evicted,
    LocalWrong,
    Opens,
}

pub const COUNTERS: [(&str, Counter); 15] = [
    ("events", Counter::Events),
    ("hits", Counter::Hits),
    ("fetches", Counter::Fetches),
    ("bytes_fetched", Counter::BytesFetched),
    ("bytes_filled", Counter::BytesFilled),
    ("chunks_filled", Counter::ChunksFilled),
    ("waits", Counter::Waits),
    ("wait_us_total", Counter::WaitUsTotal),
    ("wait_us_max", Counter::WaitUsMax),
    ("errors", Counter::Errors),
    ("refetched", Counter::Refetched),
    ("store_errors", Counter::StoreErrors),
    ("wrong_bytes", Counter::WrongBytes),
    ("bytes_evicted", Counter::Evicted),
    ("local_wrong", Counter::LocalWrong),
];
const COUNTERS_AT: usize = 8;

/// A question's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    Fanotify,
    Fuse,
}

/// A question that was taken and is not answered yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    pub asker: Asker,
    /// fanotify: the event's descriptor; FUSE: the request's number.
    pub ident: u64,
    pub layer: usize,
    pub offset: u64,
    pub count: u64,
    /// Workers that died while it waited.
    pub tries: u64,
}

/// A layer's descriptors, by number.
#[derive(Debug, Clone, Copy)]
pub struct Kept {
    pub data: RawFd,
    pub request: RawFd,
}

impl Kept {
    /// Gives both back, once no table has them any more.
    pub fn close(self) {
        for number in [self.data, self.request] {
            drop(dsec_sys::adopt(number));
        }
    }
}

pub struct Shared {
    file: OwnedFd,
    map: Mapping,
    free: Mutex<Vec<usize>>,
}

impl Shared {
    /// # Errors
    /// ENOMEM, EMFILE.
    pub fn create() -> Result<Self> {
        let os = |e: rustix::io::Errno| Error::new("memfd_create", "pager", e.raw_os_error());
        let file = memfd_create("dsec-pager", MemfdFlags::empty()).map_err(os)?;
        ftruncate(&file, (WORDS * 8) as u64).map_err(os)?;
        let shared = Self::over(file)?;
        shared.map.words()[0].store(MAGIC, SeqCst);
        for cell in [Cell::Group, Cell::Listener, Cell::Lock, Cell::Fuse] {
            shared.set_descriptor(cell, -1);
        }
        Ok(shared)
    }

    /// What a worker before this one left.
    ///
    /// # Errors
    /// EINVAL where the file is no such table.
    pub fn resume(number: RawFd) -> Result<Self> {
        let shared = Self::over(dsec_sys::adopt(number)?)?;
        if shared.map.words()[0].load(SeqCst) != MAGIC {
            return Err(Error::new("resume", "pager", libc::EINVAL));
        }
        shared.cell(Cell::Restarts).fetch_add(1, SeqCst);
        Ok(shared)
    }

    fn over(file: OwnedFd) -> Result<Self> {
        let file = File::from(file);
        let map = Mapping::new(&file, WORDS * 8, true)?;
        let shared = Self {
            file: file.into(),
            map,
            free: Mutex::default(),
        };
        let free = (0..SLOTS)
            .rev()
            .filter(|n| shared.slot(*n)[0].load(SeqCst) == 0)
            .collect();
        *lock(&shared.free) = free;
        Ok(shared)
    }

    /// The number to resume from.
    pub fn number(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub fn cell(&self, cell: Cell) -> &AtomicU64 {
        &self.map.words()[cell as usize]
    }

    pub fn descriptor(&self, cell: Cell) -> Option<RawFd> {
        let number = self.cell(cell).load(SeqCst) as RawFd;
        (number >= 0).then_some(number)
    }

    pub fn set_descriptor(&self, cell: Cell, number: RawFd) {
        self.cell(cell).store(number as u64, SeqCst);
    }

    fn layer(&self, slot: usize) -> &[AtomicU64] {
        let at = LAYERS_AT + slot * LAYER_WORDS;
        &self.map.words()[at..at + LAYER_WORDS]
    }

    pub fn counter(&self, layer: usize, counter: Counter) -> &AtomicU64 {
        &self.layer(layer)[COUNTERS_AT + counter as usize]
    }

    pub fn count(&self, layer: usize, counter: Counter, more: u64) {
        self.counter(layer, counter).fetch_add(more, Relaxed);
    }

    /// Takes a place for a layer; its counters begin at 0. None where all are taken.
    pub fn keep_layer(&self, kept: Kept) -> Option<usize> {
        let slot = (0..LAYERS).find(|n| self.layer(*n)[0].load(SeqCst) == 0)?;
        let words = self.layer(slot);
        for word in &words[COUNTERS_AT..] {
            word.store(0, Relaxed);
        }
        words[1].store(kept.data as u64, Relaxed);
        words[2].store(kept.request as u64, Relaxed);
        words[0].store(1, SeqCst);
        Some(slot)
    }

    pub fn drop_layer(&self, slot: usize) {
        self.layer(slot)[0].store(0, SeqCst);
    }

    /// Whether the kernel asked about the layer before anything could mount it.
    pub fn was_watched(&self, slot: usize) -> bool {
        self.layer(slot)[3].load(SeqCst) == 1
    }

    pub fn set_watched(&self, slot: usize, watched: bool) {
        self.layer(slot)[3].store(u64::from(watched), SeqCst);
    }

    pub fn set_request(&self, slot: usize, request: RawFd) {
        self.layer(slot)[2].store(request as u64, SeqCst);
    }

    /// The layers that a worker before this one had.
    pub fn kept_layers(&self) -> Vec<(usize, Kept)> {
        let kept = |n: usize| {
            let words = self.layer(n);
            (words[0].load(SeqCst) == 1).then(|| {
                let number = |at: usize| words[at].load(Relaxed) as RawFd;
                (
                    n,
                    Kept {
                        data: number(1),
                        request: number(2),
                    },
                )
            })
        };
        (0..LAYERS).filter_map(kept).collect()
    }

    fn slot(&self, number: usize) -> &[AtomicU64] {
        let at = SLOTS_AT + number * SLOT_WORDS;
        &self.map.words()[at..at + SLOT_WORDS]
    }

    /// How many more questions may be taken now.
    pub fn room(&self) -> usize {
        lock(&self.free).len()
    }

    /// Writes a question down. None where there is no room.
    pub fn note(&self, question: &Question) -> Option<usize> {
        let number = lock(&self.free).pop()?;
        let words = self.slot(number);
        words[1].store(question.ident, Relaxed);
        words[2].store(question.layer as u64, Relaxed);
        words[3].store(question.offset, Relaxed);
        words[4].store(question.count, Relaxed);
        let asker = match question.asker {
            Asker::Fanotify => 1,
            Asker::Fuse => 2,
        };
        words[0].store(asker | question.tries << 8, SeqCst);
        Some(number)
    }

    /// The question in this place is answered.
    pub fn forget(&self, number: usize) {
        self.slot(number)[0].store(0, SeqCst);
        lock(&self.free).push(number);
    }

    /// The questions that a worker before this one left, and their places.
    pub fn noted(&self) -> Vec<(usize, Question)> {
        let noted = |n: usize| {
            let words = self.slot(n);
            let state = words[0].load(SeqCst);
            let asker = match state & 0xff {
                1 => Asker::Fanotify,
                2 => Asker::Fuse,
                _ => return None,
            };
            let tries = (state >> 8) + 1;
            words[0].store(state & 0xff | tries << 8, SeqCst);
            let word = |at: usize| words[at].load(Relaxed);
            let layer = word(2) as usize;
            Some((
                n,
                Question {
                    asker,
                    ident: word(1),
                    layer,
                    offset: word(3),
                    count: word(4),
                    tries,
                },
            ))
        };
        (0..SLOTS).filter_map(noted).collect()
    }

    fn buffer(asker: Asker) -> (usize, usize) {
        match asker {
            Asker::Fanotify => (FANOTIFY_AT, FANOTIFY_BUFFER),
            Asker::Fuse => (FUSE_AT, FUSE_BUFFER),
        }
    }

    /// Takes what the kernel asks next, straight into the table, and gives a copy of it; at most `events` of fanotify's.
    ///
    /// # Errors
    /// As read(2).
    pub fn take(&self, asker: Asker, from: BorrowedFd<'_>, events: usize) -> Result<Vec<u8>> {
        let (at, bytes) = Self::buffer(asker);
        let bytes = match asker {
            Asker::Fanotify => bytes.min(events * dsec_sys::EVENT_BYTES),
            Asker::Fuse => bytes,
        };
        // Only what is looked at after a death: all of fanotify's, the head of a FUSE request.
        let looked_at = if asker == Asker::Fuse { 16 } else { FANOTIFY_BUFFER / 8 };
        for word in &self.map.words()[at..at + looked_at] {
            word.store(0, Relaxed);
        }
        let got = self.map.read_from(from, at * 8, bytes)?;
        Ok(self.copy(at, got))
    }

    /// What the last `take` of a worker before this one got.
    pub fn taken(&self, asker: Asker) -> Vec<u8> {
        let (at, bytes) = Self::buffer(asker);
        self.copy(at, bytes)
    }

    fn copy(&self, at: usize, bytes: usize) -> Vec<u8> {
        self.map.bytes()[at * 8..at * 8 + bytes]
            .iter()
            .map(|b| b.load(Relaxed))
            .collect()
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A lock's content, also after a panic of another holder: the release build ends at a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn question(ident: u64) -> Question {
        Question {
            asker: Asker::Fanotify,
            ident,
            layer: 3,
            offset: 4096,
            count: 8192,
            tries: 0,
        }
    }

    #[test]
    fn what_is_noted_is_there_for_the_next_and_what_is_answered_is_not() {
        let first = Shared::create().unwrap();
        let a = first.note(&question(11)).unwrap();
        first.note(&question(12)).unwrap();
        first.forget(a);
        let layer = first.keep_layer(Kept { data: 7, request: 8 }).unwrap();
        first.count(layer, Counter::Events, 5);
        let number = rustix::io::dup(&first).unwrap();
        let next = Shared::resume(std::os::fd::IntoRawFd::into_raw_fd(number)).unwrap();
        let noted: Vec<Question> = next.noted().into_iter().map(|(_, q)| q).collect();
        assert_eq!(
            noted,
            [Question {
                tries: 1,
                ..question(12)
            }]
        );
        assert_eq!(next.room(), SLOTS - 1);
        assert_eq!(next.kept_layers().len(), 1);
        assert_eq!(next.counter(layer, Counter::Events).load(Relaxed), 5);
        assert_eq!(next.cell(Cell::Restarts).load(Relaxed), 1);
    }

    #[test]
    fn there_is_an_end_to_questions_taken() {
        let shared = Shared::create().unwrap();
        let taken: Vec<usize> = (0..SLOTS as u64).filter_map(|n| shared.note(&question(n))).collect();
        assert_eq!(taken.len(), SLOTS);
        assert_eq!(shared.note(&question(0)), None);
        shared.forget(taken[9]);
        assert_eq!(shared.note(&question(0)), Some(taken[9]));
    }
}
