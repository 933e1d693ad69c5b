"""What a policy allows: names, addresses, and prefixes within prefixes. The kernel and the gate enforce what is said here."""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from dsec.model.network import Allow, NameRule, NetworkAnswer, Policy, Protocol, Via

__all__ = ["CARRIERS", "FORBIDDEN", "GUARDED", "NEVER", "PER_PREFIX", "Grounds", "Network", "Prefixes", "answer_allows", "inherited", "judge", "matches", "network_of", "normal_form", "plain_name",
           "rule_for", "without"]  # fmt: skip

PER_PREFIX = 8
"""Most allowances of one prefix that the kernel's maps hold."""

NEVER = (
    "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32",
    "::/64", "fe80::/9", "ff00::/8", "fd00:ec2::254/128", "fd20:ce::254/128",
)  # fmt: skip
"""Loopback, link-local, multicast, reserved, IPv4 written as IPv6, and where clouds keep secrets: no rule opens them, and no name leads there."""

CARRIERS = ("64:ff9b::/32", "2001::/32", "2002::/16")
"""IPv6 that carries IPv4 to a translator on the way (NAT64, Teredo, 6to4): where it ends cannot be judged in the kernel."""

FORBIDDEN = NEVER + CARRIERS
"""What no rule opens. The kernel's program refuses the same by itself; a test holds the two equal."""

GUARDED = (
    "10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "fc00::/7",
)  # fmt: skip
"""Private prefixes: a name never leads there, a rule by address may."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Grounds(Struct, frozen=True, kw_only=True):
    """What of a node decides about rules. `forbidden`: prefixes that no rule opens; `guarded`: prefixes that a name never leads to, though a rule
    by address may; `credentials`: names that the operator holds; `links`: whether sandboxes can be linked at all, `why_not` if not."""

    gateway_v4: str
    gateway_v6: str
    forbidden: tuple[str, ...]
    guarded: tuple[str, ...] = ()
    credentials: frozenset[str] = frozenset()
    why_not: str = ""


@lru_cache(maxsize=16384)
def network_of(text: str) -> Network:
    """The prefix that `text` writes. Raises ValueError for host bits that are set, and for anything else."""
    return ipaddress.ip_network(text)


def plain_name(name: str) -> str:
    """A name as rules compare it: lower case, without the last dot."""
    return name.lower().removesuffix(".")


def matches(pattern: str, name: str) -> bool:
    """Whether a plain `name` is `pattern`, or for "*.x" lies below x at any depth."""
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) > len(pattern) - 1
    return name == pattern


def rule_for(policy: Policy, name: str, port: int | None = None, protocol: Protocol | None = None) -> NameRule | None:
    """The first rule that allows `name`, and `port` and `protocol` where given; rules without a wildcard before those with one."""
    plain = plain_name(name)
    found = [rule for rule in policy.names if matches(rule.pattern, plain)]
    for rule in sorted(found, key=lambda rule: (rule.pattern.startswith("*"), -len(rule.pattern))):
        if port is not None and not any(low <= port <= high for low, high in rule.ports):
            continue
        if protocol is not None and protocol not in rule.protocols and "any" not in rule.protocols:
            continue
        return rule
    return None


def _contains(outer: Network, inner: Network) -> bool:
    return outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]


class Prefixes:
    """Some prefixes, by length: which of them hold another is found without asking each, of which a caller may give thousands."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._by_length: dict[tuple[int, int], dict[int, str]] = {}
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        network = network_of(text)
        self._by_length.setdefault((network.version, network.prefixlen), {})[int(network.network_address)] = text

    def discard(self, text: str) -> None:
        network = network_of(text)
        self._by_length.get((network.version, network.prefixlen), {}).pop(int(network.network_address), None)

    def over(self, text: str) -> list[str]:
        """Those that hold the prefix `text`, itself among them."""
        network = network_of(text)
        number = int(network.network_address)
        found = []
        for (version, length), known in self._by_length.items():
            if version == network.version and length <= network.prefixlen:
                shift = network.max_prefixlen - length
                if (over := known.get(number >> shift << shift)) is not None:
                    found.append(over)
        return found


def inherited(allows: Sequence[Allow]) -> dict[str, tuple[Allow, ...]]:
    """By prefix, all that is allowed for addresses whose longest prefix it is: a longer prefix inherits what shorter ones allow."""
    by_prefix: dict[str, list[int]] = {}
    for number, allow in enumerate(allows):
        by_prefix.setdefault(str(network_of(allow.network)), []).append(number)
    prefixes = Prefixes(by_prefix)
    return {
        prefix: tuple(allows[number] for number in sorted(n for over in prefixes.over(prefix) for n in by_prefix[over]))
        for prefix in by_prefix
    }


def without(network: Network, holes: Sequence[Network]) -> list[Network]:
    """The prefixes that make up `network` without `holes`."""
    parts = [network]
    for hole in holes:
        left: list[Network] = []
        for part in parts:
            if _contains(hole, part):
                continue
            if _contains(part, hole):
                left.extend(part.address_exclude(hole))  # type: ignore[arg-type]
            else:
                left.append(part)
        parts = left
    return sorted(parts, key=lambda part: (part.version, part))


def answer_allows(
    answer: NetworkAnswer, rule: NameRule, grounds: Grounds, direct: Sequence[Allow]
) -> tuple[Allow, ...]:
    """What an answer opens; addresses that are forbidden, or guarded and not allowed by address, are left out (rebinding)."""
    closed = [network_of(text) for text in (*grounds.forbidden, *grounds.guarded)]
    open_ = [network_of(allow.network) for allow in direct]
    never = [network_of(text) for text in grounds.forbidden]
    found: list[Allow] = []
    for text in answer.addresses:
        address = _unmapped(text)
        host = network_of(str(address))
        if any(_contains(hole, host) for hole in never):
            continue
        if any(_contains(hole, host) for hole in closed) and not any(_contains(prefix, host) for prefix in open_):
            continue
        via: Via = "relay" if rule.strict else "direct"
        for low, high in rule.ports:
            found.extend(
                Allow(network=str(host), protocol=protocol, low=low, high=high, via=via) for protocol in rule.protocols
            )
    return tuple(found)


def _unmapped(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def judge(
    policy: Policy,
    address: str,
    port: int,
    protocol: Protocol,
    answers: Mapping[str, Sequence[Allow]] | None = None,
) -> Via | None:
    """How a new flow goes, None where it is refused: the sentence that the kernel must agree with. `answers`: what names in use
    have opened by now, by name. Where several allowances fit, `direct` wins."""
    host = network_of(str(_unmapped(address)))
    opened = [allow for allows in (answers or {}).values() for allow in allows]
    fitting = {
        allow.via
        for allow in (*policy.allows, *opened)
        if _contains(network_of(allow.network), host)
        and allow.protocol in (protocol, "any")
        and (protocol == "icmp" or allow.low <= port <= allow.high)
    }
    return "direct" if "direct" in fitting else "relay" if fitting else None


def normal_form(policy: Policy) -> Policy:
    """The same policy in one spelling: sorted, nothing said twice. Equal for rules that mean the same but for overlaps."""
    return replace(
        policy,
        allows=tuple(sorted(set(policy.allows), key=_order)),
        names=tuple(
            sorted(
                set(policy.names), key=lambda r: (r.pattern, r.service, r.ports, r.protocols, r.strict, r.credential)
            )
        ),
        mirrors=dict(sorted(policy.mirrors.items())),
        aliases=tuple(sorted(set(policy.aliases))),
    )


def _order(allow: Allow) -> tuple[object, ...]:
    prefix = network_of(allow.network)
    return (
        prefix.version,
        int(prefix.network_address),
        prefix.prefixlen,
        allow.protocol,
        allow.low,
        allow.high,
        allow.via,
    )
