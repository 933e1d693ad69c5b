//! File operations. Each runs in a forked child of aether that has entered the sandbox as the asked user, so that every
//! permission is the kernel's own judgement; it takes the connection with it and executes nothing.

mod entries;
mod list;
mod read;
mod remove;
mod tree_read;
mod tree_write;
mod watch;
mod wire;
mod write;

use std::cell::Cell;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use dsec_proto::{put_message, Request};
use dsec_sys::{End, Entry};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SendFlags;

use crate::accounts;
use crate::channel::Channel;
use crate::failure::Failure;
use crate::Aether;

use wire::{Gone, Wire};

/// Deputies at once; watches stay, so they are counted apart.
const MOST_HELPERS: usize = 64;
const MOST_WATCHES: usize = 32;
/// How often a helper that takes long is looked after.
const LOOK: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct Deputies {
    working: Cell<usize>,
    watching: Cell<usize>,
}

/// Why a helper stops: something to tell the edge, or nobody to tell.
#[derive(Debug)]
pub enum Halt {
    Failed(Failure),
    Gone,
}

impl From<Failure> for Halt {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Gone> for Halt {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}

type Done = Result<(), Halt>;

fn user_of(request: &Request) -> Option<&str> {
    Some(match request {
        Request::FileStat(request) => &request.user,
        Request::FileRead(request) => &request.user,
        Request::FileWrite(request) => &request.user,
        Request::FileList(request) => &request.user,
        Request::FileMkdir(request) => &request.user,
        Request::FileMove(request) => &request.user,
        Request::FileRemove(request) => &request.user,
        Request::TreeRead(request) => &request.user,
        Request::TreeWrite(request) => &request.user,
        Request::FileWatch(request) => &request.user,
        _ => return None,
    })
}

pub fn is_file_request(request: &Request) -> bool {
    user_of(request).is_some()
}

/// Hands the connection to a helper and waits for its end.
pub async fn serve(aether: &Rc<Aether>, mut channel: Channel, request: Request) {
    let watch = matches!(request, Request::FileWatch(_));
    let (count, most) = match watch {
        true => (&aether.files.watching, MOST_WATCHES),
        false => (&aether.files.working, MOST_HELPERS),
    };
    let account = accounts::resolve(user_of(&request).unwrap_or(""));
    let refusal = match (&account, count.get() < most) {
        (_, false) => Some(Failure::limit(if watch { "watches" } else { "file_operations" })),
        (Err(failure), _) => Some(failure.clone()),
        (Ok(_), true) => None,
    };
    let (Ok(account), None) = (account, &refusal) else {
        if let Some(failure) = refusal {
            channel.refuse(&failure.reply()).await;
        }
        return;
    };
    let Ok((socket, ahead)) = channel.take_apart() else {
        return;
    };
    count.set(count.get() + 1);
    let ended = help(aether, &account, &socket, ahead, &request).await;
    count.set(count.get() - 1);
    if let Err(failure) = ended {
        tell(&socket, failure);
    }
}

async fn help(
    aether: &Rc<Aether>,
    account: &accounts::Account,
    socket: &UnixStream,
    ahead: Vec<u8>,
    request: &Request,
) -> Result<(), Failure> {
    let entry = Entry {
        tasks: &aether.sandbox.task_files(),
        userns: aether.sandbox.userns.as_fd(),
        uid: account.uid,
        gid: account.gid,
        groups: &account.groups,
        capabilities: aether.sandbox.capabilities,
        no_new_privileges: true,
        filter: &[],
    };
    let pid = dsec_sys::fork_helper(&entry, socket.as_fd(), |entered| {
        work(Wire::new(socket, ahead), request, entered);
        0
    });
    let pid = pid.map_err(|error| Failure::kernel(&error))?;
    let exit = aether.reaper.expect(pid);
    let end = loop {
        match tokio::time::timeout(LOOK, exit.wait()).await {
            Ok(end) => break end,
            // Stopped from inside, it would not see that nobody waits for it any more, and keep its place for good.
            Err(_) if is_abandoned(socket) => {
                // Not taken by the reaper yet, so the number is still its own.
                let _ = dsec_sys::kill(pid, libc::SIGKILL);
                break exit.wait().await;
            }
            Err(_) => {}
        }
    };
    match end {
        End::Exited(0) => Ok(()),
        End::Exited(status) => Err(Failure::runtime(format!(
            "the file operation ended with status {status}"
        ))),
        End::Killed(signal) => Err(Failure::runtime(format!(
            "the file operation was killed by signal {signal}"
        ))),
    }
}

/// The edge has closed the connection.
fn is_abandoned(socket: &UnixStream) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
}

/// Says that a helper died. If it died inside a frame the edge sees a broken protocol, which is as true.
fn tell(socket: &UnixStream, failure: Failure) {
    let mut frame = Vec::new();
    if put_message(&mut frame, &failure.reply()).is_ok() {
        let _ = rustix::net::send(socket, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

fn work(mut wire: Wire<'_>, request: &Request, entered: Result<(), i32>) {
    let entered = entered.map_err(|errno| Failure::runtime(format!("the sandbox cannot be entered: errno {errno}")));
    let done = match entered {
        Ok(()) => carry_out(&mut wire, request),
        Err(failure) => Err(failure.into()),
    };
    if let Err(Halt::Failed(failure)) = done {
        // The edge may be gone; it then learns nothing.
        if wire.reply(&failure.reply()).is_ok() {
            wire.drop_input();
        }
    }
}

fn carry_out(wire: &mut Wire<'_>, request: &Request) -> Done {
    match request {
        Request::FileStat(request) => entries::stat(wire, request),
        Request::FileRead(request) => read::read(wire, request),
        Request::FileWrite(request) => write::write(wire, request),
        Request::FileList(request) => list::list(wire, request),
        Request::FileMkdir(request) => entries::mkdir(wire, request),
        Request::FileMove(request) => entries::rename(wire, request),
        Request::FileRemove(request) => remove::remove(wire, request),
        Request::TreeRead(request) => tree_read::tree_read(wire, request),
        Request::TreeWrite(request) => tree_write::tree_write(wire, request),
        Request::FileWatch(request) => watch::watch(wire, request),
        _ => Err(Failure::runtime("not a file operation").into()),
    }
}
