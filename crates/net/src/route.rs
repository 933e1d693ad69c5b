//! Requests to the kernel's routing socket, many at once: each is acknowledged, and the first that is refused is the error.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use dsec_sys::{Error, Result};
use netlink_packet_core::{
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{protocols::NETLINK_ROUTE, Socket, SocketAddr};

const MAIN: u8 = 254;
const ROOM: usize = 64 * 1024;

/// One request: what, and with which flags.
pub type Request = (RouteNetlinkMessage, u16);

/// A routing socket of the namespace that it was opened in.
pub struct Route {
    socket: Socket,
}

fn failed(op: &'static str, error: &std::io::Error) -> Error {
    Error::from_io(op, Path::new("netlink"), error)
}

impl Route {
    /// Opened in the calling thread's namespace, and stays there.
    pub fn open() -> Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(|e| failed("socket", &e))?;
        socket.bind_auto().map_err(|e| failed("bind", &e))?;
        socket
            .connect(&SocketAddr::new(0, 0))
            .map_err(|e| failed("connect", &e))?;
        Ok(Self { socket })
    }

    /// Carries out all requests, in order. What follows a refused one is tried all the same.
    pub fn ask(&mut self, what: &'static str, requests: Vec<Request>) -> Result<()> {
        match self.try_all(what, requests)?.first() {
            Some(errno) => Err(Error::new(what, "netlink", *errno)),
            None => Ok(()),
        }
    }

    /// As `ask`; answers what was refused, in order.
    pub fn try_all(&mut self, what: &'static str, requests: Vec<Request>) -> Result<Vec<i32>> {
        let (mut bytes, mut waiting) = (Vec::new(), requests.len());
        for (message, flags) in requests {
            let mut header = NetlinkHeader::default();
            header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
            let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
            message.finalize();
            let start = bytes.len();
            bytes.resize(start + message.buffer_len().next_multiple_of(4), 0);
            message.serialize(&mut bytes[start..]);
        }
        self.socket.send(&bytes, 0).map_err(|e| failed(what, &e))?;
        let mut refused = Vec::new();
        while waiting > 0 {
            let mut answer = Vec::with_capacity(ROOM);
            self.socket.recv(&mut answer, 0).map_err(|e| failed(what, &e))?;
            let mut at = 0;
            while at < answer.len() && waiting > 0 {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer[at..])
                    .map_err(|e| Error::new(what, e.to_string(), libc::EBADMSG))?;
                at += (message.header.length as usize).next_multiple_of(4).max(4);
                if let NetlinkPayload::Error(error) = message.payload {
                    waiting -= 1;
                    refused.extend(error.code.map(|code| -code.get()));
                }
            }
        }
        Ok(refused)
    }
}

/// A pair of devices that need no neighbour's address: both ends have one hardware address, so whatever one sends is for the other.
/// `name` is up; `peer`, born in the namespace `home`, is not, since the kernel makes it before it has its other end.
pub fn veth(name: &str, peer: &str, home: BorrowedFd<'_>, mac: [u8; 6], mtu: u32) -> Request {
    let mut far = end(peer, mac, mtu, LinkFlags::Noarp);
    far.attributes.push(LinkAttribute::NetNsFd(home.as_raw_fd()));
    let mut near = end(name, mac, mtu, LinkFlags::Noarp | LinkFlags::Up);
    near.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far))),
    ]));
    (RouteNetlinkMessage::NewLink(near), NLM_F_CREATE | NLM_F_EXCL)
}

fn end(name: &str, mac: [u8; 6], mtu: u32, flags: LinkFlags) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.flags = flags;
    message.header.change_mask = flags;
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Address(mac.to_vec()),
        LinkAttribute::Mtu(mtu),
        // The default is one queue for each CPU that there could be, which costs memory and gains nothing here.
        LinkAttribute::NumTxQueues(1),
        LinkAttribute::NumRxQueues(1),
    ];
    message
}

pub fn up(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    (RouteNetlinkMessage::SetLink(message), 0)
}

pub fn removed(name: &str) -> Request {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
    (RouteNetlinkMessage::DelLink(message), 0)
}

/// Puts a device into a group of devices.
pub fn grouped(name: &str, group: u32) -> Request {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::IfName(name.to_owned()), LinkAttribute::Group(group)];
    (RouteNetlinkMessage::SetLink(message), 0)
}

/// Removes all devices of a group at once.
pub fn group_removed(group: u32) -> Request {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::Group(group)];
    (RouteNetlinkMessage::DelLink(message), 0)
}

fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() {
        32
    } else {
        128
    }
}

/// One address, alone in its network, usable at once.
pub fn address(index: u32, ip: IpAddr) -> Request {
    let mut message = AddressMessage::default();
    message.header.family = family(ip);
    message.header.prefix_len = bits(ip);
    message.header.index = index;
    message.header.flags = AddressHeaderFlags::Nodad;
    message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    (RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_REPLACE)
}

/// Where packets go: `to` (with its length; None: everything) out by `index`, to the next hop `via` where there is one.
pub fn route(to: Option<(IpAddr, u8)>, via: Option<IpAddr>, index: u32, v4: bool) -> Request {
    let mut message = RouteMessage::default();
    message.header.address_family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.table = MAIN;
    message.header.protocol = RouteProtocol::Static;
    message.header.kind = RouteType::Unicast;
    message.header.scope = if via.is_some() {
        RouteScope::Universe
    } else {
        RouteScope::Link
    };
    message.attributes = vec![RouteAttribute::Oif(index)];
    if let Some((ip, length)) = to {
        message.header.destination_prefix_length = length;
        message
            .attributes
            .push(RouteAttribute::Destination(RouteAddress::from(ip)));
    }
    if let Some(hop) = via {
        message.header.flags = RouteFlags::Onlink;
        message
            .attributes
            .push(RouteAttribute::Gateway(RouteAddress::from(hop)));
    }
    (RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_REPLACE)
}

/// Packets with `mark` are delivered here, whatever their address: a rule and its table of one route.
pub fn delivered_here(mark: u32, table: u8, loopback: u32, v4: bool) -> [Request; 2] {
    let mut rule = RuleMessage::default();
    rule.header.family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    rule.header.table = table;
    rule.header.action = RuleAction::ToTable;
    rule.attributes = vec![RuleAttribute::FwMark(mark), RuleAttribute::Priority(100)];
    let mut all = RouteMessage::default();
    all.header.address_family = rule.header.family;
    all.header.table = table;
    all.header.protocol = RouteProtocol::Static;
    all.header.kind = RouteType::Local;
    all.header.scope = RouteScope::Host;
    all.attributes = vec![RouteAttribute::Oif(loopback)];
    [
        (RouteNetlinkMessage::NewRule(rule), NLM_F_CREATE),
        (RouteNetlinkMessage::NewRoute(all), NLM_F_CREATE | NLM_F_REPLACE),
    ]
}
