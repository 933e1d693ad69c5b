//! One command in a session: its script in, its output out, its end by the status line.

use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dsec_chronus::{Event, Refused};
use dsec_proto::{EndedReply, LostReply, Reply, RunInSessionRequest, StartedReply, FRAME_STDERR, FRAME_STDOUT};
use dsec_sys::End;

use crate::channel::{Channel, Writer};
use crate::connection::Stop;
use crate::failure::Failure;
use crate::ring::Ring;
use crate::session::{nonce, Between, Pipes, Session};
use crate::stream::{Pace, Scratch};
use crate::Aether;

/// How long an interrupted shell may take to be back before the session is ended.
const COMEBACK: Duration = Duration::from_secs(1);
/// Rounds of killing what a stopped session still holds.
const ROUNDS: u32 = 200;
const FRAMES: [u8; 2] = [FRAME_STDOUT, FRAME_STDERR];
const NAMES: [&str; 2] = ["stdout", "stderr"];

/// How a command in a session came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Status(i32),
    Shell(End),
    TimedOut { session_ended: bool },
}

/// One command under way. `writer` is None once its connection is gone.
struct Run<'a> {
    session: &'a Session,
    pipes: &'a Pipes,
    totals: [u64; 2],
    buffer: Scratch,
}

pub async fn run(aether: &Rc<Aether>, channel: &mut Channel, request: RunInSessionRequest) -> Result<(), Stop> {
    let begun = Instant::now();
    let session = aether.sessions.get(&request.session_id)?;
    let nonce = nonce()?;
    let (pipes, between) = session.take().await?;
    let script = session.chronus.borrow_mut().run(&request.command, &nonce);
    let script = match script {
        Ok(script) => script,
        Err(refused) => {
            session.give_back(pipes);
            return Err(match refused {
                Refused::Busy => Failure::new("conflict", "session", refused.to_string()),
                Refused::Ended => Failure::missing("session", refused.to_string()),
                Refused::Nul => Failure::invalid("command", refused.to_string()),
            }
            .into());
        }
    };
    let Channel { reader, writer } = channel;
    writer.hold(&Reply::Started(StartedReply {
        process_id: request.process_id,
        pid: session.pid,
    }))?;
    let mut run = Run {
        session: &session,
        pipes: &pipes,
        totals: [0; 2],
        buffer: Scratch::default(),
    };
    let timeout = request.timeout_ms.map(Duration::from_millis);
    let finish = {
        let mut closed = pin!(reader.closed());
        tokio::select! {
            finish = run.carry_out(writer, &script, &between, timeout) => finish,
            () = &mut closed => Err(Stop::Closed),
        }
    };
    let finish = match finish {
        Ok(finish) => finish,
        Err(stop) => {
            // Nobody wants the rest: the command is given up as at a timeout.
            session.leave();
            run.give_up(None).await;
            session.give_back(pipes);
            return Err(stop);
        }
    };
    let ended = Reply::Ended(run.outcome(finish, begun));
    session.give_back(pipes);
    Ok(writer.reply(&ended).await?)
}

impl Run<'_> {
    async fn carry_out(
        &mut self,
        writer: &mut Writer,
        script: &[u8],
        between: &Between,
        timeout: Option<Duration>,
    ) -> Result<Finish, Stop> {
        self.pass_between(writer, between).await?;
        let deadline = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        let mut deadline = pin!(deadline);
        let finish = tokio::select! {
            finish = self.follow(writer, script) => Some(finish?),
            () = &mut deadline => None,
        };
        match finish {
            Some(finish) => {
                self.drain(Some(writer)).await?;
                Ok(finish)
            }
            None => {
                let session_ended = !self.give_up(Some(writer)).await;
                Ok(Finish::TimedOut { session_ended })
            }
        }
    }

    /// What came since the last command belongs to no command; it is given to this one, first.
    async fn pass_between(&mut self, writer: &mut Writer, between: &Between) -> Result<(), Stop> {
        for (stream, ring) in between.iter().enumerate() {
            let ring: &Ring = ring;
            if ring.start() > 0 {
                let lost = LostReply {
                    stream: NAMES[stream].to_owned(),
                    offset: ring.start(),
                };
                writer.hold(&Reply::Lost(lost))?;
            }
            let mut kept = Vec::new();
            ring.copy(ring.start(), usize::MAX, &mut kept);
            self.totals[stream] = ring.total();
            writer.data(FRAMES[stream], &kept).await?;
        }
        Ok(())
    }

    /// Until the status line, or the end of the shell.
    async fn follow(&mut self, writer: &mut Writer, script: &[u8]) -> Result<Finish, Stop> {
        let (session, pipes) = (self.session, self.pipes);
        let mut writing = pin!(pipes.control.write_all(script));
        let mut written = false;
        let mut open = [true; 2];
        let mut status = [0; 512];
        let mut pace = Pace::default();
        loop {
            let stream = tokio::select! {
                biased;
                // A shell that reads no more has ended, which shows below.
                _ = &mut writing, if !written => { written = true; continue }
                end = session.exit.wait() => return Ok(Finish::Shell(end)),
                size = pipes.status.read(&mut status) => {
                    let size = size?;
                    if size == 0 {
                        return Ok(Finish::Shell(session.exit.wait().await));
                    }
                    let event = session.chronus.borrow_mut().feed(&status[..size]);
                    if let Some(Event::Finished(status)) = event {
                        return Ok(Finish::Status(status));
                    }
                    continue;
                }
                () = pace.gathered(), if pace.is_gathering() => continue,
                ready = pipes.output[0].readable(), if open[0] && !pace.is_gathering() => ready.map(|()| 0),
                ready = pipes.output[1].readable(), if open[1] && !pace.is_gathering() => ready.map(|()| 1),
                () = tokio::time::sleep(Duration::from_millis(3)), if writer.is_holding() => {
                    writer.flush().await?;
                    continue;
                }
            }?;
            match pipes.output[stream].try_read(self.buffer.room(usize::MAX)) {
                Ok(Some(0)) | Err(_) => open[stream] = false,
                Ok(Some(size)) => {
                    self.totals[stream] += size as u64;
                    writer.data(FRAMES[stream], self.buffer.read(size)).await?;
                    self.buffer.grow(size, &pipes.output[stream]);
                    pace.took(size);
                }
                Ok(None) => {}
            }
        }
    }

    /// What is in the pipes now was written before the status line.
    async fn drain(&mut self, mut writer: Option<&mut Writer>) -> Result<(), Stop> {
        for (stream, frame) in FRAMES.into_iter().enumerate() {
            let mut left = dsec_sys::readable(self.pipes.output[stream].as_fd());
            while left > 0 {
                let Ok(Some(size @ 1..)) = self.pipes.output[stream].try_read(self.buffer.room(left)) else {
                    break;
                };
                left -= size;
                self.totals[stream] += size as u64;
                if let Some(writer) = &mut writer {
                    writer.data(frame, self.buffer.read(size)).await?;
                }
            }
        }
        Ok(())
    }

    /// Ends everything in the session but the shell, and makes the shell drop its command. False: the session ended instead.
    async fn give_up(&mut self, mut writer: Option<&mut Writer>) -> bool {
        let back = tokio::time::timeout(COMEBACK, self.interrupt()).await;
        if back == Ok(true) {
            if self.drain(writer.as_deref_mut()).await.is_err() {
                writer = None;
            }
            let _ = writer;
            return true;
        }
        self.session.kill();
        self.session.exit.wait().await;
        let _ = self.drain(writer).await;
        false
    }

    async fn interrupt(&mut self) -> bool {
        let (session, pipes) = (self.session, self.pipes);
        let Ok(nonce) = nonce() else { return false };
        if !self.begun().await {
            return session.exit.get().is_none() && !session.chronus.borrow().is_busy();
        }
        let script = session.chronus.borrow_mut().interrupt(&nonce);
        let signal = session.chronus.borrow().shell().interrupt_signal();
        let Some(script) = script else { return false };
        if !self.end_others().await
            || dsec_sys::kill(session.pid, signal).is_err()
            || !pipes.control.try_write_all(&script)
        {
            self.thaw();
            return false;
        }
        self.thaw();
        let mut status = [0; 512];
        loop {
            tokio::select! {
                _ = session.exit.wait() => return false,
                size = pipes.status.read(&mut status) => match size {
                    Ok(size @ 1..) => {
                        let event = session.chronus.borrow_mut().feed(&status[..size]);
                        if event == Some(Event::Ready) {
                            return true;
                        }
                    }
                    _ => return false,
                },
            }
        }
    }

    /// Waits until the shell is in its command. False: it is through with it already, or gone.
    async fn begun(&mut self) -> bool {
        let mut status = [0; 512];
        while !self.session.chronus.borrow().can_interrupt() {
            if !self.session.chronus.borrow().is_busy() {
                return false;
            }
            tokio::select! {
                _ = self.session.exit.wait() => return false,
                size = self.pipes.status.read(&mut status) => match size {
                    Ok(size @ 1..) => {
                        self.session.chronus.borrow_mut().feed(&status[..size]);
                    }
                    _ => return false,
                },
            }
        }
        true
    }

    /// Stops the session, then kills all of it but the shell; the shell, stopped, cannot go on to a next step meanwhile.
    async fn end_others(&self) -> bool {
        let shell = self.session.pid;
        if !self.with_group(|group| group.freeze(true).is_ok()) {
            return false;
        }
        for _ in 0..ROUNDS {
            let mut others = 0;
            let listed = self.with_group(|group| {
                let Ok(processes) = group.processes() else { return false };
                for pid in processes.into_iter().filter(|&pid| pid != shell && pid != 0) {
                    others += 1;
                    // One that ended meanwhile needs no signal.
                    let _ = dsec_sys::kill(pid, libc::SIGKILL);
                }
                true
            });
            if !listed || others == 0 {
                return listed;
            }
            // A killed process leaves the list once it has run its end.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        false
    }

    fn thaw(&self) {
        self.with_group(|group| group.freeze(false).is_ok());
    }

    fn with_group(&self, work: impl FnOnce(&crate::groups::Group) -> bool) -> bool {
        self.session.group.borrow().as_ref().is_some_and(work)
    }

    fn outcome(&self, finish: Finish, begun: Instant) -> EndedReply {
        let (outcome, exit_code, signal, session_ended) = match finish {
            Finish::Status(status) => ("exited", Some(status), None, false),
            Finish::Shell(End::Exited(code)) => ("exited", Some(code), None, true),
            Finish::Shell(End::Killed(signal)) => ("signalled", None, u32::try_from(signal).ok(), true),
            Finish::TimedOut { session_ended } => ("timeout", None, None, session_ended),
        };
        EndedReply {
            outcome: outcome.to_owned(),
            exit_code,
            signal,
            stdout_total: self.totals[0],
            stderr_total: self.totals[1],
            duration_ms: begun.elapsed().as_secs_f64() * 1e3,
            session_ended,
        }
    }
}
