"""The records that the server and the BPF programs share: bpf/maps.h, in Python. A test holds the sizes equal."""

import ipaddress
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsec.model.network import Allow, NetLimits, Protocol, Via

__all__ = [
    "ALLOWS", "OVER", "Box", "EventRecord", "FlowKey", "FlowRecord", "Rule", "SIZES", "address_text", "allows_key", "ever_opened", "opened_of",
    "pack_rules", "packed_address",
    "packed_node", "prefix_of", "unpack_rules",
]  # fmt: skip

ALLOWS = 16
"""Most rules of one prefix."""

_PROTOCOLS: dict[Protocol, int] = {"any": 0, "icmp": 1, "tcp": 6, "udp": 17}
_NAMES: dict[int, Protocol] = {number: name for name, number in _PROTOCOLS.items()}
_VIA: tuple[Via, ...] = ("direct", "relay")
_USED, _INHERITED = 1, 2

OVER = 12
"""The reason of an event that is no refusal: a flow whose place another took."""

_node = struct.Struct("<4s4s4sI16s16s")
_box = struct.Struct("<IIII4sIII16sQQ")
_rule = struct.Struct("<BBHHHQ")
_rules_key = struct.Struct("<I4sB16s")
_flow_key = struct.Struct("<IBBHHH16s")
_flow = struct.Struct("<IBBHQQQQI16sI")
_event = struct.Struct("<QIBBBBHH16sI16sQQQ")

SIZES = {
    "nodes": (4, _node.size), "boxes": (4, _box.size), "meters": (4, 64), "groups": (4, 4), "swept": (4, 8), "lost": (4, 8), "shared": (4, 8),
    "rules": (_rules_key.size, _rule.size * ALLOWS), "flows": (_flow_key.size, _flow.size), "callers": (28, 20),
}  # fmt: skip
"""Bytes of key and value of each map."""

METER = b"\0" * 64


def ever_opened(meter: bytes) -> bool:
    """Whether the sandbox began a flow."""
    return int.from_bytes(meter[32:40], "little") > 0


def opened_of(meter: bytes) -> int:
    """Flows that a sandbox has begun, less those that its own packets ended."""
    return int.from_bytes(meter[32:40], "little")


def packed_address(text: str) -> bytes:
    """As the programs compare it: 16 bytes, IPv4 in the first four."""
    return ipaddress.ip_address(text).packed.ljust(16, b"\0")


def address_text(packed: bytes, family: int) -> str:
    return str(ipaddress.ip_address(packed[:4] if family == 4 else packed))


def packed_node(
    v4: ipaddress.IPv4Network, v6: ipaddress.IPv6Network, gateways: tuple[str, str], relay_port: int
) -> bytes:
    gateway = ipaddress.ip_address(gateways[0]).packed
    return _node.pack(
        v4.network_address.packed,
        v4.netmask.packed,
        gateway,
        relay_port,
        v6.network_address.packed,
        packed_address(gateways[1]),
    )


class Box(NamedTuple):
    """What the programs know of a sandbox. `netns`: inode of its network namespace."""

    slot: int
    view: int
    group: int
    netns: int
    v4: str
    v6: str
    limits: NetLimits

    def pack(self) -> bytes:
        limits = self.limits
        return _box.pack(
            self.slot, self.view, self.group, self.netns, ipaddress.ip_address(self.v4).packed, limits.flows, limits.new_flows_s, 0,
            packed_address(self.v6), limits.egress_bytes_s or 0, limits.ingress_bytes_s or 0,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> "Box":
        slot, view, group, netns, v4, flows, new_flows, _, v6, egress, ingress = _box.unpack(data)
        limits = NetLimits(
            egress_bytes_s=egress or None, ingress_bytes_s=ingress or None, flows=flows, new_flows_s=new_flows
        )
        return cls(slot, view, group, netns, address_text(v4, 4), address_text(v6, 6), limits)


class Rule(NamedTuple):
    """One allowance of a prefix. `expires`: nanoseconds since boot, 0 never. `inherited`: from a shorter prefix."""

    protocol: Protocol
    low: int
    high: int
    via: Via
    expires: int = 0
    inherited: bool = False

    @classmethod
    def of(cls, allow: Allow, expires: int, prefix: str) -> "Rule":
        return cls(allow.protocol, allow.low, allow.high, allow.via, expires, allow.network != prefix)

    def allow(self, prefix: str) -> Allow:
        return Allow(network=prefix, protocol=self.protocol, low=self.low, high=self.high, via=self.via)


def allows_key(view: int, prefix: str) -> bytes:
    """The key of a view's rules for a prefix."""
    network = ipaddress.ip_network(prefix)
    packed = network.network_address.packed.ljust(16, b"\0")
    return _rules_key.pack(40 + network.prefixlen, view.to_bytes(4, "big"), network.version, packed)


def prefix_of(key: bytes) -> tuple[int, str]:
    """The view and the prefix of a key."""
    bits, view, family, packed = _rules_key.unpack(key)
    return int.from_bytes(view, "big"), f"{address_text(packed, family)}/{bits - 40}"


def pack_rules(rules: Sequence[Rule]) -> bytes:
    """Direct rules first, so that they win over the relay. Raises ValueError for more than ALLOWS."""
    if len(rules) > ALLOWS:
        raise ValueError(f"{len(rules)} rules for one prefix")
    packed = b"".join(
        _rule.pack(
            _PROTOCOLS[rule.protocol], _VIA.index(rule.via), rule.low, rule.high,
            _USED | (_INHERITED if rule.inherited else 0), rule.expires,
        )
        for rule in sorted(rules, key=lambda rule: _VIA.index(rule.via))
    )  # fmt: skip
    return packed.ljust(_rule.size * ALLOWS, b"\0")


def unpack_rules(data: bytes) -> Iterable[Rule]:
    for protocol, via, low, high, flags, expires in _rule.iter_unpack(data):
        if flags & _USED:
            yield Rule(_NAMES[protocol], low, high, _VIA[via], expires, bool(flags & _INHERITED))


_TRANSPORT = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}


class FlowKey(NamedTuple):
    """Which flow: the link's number in the router, and the far end."""

    ifindex: int
    protocol: str
    port: int
    far_port: int
    far: str

    @classmethod
    def unpack(cls, data: bytes) -> "FlowKey":
        ifindex, family, protocol, port, far_port, _, far = _flow_key.unpack(data)
        return cls(ifindex, _TRANSPORT[protocol], port, far_port, address_text(far, family))


class FlowRecord(NamedTuple):
    """What the programs keep of a flow. Times in nanoseconds since boot. `shared`: of those that all sandboxes have together."""

    view: int
    via: Via
    state: int
    begun: int
    seen: int
    bytes_out: int
    bytes_in: int
    pid: int
    comm: str
    shared: bool

    @classmethod
    def unpack(cls, data: bytes) -> "FlowRecord":
        view, via, state, shared, begun, seen, out, back, pid, comm, _ = _flow.unpack(data)
        return cls(view, _VIA[via], state, begun, seen, out, back, pid, _text(comm), bool(shared))


class EventRecord(NamedTuple):
    """A begun flow (`reason` 0), a refusal, or the end (OVER) of a flow that `begun` and carried bytes."""

    at: int
    slot: int
    reason: int
    protocol: str
    port: int
    far_port: int
    far: str
    pid: int
    comm: str
    begun: int
    bytes_out: int
    bytes_in: int

    @classmethod
    def unpack(cls, data: bytes) -> "EventRecord":
        at, slot, reason, _, family, protocol, port, far_port, far, pid, comm, begun, out, back = _event.unpack(
            data[: _event.size]
        )
        name = _TRANSPORT.get(protocol, str(protocol))
        return cls(
            at, slot, reason, name, port, far_port, address_text(far, family), pid, _text(comm), begun, out, back
        )


def _text(comm: bytes) -> str:
    return comm.split(b"\0", 1)[0].decode("utf-8", "replace")
