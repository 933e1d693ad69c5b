//! exec and attach: a command's streams and the connection, in both directions at once.

use std::future::pending;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dsec_proto::{AttachRequest, EndedReply, ExecRequest, LostReply, Reply, StartedReply, FRAME_STDERR, FRAME_STDOUT};
use dsec_sys::End;

use crate::channel::{Channel, Input, Reader, Writer};
use crate::command::{Child, Ends, Prepared, Spec, Start};
use crate::connection::Stop;
use crate::failure::Failure;
use crate::process::Process;
use crate::stream::{Pace, Scratch, Stream};
use crate::Aether;

/// Bytes taken of a stream at once.
pub const CHUNK: usize = 64 * 1024;
/// `started` waits this long for output to go with it.
const PATIENCE: Duration = Duration::from_millis(3);
/// How long a terminal may still give what was written to it before the leader ended.
const TERMINAL_DRAIN: Duration = Duration::from_millis(500);
/// How long a killed leader may take to go.
const DEATH: Duration = Duration::from_secs(10);
const FRAMES: [u8; 2] = [FRAME_STDOUT, FRAME_STDERR];
const NAMES: [&str; 2] = ["stdout", "stderr"];

pub async fn exec(aether: &Rc<Aether>, channel: &mut Channel, request: ExecRequest) -> Result<(), Stop> {
    if let Some(process) = aether.processes.find(&request.process_id) {
        if !process.keep {
            return Err(Failure::new("conflict", "process", "this process belongs to another connection").into());
        }
        return follow(&process, channel, [0, 0], request.stream).await;
    }
    let place = aether.processes.place(&aether.groups)?;
    let (process, ends, start) = begin(aether, &request).await?;
    aether.processes.insert(process.clone());
    drop(place);
    let timeout = request.timeout_ms.map(Duration::from_millis);
    let pump = Pump {
        aether: aether.clone(),
        process: process.clone(),
        ends,
        buffer: Scratch::default(),
    };
    if !request.keep {
        return foreground(pump, channel, start, timeout, request.stream).await;
    }
    // Spawned at once: from here on the process is kept, whatever becomes of this connection.
    tokio::task::spawn_local(background(pump, timeout));
    match start.reached().await {
        Ok(_) => follow(&process, channel, [0, 0], request.stream).await,
        Err(failure) => {
            aether.processes.remove(&process.id);
            Err(failure.into())
        }
    }
}

pub async fn attach(aether: &Rc<Aether>, channel: &mut Channel, request: AttachRequest) -> Result<(), Stop> {
    let process = aether.processes.get(&request.process_id)?;
    if !process.keep {
        return Err(Failure::new("conflict", "process", "this process belongs to another connection").into());
    }
    follow(
        &process,
        channel,
        [request.stdout_from, request.stderr_from],
        request.stream,
    )
    .await
}

async fn begin(aether: &Rc<Aether>, request: &ExecRequest) -> Result<(Rc<Process>, Ends, Start), Failure> {
    let started = Instant::now();
    let prepared = Prepared::new(&Spec {
        argv: &request.argv,
        env: &request.env,
        cwd: &request.cwd,
        make_cwd: request.make_cwd,
        user: &request.user,
        open_files: request.open_files,
        terminal: request.pty.is_some(),
    })?;
    let (
        Child {
            pid,
            exit,
            group,
            start,
        },
        mut ends,
    ) = match &request.pty {
        None => prepared.start_on_pipes(aether, request.stdin)?,
        Some(size) => prepared.start_on_terminal(aether, size).await?,
    };
    let terminal = match &request.pty {
        Some(_) => ends.stdout.duplicate().ok(),
        None => None,
    };
    let process = Process {
        id: request.process_id.clone(),
        pid,
        argv: request.argv.clone(),
        keep: request.keep,
        terminal,
        started_ms: aether.sandbox.milliseconds(),
        started,
        exit,
        stdin: tokio::sync::Mutex::new(ends.stdin.take()),
        output: Process::ring(if request.keep { request.output_limit } else { 0 }),
        group: Some(group).into(),
        ended: None.into(),
        changed: tokio::sync::Notify::new(),
    };
    Ok((Rc::new(process), ends, start))
}

/// Takes a command's output until its leader has ended and nothing is left of what it wrote.
struct Pump {
    aether: Rc<Aether>,
    process: Rc<Process>,
    ends: Ends,
    buffer: Scratch,
}

/// Where output goes: to the connection, or only into the record.
struct Sink<'a>(Option<&'a mut Writer>);

impl Sink<'_> {
    async fn put(&mut self, pump: &Pump, stream: usize, size: usize) -> Result<(), Stop> {
        let bytes = pump.buffer.read(size);
        pump.aether.processes.keep(&pump.process, stream, bytes);
        match &mut self.0 {
            Some(writer) => Ok(writer.data(FRAMES[stream], bytes).await?),
            None => Ok(()),
        }
    }
}

impl Pump {
    async fn run(&mut self, mut sink: Sink<'_>, start: Option<&Start>) -> Result<End, Stop> {
        let mut open = [true, self.ends.stderr.is_some()];
        let exit = self.process.exit.clone();
        let mut waiting = start;
        let mut pace = Pace::default();
        let end = loop {
            let stream = tokio::select! {
                end = exit.wait() => break end,
                () = pace.gathered(), if pace.is_gathering() => continue,
                ready = self.ends.stdout.readable(), if open[0] && !pace.is_gathering() => ready.map(|()| 0),
                ready = readable(self.ends.stderr.as_ref()), if open[1] && !pace.is_gathering() => ready.map(|()| 1),
                () = tokio::time::sleep(PATIENCE), if waiting.is_some() => {
                    match waiting.and_then(Start::judge) {
                        None => {}
                        // The report of a failure is taken here; the child ends at once.
                        Some(Err(failure)) => return Err(failure.into()),
                        Some(Ok(())) => {
                            waiting = None;
                            if let Some(writer) = &mut sink.0 {
                                writer.flush().await?;
                            }
                        }
                    }
                    continue;
                }
            }?;
            let room = self.buffer.room(usize::MAX);
            let got = end(&self.ends, stream).map_or(Ok(None), |source| source.try_read(room));
            match got {
                Ok(Some(0)) | Err(_) => open[stream] = false,
                Ok(Some(size)) => {
                    waiting = None;
                    sink.put(self, stream, size).await?;
                    pace.took(size);
                    if let Some(source) = end(&self.ends, stream) {
                        self.buffer.grow(size, source);
                    }
                }
                Ok(None) => {}
            }
        };
        if let Some(failure) = start.and_then(Start::failure) {
            return Err(failure.into());
        }
        self.drain(&mut sink).await?;
        Ok(end)
    }

    /// What is in the pipes now was written before the leader ended, or by something that outlives it.
    async fn drain(&mut self, sink: &mut Sink<'_>) -> Result<(), Stop> {
        if self.process.terminal.is_some() {
            return self.drain_terminal(sink).await;
        }
        for stream in 0..2 {
            let Some(source) = end(&self.ends, stream) else {
                continue;
            };
            let mut left = dsec_sys::readable(source.as_fd());
            while left > 0 {
                let room = self.buffer.room(left);
                let got = end(&self.ends, stream).map_or(Ok(None), |source| source.try_read(room));
                let Ok(Some(size @ 1..)) = got else { break };
                sink.put(self, stream, size).await?;
                left -= size;
            }
        }
        Ok(())
    }

    /// A terminal passes bytes on by a worker of the kernel, so "nothing there" does not mean that nothing comes; its end does.
    async fn drain_terminal(&mut self, sink: &mut Sink<'_>) -> Result<(), Stop> {
        let mut deadline = pin!(tokio::time::sleep(TERMINAL_DRAIN));
        loop {
            let size = tokio::select! {
                size = self.ends.stdout.read(self.buffer.room(usize::MAX)) => size?,
                () = &mut deadline => 0,
            };
            if size == 0 {
                return Ok(());
            }
            sink.put(self, 0, size).await?;
        }
    }

    /// Waits for the leader of a killed command.
    async fn death(&self) -> Result<End, Stop> {
        let dead = tokio::time::timeout(DEATH, self.process.exit.wait()).await;
        dead.map_err(|_| Failure::runtime("the killed command does not end").into())
    }
}

fn end(ends: &Ends, stream: usize) -> Option<&Stream> {
    if stream == 0 {
        Some(&ends.stdout)
    } else {
        ends.stderr.as_ref()
    }
}

async fn readable(stream: Option<&Stream>) -> std::io::Result<()> {
    match stream {
        Some(stream) => stream.readable().await,
        None => pending().await,
    }
}

async fn limit(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => tokio::time::sleep(timeout).await,
        None => pending().await,
    }
}

/// A command that ends with its connection; the socket's back-pressure is the command's.
async fn foreground(
    mut pump: Pump,
    channel: &mut Channel,
    start: Start,
    timeout: Option<Duration>,
    stream: bool,
) -> Result<(), Stop> {
    let (aether, process) = (pump.aether.clone(), pump.process.clone());
    let Channel { reader, writer } = channel;
    let started = Reply::Started(StartedReply {
        process_id: process.id.clone(),
        pid: process.pid,
    });
    writer.hold(&started)?;
    let mut timed_out = false;
    let result = {
        let mut feeding = pin!(feed(&process, reader));
        let sink = Sink(stream.then_some(&mut *writer));
        let mut running = pin!(pump.run(sink, Some(&start)));
        tokio::select! {
            result = &mut running => result,
            () = &mut feeding => Err(Stop::Closed),
            () = limit(timeout) => {
                timed_out = true;
                process.kill();
                tokio::select! {
                    result = async {
                        let end = running.await;
                        process.gone().await;
                        end
                    } => result,
                    () = &mut feeding => Err(Stop::Closed),
                }
            }
        }
    };
    if result.is_err() {
        process.kill();
    }
    let end = match &result {
        Ok(end) => Ok(*end),
        Err(_) => pump.death().await,
    };
    let ended = match &end {
        Ok(end) => process.outcome(*end, timed_out),
        Err(_) => process.outcome(End::Killed(libc::SIGKILL), timed_out),
    };
    // Its totals are read above: they go with the record.
    aether.processes.remove(&process.id);
    aether.finish(&process, ended.clone()).await;
    if let Err(stop) = result {
        writer.forget();
        return Err(stop);
    }
    Ok(writer.reply(&Reply::Ended(ended)).await?)
}

/// A command that outlives its connection.
async fn background(mut pump: Pump, timeout: Option<Duration>) {
    let process = pump.process.clone();
    let mut timed_out = false;
    let result = {
        let mut running = pin!(pump.run(Sink(None), None));
        tokio::select! {
            result = &mut running => result,
            () = limit(timeout) => {
                timed_out = true;
                process.kill();
                let end = running.await;
                process.gone().await;
                end
            }
        }
    };
    let end = match result {
        Ok(end) => end,
        Err(_) => {
            process.kill();
            pump.death().await.unwrap_or(End::Killed(libc::SIGKILL))
        }
    };
    let ended: EndedReply = process.outcome(end, timed_out);
    pump.aether.finish(&process, ended).await;
}

/// Passes input on until the connection closes.
pub async fn feed(process: &Process, reader: &mut Reader) {
    loop {
        match reader.input().await {
            Input::Closed => return,
            Input::End => close_stdin(process).await,
            Input::Data(data) => {
                let mut stdin = process.stdin.lock().await;
                if let Some(stream) = stdin.as_ref() {
                    // A command that has closed its input does not want the rest.
                    if stream.write_all(&data).await.is_err() {
                        stdin.take();
                    }
                }
            }
        }
    }
}

/// Ends the command's input; on a terminal by its end-of-file character.
pub async fn close_stdin(process: &Process) {
    let mut stdin = process.stdin.lock().await;
    match stdin.as_ref() {
        Some(stream) if process.terminal.is_some() => {
            let _ = stream.write_all(&[4]).await;
        }
        _ => {
            stdin.take();
        }
    }
}

/// Sends what is kept from the offsets on, then what comes, then the end. A slow connection loses the oldest, and is told.
async fn follow(process: &Rc<Process>, channel: &mut Channel, from: [u64; 2], stream: bool) -> Result<(), Stop> {
    let Channel { reader, writer } = channel;
    let started = Reply::Started(StartedReply {
        process_id: process.id.clone(),
        pid: process.pid,
    });
    writer.reply(&started).await?;
    tokio::select! {
        result = send(process, writer, from, stream) => result,
        () = feed(process, reader) => Err(Stop::Closed),
    }
}

async fn send(process: &Process, writer: &mut Writer, mut at: [u64; 2], stream: bool) -> Result<(), Stop> {
    let mut chunk = Vec::new();
    loop {
        let changed = process.changed.notified();
        let ended = process.ended.borrow().clone();
        let mut idle = true;
        for index in 0..2 {
            if !stream {
                break;
            }
            chunk.clear();
            let begin = {
                let ring = process.output[index].borrow();
                let begin = at[index].clamp(ring.start(), ring.total());
                ring.copy(begin, CHUNK, &mut chunk);
                begin
            };
            if begin > at[index] {
                writer.hold(&Reply::Lost(LostReply {
                    stream: NAMES[index].to_owned(),
                    offset: begin,
                }))?;
            }
            at[index] = begin + chunk.len() as u64;
            if !chunk.is_empty() {
                idle = false;
                writer.data(FRAMES[index], &chunk).await?;
            }
        }
        if !idle {
            continue;
        }
        if let Some(ended) = ended {
            return Ok(writer.reply(&Reply::Ended(ended)).await?);
        }
        if writer.is_holding() {
            writer.flush().await?;
        }
        chunk = Vec::new();
        changed.await;
    }
}
