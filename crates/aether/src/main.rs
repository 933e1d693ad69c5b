//! aether: PID 1 of a sandbox. Starts what the edge asks for, in the sandbox's user namespace, and carries bytes.
//!
//! It serves one operation a connection (docs/protocol.md), on one thread. It holds no power in the host's user namespace,
//! executes nothing of the sandbox's for itself, and is out of the sandbox's reach.
#![forbid(unsafe_code)]

mod accounts;
mod boot;
mod channel;
mod command;
mod connection;
mod exec;
mod failure;
mod files;
mod groups;
mod process;
mod reaper;
mod ring;
mod session;
mod session_run;
mod stream;
mod tunnel;

use std::process::ExitCode;
use std::rc::Rc;

use boot::Sandbox;

/// What everything in aether shares.
pub struct Aether {
    pub sandbox: Sandbox,
    pub groups: groups::Groups,
    pub reaper: reaper::Reaper,
    pub processes: process::Processes,
    pub sessions: session::Sessions,
    pub files: files::Deputies,
}

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The launcher gives descriptor 2 to its own log; the sandbox cannot read it.
            eprintln!("aether: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<(), boot::BootError> {
    let signals = dsec_sys::become_init()?;
    let (sandbox, listener) = boot::read()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_io_events_per_tick(64)
        .build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async move {
        let aether = Rc::new(Aether {
            groups: groups::Groups::new(sandbox.cgroup.try_clone()?),
            sandbox,
            reaper: reaper::Reaper::default(),
            processes: process::Processes::default(),
            sessions: session::Sessions::default(),
            files: files::Deputies::default(),
        });
        let reaping = reaper::run(aether.clone(), signals);
        let serving = connection::accept(aether, listener);
        tokio::select! {
            end = reaping => end?,
            end = serving => end?,
        }
        Ok(())
    })
}
