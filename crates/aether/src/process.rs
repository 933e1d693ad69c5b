//! Records of commands: running ones, and kept ones that have ended.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dsec_proto::{EndedReply, ProcessInfo, PtySize};
use dsec_sys::End;
use rustix::termios::Winsize;
use tokio::sync::{Mutex, Notify};

use crate::failure::Failure;
use crate::groups::{Group, Groups};
use crate::reaper::Exit;
use crate::ring::Ring;
use crate::stream::Stream;
use crate::Aether;

/// Records, ended ones included.
const MOST_RECORDS: usize = 1024;
/// Bytes kept of the output of all kept processes together.
const MOST_KEPT: usize = 64 * 1024 * 1024;
/// Bytes kept of one stream, whatever is asked.
const MOST_KEPT_OF_STREAM: u64 = 16 * 1024 * 1024;

/// Milliseconds that killed processes are waited for; they run nothing of their own any more.
const SETTLE: u32 = 200;

pub struct Process {
    pub id: String,
    pub pid: u32,
    pub argv: Vec<String>,
    pub keep: bool,
    pub terminal: Option<Stream>,
    pub started_ms: u64,
    pub started: Instant,
    pub exit: Rc<Exit>,
    pub stdin: Mutex<Option<Stream>>,
    /// Standard output and error.
    pub output: [RefCell<Ring>; 2],
    pub group: RefCell<Option<Group>>,
    pub ended: RefCell<Option<EndedReply>>,
    /// Told at new output and at the end.
    pub changed: Notify,
}

#[derive(Default)]
pub struct Processes {
    records: RefCell<HashMap<String, Rc<Process>>>,
    /// Ids whose child is being started.
    starting: Cell<usize>,
    kept: Cell<usize>,
}

impl Process {
    pub fn ring(limit: u64) -> [RefCell<Ring>; 2] {
        let limit = usize::try_from(limit.min(MOST_KEPT_OF_STREAM)).unwrap_or(usize::MAX);
        [RefCell::new(Ring::new(limit)), RefCell::new(Ring::new(limit))]
    }

    pub fn total(&self, stream: usize) -> u64 {
        self.output[stream].borrow().total()
    }

    /// Waits until what was killed is gone, leader and all.
    pub async fn gone(&self) {
        self.exit.wait().await;
        for _ in 0..SETTLE {
            if self.group.borrow().as_ref().is_none_or(Group::is_empty) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Ends the command and all that it started.
    pub fn kill(&self) {
        if let Some(group) = self.group.borrow().as_ref() {
            // Nothing can be done about a cgroup that is not ours any more: the end of the leader then tells.
            let _ = group.kill();
        }
    }

    /// Sends a signal to the leader, or to every process of the command.
    pub fn signal(&self, signal: u32, tree: bool) -> Result<(), Failure> {
        let number = i32::try_from(signal).unwrap_or(0);
        if !(1..=64).contains(&number) {
            return Err(Failure::invalid("signal", format!("{signal} is not a signal")));
        }
        let group = self.group.borrow();
        let Some(group) = group.as_ref() else {
            return Err(Failure::missing("process", "the process has ended"));
        };
        if !tree && self.exit.get().is_some() {
            return Err(Failure::missing("process", "the process has ended"));
        }
        if !tree {
            return dsec_sys::kill(self.pid, number).map_err(|_| Failure::missing("process", "the process has ended"));
        }
        if number == libc::SIGKILL {
            return group.kill().map_err(|error| Failure::runtime(error.to_string()));
        }
        let processes = group.processes().map_err(|error| Failure::runtime(error.to_string()))?;
        for pid in processes {
            // One that ended meanwhile needs no signal.
            let _ = dsec_sys::kill(pid, number);
        }
        Ok(())
    }

    pub fn resize(&self, size: &PtySize) -> Result<(), Failure> {
        let Some(terminal) = &self.terminal else {
            return Err(Failure::invalid("pty", "the process has no terminal"));
        };
        let narrow = |value: u32| u16::try_from(value).map_err(|_| Failure::invalid("pty", "the size is above 65535"));
        let size = Winsize {
            ws_row: narrow(size.rows)?,
            ws_col: narrow(size.cols)?,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        rustix::termios::tcsetwinsize(terminal.as_fd().as_fd(), size)
            .map_err(|error| Failure::runtime(error.to_string()))
    }

    pub fn info(&self) -> ProcessInfo {
        ProcessInfo {
            process_id: self.id.clone(),
            pid: self.pid,
            argv: self.argv.clone(),
            pty: self.terminal.is_some(),
            started_ms: self.started_ms,
            ended: self.ended.borrow().clone(),
            stdout_total: self.total(0),
            stderr_total: self.total(1),
        }
    }

    /// The `ended` reply for a leader that ended so.
    pub fn outcome(&self, end: End, timed_out: bool) -> EndedReply {
        let (outcome, exit_code, signal) = match end {
            End::Exited(code) => ("exited", Some(code), None),
            End::Killed(signal) => ("signalled", None, u32::try_from(signal).ok()),
        };
        EndedReply {
            outcome: if timed_out { "timeout" } else { outcome }.to_owned(),
            exit_code,
            signal,
            stdout_total: self.total(0),
            stderr_total: self.total(1),
            duration_ms: self.started.elapsed().as_secs_f64() * 1e3,
            session_ended: false,
        }
    }
}

/// A place among the records for a child that is being started; given back when dropped.
pub struct Place<'a>(&'a Processes);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.starting.set(self.0.starting.get() - 1);
    }
}

impl Processes {
    /// A place for one more record, the oldest ended one giving way.
    pub fn place(&self, groups: &Groups) -> Result<Place<'_>, Failure> {
        if self.records.borrow().len() + self.starting.get() >= MOST_RECORDS {
            let records = self.records.borrow();
            let ended = records.values().filter(|process| process.ended.borrow().is_some());
            let oldest = ended.min_by_key(|process| process.started).cloned();
            drop(records);
            let Some(process) = oldest else {
                return Err(Failure::limit("processes"));
            };
            self.remove(&process.id);
            if let Some(group) = process.group.take() {
                groups.release(group);
            }
        }
        self.starting.set(self.starting.get() + 1);
        Ok(Place(self))
    }

    pub fn insert(&self, process: Rc<Process>) {
        self.records.borrow_mut().insert(process.id.clone(), process);
    }

    pub fn find(&self, id: &str) -> Option<Rc<Process>> {
        self.records.borrow().get(id).cloned()
    }

    pub fn get(&self, id: &str) -> Result<Rc<Process>, Failure> {
        self.find(id)
            .ok_or_else(|| Failure::missing("process", format!("no process {id}")))
    }

    /// Drops a record and its kept output.
    pub fn remove(&self, id: &str) -> Option<Rc<Process>> {
        let mut records = self.records.borrow_mut();
        let process = records.remove(id)?;
        let held: usize = process.output.iter().map(|ring| ring.borrow().held()).sum();
        self.kept.set(self.kept.get().saturating_sub(held));
        for ring in &process.output {
            ring.replace(Ring::new(0));
        }
        if records.is_empty() {
            records.shrink_to_fit();
        }
        Some(process)
    }

    pub fn infos(&self) -> Vec<ProcessInfo> {
        let mut list: Vec<_> = self.records.borrow().values().map(|process| process.info()).collect();
        list.sort_by_key(|info| info.started_ms);
        list
    }

    /// Counts output, and keeps it as far as this process and all of them together may.
    pub fn keep(&self, process: &Process, stream: usize, bytes: &[u8]) {
        let mut ring = process.output[stream].borrow_mut();
        let before = ring.held();
        ring.push(bytes, MOST_KEPT.saturating_sub(self.kept.get()));
        self.kept.set((self.kept.get() + ring.held()).saturating_sub(before));
        drop(ring);
        process.changed.notify_waiters();
    }
}

impl Aether {
    /// Gives the command's cgroup back.
    pub fn let_go(&self, process: &Process) {
        if let Some(group) = process.group.take() {
            self.groups.release(group);
        }
    }

    /// To be called once, when the leader has ended and its output is taken. What a kept command left running stays its own.
    pub async fn finish(&self, process: &Process, ended: EndedReply) {
        process.ended.replace(Some(ended));
        let holds = process
            .group
            .borrow()
            .as_ref()
            .is_some_and(|group| process.keep && !group.is_empty());
        if !holds {
            self.let_go(process);
        }
        process.changed.notify_waiters();
        // A writer that waits on the pipe sees its end as soon as the last reader is gone.
        process.stdin.lock().await.take();
    }
}
