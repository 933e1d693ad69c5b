"""The network of a sandbox: what a caller asks for, the policy that follows from it, and records of what was tried."""

from typing import Literal

from msgspec import Struct

__all__ = [
    "Address", "Allow", "Flow", "Link", "MirrorKind", "MirrorRule", "NameRule", "NetCounts", "NetLimits", "NetworkAnswer", "NetworkChange",
    "NetworkInForce", "NetworkRule", "NetworkRules", "NetworkValue", "NetworkView", "Policy", "Protocol", "Service", "Verdict", "Via",
]  # fmt: skip

Protocol = Literal["tcp", "udp", "icmp", "any"]
Via = Literal["direct", "relay"]
Verdict = Literal["allowed", "refused"]
MirrorKind = Literal["pypi", "npm", "goproxy", "plain"]


class NetworkRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a caller allows under one name.

    A rule of its own names `hosts` ("a.test", or "*.a.test" for all names below) or `cidrs` ("203.0.113.0/24", "2001:db8::/32"), `ports`
    (80, or "8000-8100"; none: 80 and 443 of hosts, all of cidrs), and `protocols` (none: tcp). `strict`: a host's name is checked in TLS and
    HTTP too; False: the addresses of its name alone are. Options of a service: `before` (a date, YYYY-MM-DD: releases from before it alone)
    and `modules` (path prefixes). `credential`: name of one that the operator holds, added on the way.
    """

    hosts: tuple[str, ...] = ()
    cidrs: tuple[str, ...] = ()
    ports: tuple[int | str, ...] = ()
    protocols: tuple[Protocol, ...] = ()
    strict: bool = True
    before: str | None = None
    modules: tuple[str, ...] = ()
    credential: str | None = None


NetworkValue = bool | NetworkRule | tuple[NetworkRule, ...]
NetworkRules = dict[str, NetworkValue]


class NetLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds of one sandbox: bytes a second out and in (None: none), flows at once, and new flows a second."""

    egress_bytes_s: int | None = None
    ingress_bytes_s: int | None = None
    flows: int = 4096
    new_flows_s: int = 500


class Allow(Struct, frozen=True, kw_only=True):
    """Addresses that may be reached: a prefix, a protocol, ports `low` to `high`. `via` relay: only through the node's relay."""

    network: str
    protocol: Protocol = "tcp"
    low: int = 0
    high: int = 65535
    via: Via = "direct"


class NameRule(Struct, frozen=True, kw_only=True):
    """Names that may be resolved: `pattern` in lower case without a last dot. `strict`: reached through the relay alone (TCP).

    `service`: the name in the caller's rules that it comes from. `credential`: name of what the relay adds, "" for nothing.
    """

    pattern: str
    ports: tuple[tuple[int, int], ...]
    protocols: tuple[Protocol, ...] = ("tcp",)
    strict: bool = True
    service: str = ""
    credential: str = ""


class MirrorRule(Struct, frozen=True, kw_only=True):
    """A mirror of the node that a sandbox may use. `before`: Unix seconds, releases uploaded earlier alone; `modules`: path prefixes."""

    kind: MirrorKind
    port: int
    before: float | None = None
    modules: tuple[str, ...] = ()
    credential: str = ""


class Service(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name that rules may allow, as this node provides it. `mirror`: a mirror of the node at `port` of the gateway stands before `hosts`;
    None: sandboxes reach `hosts` at `ports` by name. `env`: set in the sandbox; {mirror} is the mirror's URL, {gateway} its address.
    `why_not`: why this node cannot provide it; "" where it can.
    """

    name: str
    mirror: MirrorKind | None = None
    port: int = 0
    hosts: tuple[str, ...] = ()
    ports: tuple[int | str, ...] = (443,)
    env: dict[str, str] = {}
    credential: str = ""
    why_not: str = ""


class Policy(Struct, frozen=True, kw_only=True):
    """What one sandbox may reach; empty: nothing. `mirrors` by the service's name. `group`: sandboxes of a private network, already told apart by project."""

    allows: tuple[Allow, ...] = ()
    names: tuple[NameRule, ...] = ()
    mirrors: dict[str, MirrorRule] = {}
    limits: NetLimits = NetLimits()
    group: str = ""
    aliases: tuple[str, ...] = ()


class Address(Struct, frozen=True, kw_only=True):
    """Where a sandbox is on the node's network."""

    slot: int
    v4: str
    v6: str


class Flow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One connection or attempt. Times are Unix seconds (`ended` None: still there). `name`: the host asked for, where known.

    `pid` (on the node) and `comm` are what the sandbox's program said of itself when it connected: the tenant supplies them.
    """

    at: float
    verdict: Verdict
    address: str = ""
    port: int = 0
    protocol: str = ""
    ended: float | None = None
    reason: str = ""
    name: str = ""
    bytes_out: int = 0
    bytes_in: int = 0
    pid: int | None = None
    comm: str = ""


class NetworkAnswer(Struct, frozen=True, kw_only=True):
    """Addresses that the resolver found for `name`, allowed by `rule`, true for `seconds`. `addresses` are v4 and v6 texts."""

    name: str
    rule: NameRule
    addresses: tuple[str, ...]
    seconds: float


class Link(Struct, frozen=True, kw_only=True):
    """What a sandbox begins with: its policy, and the number of its group (0: none)."""

    policy: Policy
    group: int = 0


class NetworkChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Other rules for a sandbox that has a network: exactly one of `rules`, all that is allowed from now on, and `phase`, a name of its
    network_phases."""

    rules: NetworkRules | None = None
    phase: str | None = None


class NetworkInForce(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the journal keeps of a sandbox's network: the rules and phase last asked for, and why all is refused instead ("" if not)."""

    rules: NetworkRules
    phase: str | None = None
    refused: str = ""


class NetCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts since the sandbox began or the node's server did, whichever is later. Bytes are of flows that have ended."""

    allowed: int = 0
    refused: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


class NetworkView(Struct, frozen=True, kw_only=True):
    """The network of a sandbox now. `rules` are those in force as they were asked for, None for a sandbox without a network; `refused`: why
    everything is refused whatever the rules say, "" where it is not. `allows`: what the kernel's maps hold, answers of names in use
    included. `v4`, `v6`: the sandbox's addresses.
    """

    rules: NetworkRules | None
    phase: str | None = None
    phases: tuple[str, ...] = ()
    limits: NetLimits = NetLimits()
    group: str | None = None
    aliases: tuple[str, ...] = ()
    v4: str = ""
    v6: str = ""
    allows: tuple[Allow, ...] = ()
    names: tuple[NameRule, ...] = ()
    counts: NetCounts = NetCounts()
    refused: str = ""
