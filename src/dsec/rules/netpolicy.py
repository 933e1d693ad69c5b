"""What a policy allows: names, addresses, and prefixes within prefixes. The kernel and the gate enforce what is said here."""

import ipaddress
from collections.abc import Mapping, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from dsec.model.network import Allow, NameRule, NetworkAnswer, Policy, Protocol, Via

__all__ = ["PER_PREFIX", "Grounds", "Network", "answer_allows", "inherited", "judge", "matches", "network_of", "normal_form", "plain_name",
           "rule_for", "without"]  # fmt: skip

PER_PREFIX = 8
"""Most allowances of one prefix that the kernel's maps hold."""

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


@lru_cache(maxsize=4096)
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


def inherited(allows: Sequence[Allow]) -> dict[str, tuple[Allow, ...]]:
    """By prefix, all that is allowed for addresses whose longest prefix it is: a longer prefix inherits what shorter ones allow."""
    prefixes = {network_of(allow.network) for allow in allows}
    return {
        str(prefix): tuple(allow for allow in allows if _contains(network_of(allow.network), prefix))
        for prefix in prefixes
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
