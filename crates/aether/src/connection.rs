//! Accepts the edge's connections and carries out the operation that each one names.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use dsec_proto::{
    DoneReply, HelloReply, HelloRequest, ProcessesReply, Reply, Request, SessionsReply, WriteStdinRequest, VERSION,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::channel::{Channel, Input};
use crate::failure::Failure;
use crate::{exec, session, session_run, tunnel, Aether};

/// Connections at once; further ones wait in the socket's backlog.
const MOST_CONNECTIONS: usize = 1024;

/// Why an operation stops before its own end.
#[derive(Debug)]
pub enum Stop {
    Failed(Failure),
    /// The edge closed the connection, or cannot be written to.
    Closed,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<io::Error> for Stop {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

pub async fn accept(aether: Rc<Aether>, listener: OwnedFd) -> io::Result<()> {
    let listener = std::os::unix::net::UnixListener::from(listener);
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let places = std::sync::Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let waiting = places.clone().acquire_owned();
        let Ok(place) = waiting.await else { return Ok(()) };
        match listener.accept().await {
            Ok((socket, _)) => {
                let aether = aether.clone();
                tokio::task::spawn_local(async move {
                    serve(aether, socket).await;
                    drop(place);
                });
            }
            // Out of descriptors: those who hold them give some back.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                drop(place);
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error),
        }
    }
}

async fn serve(aether: Rc<Aether>, socket: UnixStream) {
    let mut channel = Channel::new(socket);
    let request = match channel.reader.request().await {
        None => return,
        Some(Ok(request)) => request,
        Some(Err(detail)) => {
            channel
                .refuse(&Failure::runtime(format!("protocol: {detail}")).reply())
                .await;
            return;
        }
    };
    if crate::files::is_file_request(&request) {
        crate::files::serve(&aether, channel, request).await;
        return;
    }
    if let Err(Stop::Failed(failure)) = carry_out(&aether, &mut channel, request).await {
        channel.refuse(&failure.reply()).await;
    }
}

async fn carry_out(aether: &Rc<Aether>, channel: &mut Channel, request: Request) -> Result<(), Stop> {
    let reply = match request {
        Request::Hello(hello) => answer_hello(&hello)?,
        Request::Watch(_) => {
            channel.reader.closed().await;
            return Ok(());
        }
        Request::Exec(request) => return exec::exec(aether, channel, request).await,
        Request::Attach(request) => return exec::attach(aether, channel, request).await,
        Request::ListProcesses(_) => Reply::Processes(ProcessesReply {
            items: aether.processes.infos(),
        }),
        Request::Signal(request) => {
            aether
                .processes
                .get(&request.process_id)?
                .signal(request.signal, request.tree)?;
            Reply::Done(DoneReply {})
        }
        Request::Resize(request) => {
            aether.processes.get(&request.process_id)?.resize(&request.size)?;
            Reply::Done(DoneReply {})
        }
        Request::WriteStdin(request) => write_stdin(aether, channel, &request).await?,
        Request::Forget(request) => {
            forget(aether, &request.process_id).await?;
            Reply::Done(DoneReply {})
        }
        Request::OpenSession(request) => return session::open(aether, channel, request).await,
        Request::RunInSession(request) => return session_run::run(aether, channel, request).await,
        Request::CloseSession(request) => {
            session::close(aether, &request.session_id).await?;
            Reply::Done(DoneReply {})
        }
        Request::ListSessions(_) => Reply::Sessions(SessionsReply {
            items: aether.sessions.infos(),
        }),
        Request::Connect(request) => return tunnel::connect(channel, request.port).await,
        _ => return Err(Failure::runtime("this request goes another way").into()),
    };
    Ok(channel.writer.reply(&reply).await?)
}

fn answer_hello(hello: &HelloRequest) -> Result<Reply, Failure> {
    if hello.version != VERSION {
        let detail = format!("this aether speaks version {VERSION}, not {}", hello.version);
        return Err(Failure::new("unsupported", "version", detail));
    }
    Ok(Reply::Hello(HelloReply {
        version: VERSION,
        pid: std::process::id(),
    }))
}

async fn write_stdin(aether: &Rc<Aether>, channel: &mut Channel, request: &WriteStdinRequest) -> Result<Reply, Stop> {
    let process = aether.processes.get(&request.process_id)?;
    loop {
        match channel.reader.input().await {
            Input::Closed => return Err(Stop::Closed),
            Input::End => break,
            Input::Data(data) => {
                let stdin = process.stdin.lock().await;
                let Some(stream) = stdin.as_ref() else {
                    return Err(Failure::new("conflict", "process", "the process takes no input").into());
                };
                tokio::select! {
                    written = stream.write_all(&data) => {
                        if written.is_err() {
                            return Err(Failure::new("conflict", "process", "the process has closed its input").into());
                        }
                    }
                    _ = process.exit.wait() => {
                        return Err(Failure::new("conflict", "process", "the process has ended").into());
                    }
                }
            }
        }
    }
    if request.close {
        exec::close_stdin(&process).await;
    }
    Ok(Reply::Done(DoneReply {}))
}

async fn forget(aether: &Rc<Aether>, id: &str) -> Result<(), Failure> {
    let process = aether.processes.get(id)?;
    process.kill();
    process.gone().await;
    if process.keep {
        // Its background task takes the last output first.
        while process.ended.borrow().is_none() {
            let changed = process.changed.notified();
            if process.ended.borrow().is_some() {
                break;
            }
            changed.await;
        }
    }
    aether.let_go(&process);
    aether.processes.remove(id);
    Ok(())
}
