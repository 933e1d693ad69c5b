//! Questions that wait, and how each is answered: once, whatever becomes of its chunks.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::fuse;
use crate::shared::{lock, Asker, Counter, Question, Shared};

/// Where answers go.
pub struct Desk {
    pub shared: Shared,
    group: OnceLock<OwnedFd>,
    fuse: OnceLock<OwnedFd>,
    rung: Mutex<bool>,
    bell: Condvar,
    ending: AtomicBool,
}

impl Desk {
    pub fn new(shared: Shared) -> Self {
        Self {
            shared,
            group: OnceLock::new(),
            fuse: OnceLock::new(),
            rung: Mutex::new(false),
            bell: Condvar::new(),
            ending: AtomicBool::new(false),
        }
    }

    /// From now on a keeper that ends is not replaced.
    pub fn set_ending(&self) {
        self.ending.store(true, Relaxed);
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }

    /// Says that there is something to be looked after.
    pub fn ring(&self) {
        *lock(&self.rung) = true;
        self.bell.notify_one();
    }

    /// Waits until somebody rings, or for `time`.
    pub fn listen(&self, time: Duration) {
        let waited = self.bell.wait_timeout_while(lock(&self.rung), time, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }

    pub fn group(&self) -> Option<&OwnedFd> {
        self.group.get()
    }

    pub fn set_group(&self, group: OwnedFd) {
        drop(self.group.set(group));
    }

    pub fn fuse(&self) -> Option<&OwnedFd> {
        self.fuse.get()
    }

    pub fn set_fuse(&self, fuse: OwnedFd) {
        drop(self.fuse.set(fuse));
    }

    /// Answers a question with an error, and forgets it.
    pub fn refuse(&self, question: &Question, place: Option<usize>) {
        match (question.asker, self.group.get(), self.fuse.get()) {
            (Asker::Fanotify, Some(group), _) => {
                let sent = dsec_sys::fanotify_answer(group.as_fd(), question.ident as i32, libc::EIO);
                told(sent.map_err(|e| e.errno));
            }
            (Asker::Fuse, _, Some(device)) => told(fuse::answer_error(device, question.ident, libc::EIO)),
            _ => {}
        }
        if let Some(place) = place {
            self.shared.forget(place);
        }
        self.close(question);
    }

    fn answer(&self, question: &Question, data: &File, good: bool) {
        let sent = match question.asker {
            Asker::Fanotify => self.group.get().map_or(Ok(()), |group| {
                let errno = if good { 0 } else { libc::EIO };
                dsec_sys::fanotify_answer(group.as_fd(), question.ident as i32, errno).map_err(|e| e.errno)
            }),
            Asker::Fuse => self.fuse.get().map_or(Ok(()), |device| {
                if good {
                    fuse::answer_read(device, question, data)
                } else {
                    fuse::answer_error(device, question.ident, libc::EIO)
                }
            }),
        };
        told(sent);
    }

    /// Gives a fanotify question's descriptor back; only once it is in no table, since its number may come again.
    pub fn close(&self, question: &Question) {
        if question.asker == Asker::Fanotify {
            drop(dsec_sys::adopt(question.ident as i32));
        }
    }
}

/// Says where an answer was not taken; a reader that was killed while it waited takes none, which is as it should be.
pub fn told(sent: Result<(), i32>) {
    if let Err(errno) = sent {
        if errno != libc::ENOENT {
            eprintln!(
                "dsec-pager: an answer was not taken: {}",
                std::io::Error::from_raw_os_error(errno)
            );
        }
    }
}

/// A question that waits for chunks.
pub struct Pending {
    desk: Arc<Desk>,
    data: Arc<File>,
    place: usize,
    pub question: Question,
    pub since: Instant,
    left: AtomicU32,
    failed: AtomicBool,
    answered: AtomicBool,
}

impl Pending {
    /// Waits for one thing: the end of its own registration.
    pub fn new(desk: Arc<Desk>, data: Arc<File>, place: usize, question: Question) -> Arc<Self> {
        Arc::new(Self {
            desk,
            data,
            place,
            question,
            since: Instant::now(),
            left: AtomicU32::new(1),
            failed: AtomicBool::new(false),
            answered: AtomicBool::new(false),
        })
    }

    /// One more thing to wait for.
    pub fn more(&self) {
        self.left.fetch_add(1, AcqRel);
    }

    /// One of them came, or failed. The last one answers.
    pub fn less(&self, good: bool) {
        if !good {
            self.failed.store(true, Relaxed);
        }
        if self.left.fetch_sub(1, AcqRel) == 1 {
            self.answer(!self.failed.load(Relaxed));
        }
    }

    fn answer(&self, good: bool) {
        if self.answered.swap(true, AcqRel) {
            return;
        }
        let shared = &self.desk.shared;
        let layer = self.question.layer;
        if !good {
            shared.count(layer, Counter::Errors, 1);
        }
        self.desk.answer(&self.question, &self.data, good);
        shared.forget(self.place);
        self.desk.close(&self.question);
    }

    /// Answers with an error now, unless it is answered already.
    pub fn refuse(&self) {
        if !self.answered.load(Relaxed) {
            self.waited();
            self.answer(false);
        }
    }

    /// Counts the time that it waited, for one that did not find all there.
    pub fn waited(&self) {
        let shared = &self.desk.shared;
        let us = self.since.elapsed().as_micros() as u64;
        shared.count(self.question.layer, Counter::Waits, 1);
        shared.count(self.question.layer, Counter::WaitUsTotal, us);
        shared
            .counter(self.question.layer, Counter::WaitUsMax)
            .fetch_max(us, Relaxed);
    }
}
