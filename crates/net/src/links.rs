//! The router of a node and the links to it: from the host, and from each sandbox.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use dsec_sys::{device_index, within, Error, Result};

use crate::hook::Hook;
use crate::route::{address, delivered_here, group_removed, grouped, removed, route, up, veth, Route};

/// What every device of ours has for a hardware address: locally administered, and the same at both ends of a link.
const MAC: [u8; 6] = [0x02, 0xd5, 0xec, 0, 0, 1];
const LOOPBACK: u32 = 1;
/// Devices that are about to be removed, all at once, are in this group.
const LEAVING: u32 = 0xd5ec;
const INSIDE: &str = "eth0";
/// The router's end of the link from the host, and next hops on that link, which nobody has to own.
const UPLINK: &str = "up0";
const HOP_V4: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 1, 1));
const HOP_V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// The two addresses of one end.
#[derive(Debug, Clone, Copy)]
pub struct Ends {
    pub v4: IpAddr,
    pub v6: IpAddr,
}

/// `host`: the namespace of the server; `router`: that of the node's router.
pub struct Links {
    host: OwnedFd,
    router: OwnedFd,
    to_host: Mutex<Route>,
    to_router: Mutex<Route>,
}

fn locked<T>(what: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    /// # Errors
    /// EPERM without privilege.
    pub fn open(host: OwnedFd, router: OwnedFd) -> Result<Self> {
        let to_host = Mutex::new(within(host.as_fd(), Route::open)?);
        let to_router = Mutex::new(within(router.as_fd(), Route::open)?);
        Ok(Self {
            host,
            router,
            to_host,
            to_router,
        })
    }

    /// Links host and router by the host's device `name`, and gives the router its addresses and ways.
    ///
    /// # Errors
    /// EEXIST where the host has such a device.
    pub fn uplink(&self, name: &str, gateway: Ends, mtu: u32, relay_mark: u32) -> Result<()> {
        locked(&self.to_host).ask("uplink", vec![veth(name, UPLINK, self.router.as_fd(), MAC, mtu)])?;
        let index = self.index(UPLINK)?;
        let mut requests = vec![
            up(LOOPBACK),
            up(index),
            address(LOOPBACK, gateway.v4),
            address(LOOPBACK, gateway.v6),
            route(None, Some(HOP_V4), index, true),
            route(None, Some(HOP_V6), index, false),
        ];
        for v4 in [true, false] {
            requests.extend(delivered_here(relay_mark, 100, LOOPBACK, v4));
        }
        locked(&self.to_router).ask("router", requests)
    }

    /// Tells the host that two networks of sandboxes are behind its device `name`.
    ///
    /// # Errors
    /// ENODEV where there is no such device.
    pub fn behind(&self, name: &str, v4: (IpAddr, u8), v6: (IpAddr, u8)) -> Result<()> {
        let index = within(self.host.as_fd(), || device_index(name))?;
        let requests = vec![
            route(Some(v4), Some(HOP_V4), index, true),
            route(Some(v6), Some(HOP_V6), index, false),
        ];
        locked(&self.to_host).ask("routes", requests)
    }

    /// Puts a device into `sandbox`, whose other end is the router's device `name`, judged by `hook` before it exists for anybody.
    ///
    /// # Errors
    /// EEXIST where the router has such a device. What was begun is undone.
    pub fn link(
        &self,
        name: &str,
        sandbox: BorrowedFd<'_>,
        own: Ends,
        gateway: Ends,
        mtu: u32,
        hook: &Hook,
    ) -> Result<u32> {
        locked(&self.to_router).ask("link", vec![veth(name, INSIDE, sandbox, MAC, mtu)])?;
        self.furnish(name, sandbox, own, gateway, hook).inspect_err(|_| {
            // The first failure is the one to tell.
            let _ = self.unlink(&[name.to_owned()]);
        })
    }

    fn furnish(&self, name: &str, sandbox: BorrowedFd<'_>, own: Ends, gateway: Ends, hook: &Hook) -> Result<u32> {
        let index = within(self.router.as_fd(), || {
            let index = device_index(name)?;
            hook.judge(name)?;
            Ok(index)
        })?;
        let requests = vec![
            route(Some((own.v4, 32)), None, index, true),
            route(Some((own.v6, 128)), None, index, false),
        ];
        locked(&self.to_router).ask("routes", requests)?;
        within(sandbox, || {
            let inside = device_index(INSIDE)?;
            hook.watch(INSIDE)?;
            Route::open()?.ask(
                "addresses",
                vec![
                    up(inside),
                    address(inside, own.v4),
                    address(inside, own.v6),
                    route(None, Some(gateway.v4), inside, true),
                    route(None, Some(gateway.v6), inside, false),
                ],
            )
        })?;
        Ok(index)
    }

    /// Removes the router's devices `names`, as far as they are there, and with each the sandbox's end. The kernel waits for all CPUs
    /// several times for one removal, and no oftener for many.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn unlink(&self, names: &[String]) -> Result<()> {
        let mut requests: Vec<_> = names.iter().map(|name| grouped(name, LEAVING)).collect();
        requests.push(group_removed(LEAVING));
        let refused = locked(&self.to_router).try_all("unlink", requests)?;
        match refused.into_iter().find(|errno| *errno != libc::ENODEV) {
            Some(errno) => Err(Error::new("unlink", "netlink", errno)),
            None => Ok(()),
        }
    }

    /// Removes the host's device `name`, and the router's end of it.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn cut_uplink(&self, name: &str) -> Result<bool> {
        absent(locked(&self.to_host).ask("unlink", vec![removed(name)]))
    }

    /// The number of the router's device `name`.
    ///
    /// # Errors
    /// ENODEV where there is none.
    pub fn index(&self, name: &str) -> Result<u32> {
        within(self.router.as_fd(), || device_index(name))
    }

    /// Whether the host has the device `name`.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn has_uplink(&self, name: &str) -> Result<bool> {
        absent(within(self.host.as_fd(), || device_index(name).map(|_| ())))
    }
}

fn absent(done: Result<()>) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(Error { errno, .. }) if errno == libc::ENODEV => Ok(false),
        Err(error) => Err(error),
    }
}
