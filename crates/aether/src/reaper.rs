//! PID 1's duty: every child that ends is taken at once, whoever its parent was.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use dsec_sys::End;
use tokio::sync::Notify;

use crate::Aether;

/// The end of one child, for those who wait for it.
#[derive(Default)]
pub struct Exit {
    end: Cell<Option<End>>,
    notify: Notify,
}

impl Exit {
    pub fn get(&self) -> Option<End> {
        self.end.get()
    }

    pub async fn wait(&self) -> End {
        loop {
            let notified = self.notify.notified();
            if let Some(end) = self.end.get() {
                return end;
            }
            notified.await;
        }
    }
}

#[derive(Default)]
pub struct Reaper {
    children: RefCell<HashMap<u32, Rc<Exit>>>,
}

impl Reaper {
    /// To be called in the same step as the child's start, before anything waits.
    pub fn expect(&self, pid: u32) -> Rc<Exit> {
        let exit = Rc::new(Exit::default());
        self.children.borrow_mut().insert(pid, exit.clone());
        exit
    }

    fn reaped(&self, pid: u32, end: End) {
        let mut children = self.children.borrow_mut();
        if let Some(exit) = children.remove(&pid) {
            exit.end.set(Some(end));
            exit.notify.notify_waiters();
        }
        if children.is_empty() {
            children.shrink_to_fit();
        }
    }
}

pub async fn run(aether: Rc<Aether>, signals: OwnedFd) -> io::Result<()> {
    let signals = crate::stream::register(signals)?;
    loop {
        let mut ready = signals.readable().await?;
        dsec_sys::drain_signals(signals.get_ref().as_fd());
        ready.clear_ready();
        while let Some((pid, end)) = dsec_sys::reap() {
            aether.reaper.reaped(pid, end);
        }
        aether.groups.sweep();
    }
}
