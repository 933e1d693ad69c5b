//! Shell sessions: a shell that stays, its streams, and what it prints while nobody runs a command in it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::{AsFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use dsec_chronus::{Chronus, Event, Shell};
use dsec_proto::{OpenSessionRequest, Reply, SessionInfo, SessionReply};
use dsec_sys::Streams;
use rustix::fs::{Mode, OFlags, ResolveFlags, CWD};
use tokio::sync::{oneshot, Notify};

use crate::channel::Channel;
use crate::command::{pipe, watched, Child, Prepared, Spec};
use crate::connection::Stop;
use crate::exec::CHUNK;
use crate::failure::Failure;
use crate::groups::Group;
use crate::reaper::Exit;
use crate::ring::Ring;
use crate::stream::Stream;
use crate::Aether;

const MOST_SESSIONS: usize = 64;
/// A shell that is not ready by then is none.
const START: Duration = Duration::from_secs(10);
/// Milliseconds that the processes of an ended session are waited for.
const SETTLE: u32 = 200;
/// Bytes kept, a stream, of what comes between two commands.
const BETWEEN: usize = 64 * 1024;

/// One shell. Everything that belongs to it lives in its cgroup.
pub struct Session {
    pub id: String,
    pub shell: String,
    pub pid: u32,
    pub started_ms: u64,
    pub exit: Rc<Exit>,
    pub group: RefCell<Option<Group>>,
    pub chronus: RefCell<Chronus>,
    /// Told when the record is gone.
    buried: Notify,
    /// None while a command runs: the command's connection has them.
    rest: RefCell<Option<Resting>>,
    busy: Cell<bool>,
    /// The command in it is wanted by nobody any more and is being ended.
    leaving: Cell<bool>,
    /// Told when a command is given up, and when one has given the streams back.
    changed: Notify,
}

/// How long a busy session waits before it refuses: a caller that has closed its connection may ask again before the close has
/// been seen here.
const NOTICE: Duration = Duration::from_millis(100);

/// Our ends of a shell's descriptors.
pub struct Pipes {
    pub control: Stream,
    pub status: Stream,
    pub output: [Stream; 2],
}

/// What came between two commands.
pub type Between = [Ring; 2];

/// A task that empties the streams while no command runs, so that nothing in the background is held up.
struct Resting {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<(Pipes, Between)>,
}

#[derive(Default)]
pub struct Sessions {
    open: RefCell<HashMap<String, Rc<Session>>>,
    starting: Cell<usize>,
}

impl Sessions {
    pub fn get(&self, id: &str) -> Result<Rc<Session>, Failure> {
        let found = self.open.borrow().get(id).cloned();
        found.ok_or_else(|| Failure::missing("session", format!("no session {id}")))
    }

    pub fn infos(&self) -> Vec<SessionInfo> {
        let mut list: Vec<_> = self.open.borrow().values().map(|session| session.info()).collect();
        list.sort_by_key(|info| info.started_ms);
        list
    }
}

impl Session {
    fn info(&self) -> SessionInfo {
        SessionInfo {
            session_id: self.id.clone(),
            shell: self.shell.clone(),
            pid: self.pid,
            running: self.exit.get().is_none(),
            busy: self.busy.get(),
            started_ms: self.started_ms,
        }
    }

    /// Takes the streams for one command. One before it that was given up is waited for; it has little time left.
    pub async fn take(&self) -> Result<(Pipes, Between), Failure> {
        while self.busy.replace(true) {
            let change = self.changed.notified();
            if self.leaving.get() {
                change.await;
            } else if tokio::time::timeout(NOTICE, change).await.is_err() {
                let told = "the session is busy with another command";
                return Err(Failure::new("conflict", "session", told));
            }
        }
        let Some(Resting { stop, task }) = self.rest.take() else {
            self.free();
            return Err(Failure::missing("session", "the session has ended"));
        };
        let _ = stop.send(());
        task.await
            .map_err(|_| Failure::runtime("the session's streams are gone"))
    }

    /// Gives the streams back after a command.
    pub fn give_back(&self, pipes: Pipes) {
        self.rest.replace(Some(rest(pipes)));
        self.free();
    }

    fn free(&self) {
        self.leaving.set(false);
        self.busy.set(false);
        self.changed.notify_one();
    }

    /// The command in it is wanted by nobody any more.
    pub fn leave(&self) {
        self.leaving.set(true);
        self.changed.notify_one();
    }

    pub fn kill(&self) {
        if let Some(group) = self.group.borrow().as_ref() {
            // The end of the shell then tells.
            let _ = group.kill();
        }
    }
}

fn rest(pipes: Pipes) -> Resting {
    let (stop, mut stopped) = oneshot::channel();
    let task = tokio::task::spawn_local(async move {
        let mut between = [Ring::new(BETWEEN), Ring::new(BETWEEN)];
        let mut open = [true; 2];
        let mut buffer = Vec::new();
        loop {
            let stream = tokio::select! {
                biased;
                _ = &mut stopped => break,
                ready = pipes.output[0].readable(), if open[0] => ready.map(|()| 0),
                ready = pipes.output[1].readable(), if open[1] => ready.map(|()| 1),
            };
            let Ok(stream) = stream else { break };
            buffer.resize(CHUNK, 0);
            match pipes.output[stream].try_read(&mut buffer) {
                Ok(Some(0)) | Err(_) => open[stream] = false,
                Ok(Some(size)) => between[stream].push(&buffer[..size], BETWEEN),
                Ok(None) => buffer = Vec::new(),
            }
        }
        (pipes, between)
    });
    Resting { stop, task }
}

/// Text that cannot be guessed, for one status line.
pub fn nonce() -> Result<String, Failure> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Failure::runtime(format!("getrandom: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub async fn open(aether: &Rc<Aether>, channel: &mut Channel, request: OpenSessionRequest) -> Result<(), Stop> {
    let sessions = &aether.sessions;
    if sessions.open.borrow().contains_key(&request.session_id) {
        return Err(Failure::new("conflict", "session", "a session of this id is open").into());
    }
    if sessions.open.borrow().len() + sessions.starting.get() >= MOST_SESSIONS {
        return Err(Failure::limit("sessions").into());
    }
    sessions.starting.set(sessions.starting.get() + 1);
    let begun = begin(aether, &request).await;
    sessions.starting.set(sessions.starting.get() - 1);
    let session = begun?;
    sessions.open.borrow_mut().insert(session.id.clone(), session.clone());
    tokio::task::spawn_local(bury(aether.clone(), session.clone()));
    Ok(channel
        .writer
        .reply(&Reply::Session(SessionReply { info: session.info() }))
        .await?)
}

/// The shell to start: the asked one, else bash, else sh.
fn choose(asked: &str) -> &str {
    match asked {
        "" if is_there("/bin/bash") => "/bin/bash",
        "" => "/bin/sh",
        asked => asked,
    }
}

/// A magic link would lead out of the sandbox through aether's own descriptors: such a name counts as not there.
fn is_there(path: &str) -> bool {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS).is_ok()
}

/// Starts the shell on pipes of our own.
fn start(aether: &Aether, prepared: &Prepared, number: u32) -> Result<(Child, Pipes), Failure> {
    let (control_read, control_write) = pipe()?;
    let (status_read, status_write) = pipe()?;
    let (out_read, out_write) = pipe()?;
    let (err_read, err_write) = pipe()?;
    let streams = Streams::Given([control_read.as_fd(), out_write.as_fd(), err_write.as_fd()]);
    let target = RawFd::try_from(number).map_err(|_| Failure::runtime("descriptor"))?;
    let child = prepared.start(aether, streams, Some((status_write.as_fd(), target)))?;
    drop((control_read, status_write, out_write, err_write));
    let pipes = Pipes {
        control: watched(control_write)?,
        status: watched(status_read)?,
        output: [watched(out_read)?, watched(err_read)?],
    };
    Ok((child, pipes))
}

async fn begin(aether: &Rc<Aether>, request: &OpenSessionRequest) -> Result<Rc<Session>, Failure> {
    let path = choose(&request.shell);
    let shell = Shell::of(path);
    let prepared = Prepared::new(&Spec {
        argv: &shell.argv(path),
        env: &request.env,
        cwd: &request.cwd,
        make_cwd: true,
        user: &request.user,
        open_files: request.open_files,
        terminal: false,
    })?;
    let number = shell.status_descriptor(request.open_files);
    let (child, mut pipes) = start(aether, &prepared, number)?;
    let Child {
        pid,
        exit,
        group,
        start,
    } = child;
    let (mut chronus, script) = Chronus::start(shell, number, &nonce()?);
    let ready = async {
        let start = start.reached().await?;
        answer(&mut pipes, &mut chronus, &script).await?;
        Ok(start)
    };
    let ready = tokio::time::timeout(START, ready).await;
    let not_a_shell = || Failure::new("unsupported", "session", format!("{path} does not answer as a shell"));
    if let Err(failure) = ready.unwrap_or_else(|_| Err(not_a_shell())) {
        let _ = group.kill();
        exit.wait().await;
        aether.groups.release(group);
        return Err(failure);
    }
    Ok(Rc::new(Session {
        id: request.session_id.clone(),
        shell: path.to_owned(),
        pid,
        started_ms: aether.sandbox.milliseconds(),
        exit,
        group: Some(group).into(),
        chronus: chronus.into(),
        buried: Notify::new(),
        rest: Some(rest(pipes)).into(),
        busy: Cell::new(false),
        leaving: Cell::new(false),
        changed: Notify::new(),
    }))
}

/// Sends the shell its opening and waits until it answers.
async fn answer(pipes: &mut Pipes, chronus: &mut Chronus, script: &[u8]) -> Result<(), Failure> {
    let written = pipes.control.write_all(script).await;
    // A program that is no shell may have ended before it read anything: the same refusal as when it ends a moment later.
    written.map_err(|_| Failure::new("unsupported", "session", "the shell takes no commands"))?;
    wait_ready(pipes, chronus).await
}

/// Reads until the shell reports that it is ready; what it prints before is its own (prompts, warnings) and is dropped.
async fn wait_ready(pipes: &mut Pipes, chronus: &mut Chronus) -> Result<(), Failure> {
    let gone = || Failure::new("unsupported", "session", "the shell ended at once");
    let mut buffer = vec![0; 4096];
    loop {
        let size = pipes.status.read(&mut buffer).await.map_err(|_| gone())?;
        if size == 0 {
            return Err(gone());
        }
        if chronus.feed(&buffer[..size]) == Some(Event::Ready) {
            break;
        }
    }
    for stream in &pipes.output {
        let mut left = dsec_sys::readable(stream.as_fd());
        while left > 0 {
            let most = left.min(buffer.len());
            match stream.try_read(&mut buffer[..most]) {
                Ok(Some(size @ 1..)) => left -= size,
                _ => break,
            }
        }
    }
    Ok(())
}

/// A session lives as long as its shell, and everything in it as long as the session.
async fn bury(aether: Rc<Aether>, session: Rc<Session>) {
    session.exit.wait().await;
    session.kill();
    session.chronus.borrow_mut().end();
    // They run nothing of their own any more; their group is empty when the kernel is done with them.
    for _ in 0..SETTLE {
        if session.group.borrow().as_ref().is_none_or(Group::is_empty) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut open = aether.sessions.open.borrow_mut();
    open.remove(&session.id);
    if open.is_empty() {
        open.shrink_to_fit();
    }
    drop(open);
    if let Some(group) = session.group.take() {
        aether.groups.release(group);
    }
    session.buried.notify_waiters();
}

pub async fn close(aether: &Rc<Aether>, id: &str) -> Result<(), Failure> {
    let session = aether.sessions.get(id)?;
    let buried = session.buried.notified();
    session.kill();
    buried.await;
    Ok(())
}
