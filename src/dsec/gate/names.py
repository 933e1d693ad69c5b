"""From an allowed name to addresses, for the resolver and the relay alike.

Answers are kept for each sandbox by itself: what one has asked for shows to no other, not by speed either.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver
from msgspec import Struct

from dsec.gate.reach import Reach
from dsec.gate.refusal import Refused
from dsec.gate.settings import GateSettings
from dsec.gate.tenants import Tenant
from dsec.model.network import NameRule, NetworkAnswer, Policy
from dsec.rules.netpolicy import rule_for

__all__ = ["GRACE_SECONDS", "Found", "Names", "resolver_of"]

SHORTEST_TTL, LONGEST_TTL = 1, 300
# How much longer than the sandbox may keep an answer its addresses stay open.
GRACE_SECONDS = 30
MOST_ADDRESSES = 8
_LOOKUP_SECONDS = 6.0
_CHAIN = 8
_KEPT_ANSWERS = 256
# In front of a wildcard's own part.
_WILDCARD_BYTES, _WILDCARD_LABELS = 100, 5

OnAnswer = Callable[[int, NetworkAnswer], Awaitable[None]]


class Found(Struct, frozen=True):
    """Addresses of one family, best for `ttl` seconds from when they came; `exists`: the name has something of another kind."""

    addresses: tuple[str, ...]
    ttl: int
    exists: bool


def resolver_of(settings: GateSettings) -> dns.asyncresolver.Resolver:
    """Asks the nameservers of the settings, else the host's own."""
    resolver = dns.asyncresolver.Resolver(configure=not settings.nameservers)
    if settings.nameservers:
        resolver.nameservers = list(settings.nameservers)
    resolver.lifetime, resolver.timeout = _LOOKUP_SECONDS, _LOOKUP_SECONDS / 3
    resolver.use_edns(0, 0, 1232)
    return resolver


class Names:
    """Resolves for tenants. `on_answer` is awaited before an answer is used, so that its addresses can be reached."""

    def __init__(self, settings: GateSettings, reach: Reach, on_answer: OnAnswer) -> None:
        self._settings = settings
        self._reach = reach
        self._on_answer = on_answer
        self._upstream = resolver_of(settings)

    def judge(self, tenant: Tenant, name: str, port: int | None = None) -> NameRule:
        """The rule that allows `name` (in the form for comparisons). Raises Refused: `name`, `port`, `name_limit`."""
        rule = rule_for(tenant.policy, name, port, None if port is None else "tcp")
        if rule is None:
            known = port is not None and rule_for(tenant.policy, name) is not None
            raise Refused("port" if known else "name", name=name)
        if rule.pattern.startswith("*."):
            self._limit(tenant, name, rule.pattern)
        return rule

    def _limit(self, tenant: Tenant, name: str, pattern: str) -> None:
        """A name under a wildcard can carry data to its owner; so its length, and how many there are, have bounds."""
        front = name[: -len(pattern) + 1]
        if len(front) > _WILDCARD_BYTES or front.count(".") >= _WILDCARD_LABELS:
            raise Refused("name_limit", "a name too long for a wildcard", name=name)
        now = asyncio.get_running_loop().time()
        names = tenant.names
        while names and next(iter(names.values())) < now - 60:
            names.popitem(last=False)
        if name not in names and len(names) >= self._settings.wildcard_names_min:
            raise Refused("name_limit", "too many different names in a minute", name=name)
        names[name] = now
        names.move_to_end(name)

    async def find(self, tenant: Tenant, name: str, rule: NameRule, family: int) -> Found:
        """Addresses of `name` for IPv4 or IPv6 (4, 6), opened for the tenant. Raises Refused(`lookup`) when nobody answers."""
        kind = "A" if family == 4 else "AAAA"
        now, policy = asyncio.get_running_loop().time(), tenant.policy
        kept = tenant.answers.get((name, kind))
        if kept is not None and kept[0] > now:
            found = Found(kept[1].addresses, max(1, int(kept[0] - now)), kept[1].exists)
        else:
            found = await self._ask(tenant, name, kind)
        _still(tenant, policy, name)
        if found.addresses:
            answer = NetworkAnswer(name=name, rule=rule, addresses=found.addresses, seconds=found.ttl + GRACE_SECONDS)
            await self._on_answer(tenant.address.slot, answer)
            _still(tenant, policy, name)
        if kept is None or kept[0] <= now:
            tenant.answers[(name, kind)] = (now + found.ttl, found)
            while len(tenant.answers) > _KEPT_ANSWERS:
                tenant.answers.popitem(last=False)
        return found

    async def _ask(self, tenant: Tenant, name: str, kind: str) -> Found:
        target, ttl = dns.name.from_text(name), LONGEST_TTL
        seen: set[dns.name.Name] = set()
        while target not in seen and len(seen) < _CHAIN:
            seen.add(target)
            try:
                answer = await self._upstream.resolve(target, kind, search=False, raise_on_no_answer=False)
            except dns.resolver.NXDOMAIN:
                return Found((), SHORTEST_TTL, exists=False)
            except (dns.exception.DNSException, OSError) as error:
                raise Refused(
                    "lookup", f"the node's DNS servers do not answer: {type(error).__name__}", name=name
                ) from error
            ttl = min([ttl, *(rrset.ttl for rrset in answer.response.answer)])
            if answer.rrset is not None:
                addresses = [str(ipaddress.ip_address(record.address)) for record in answer.rrset]
                good = tuple(a for a in addresses if self._reach.may(a, tenant.policy.allows))[:MOST_ADDRESSES]
                if not good:
                    raise Refused("rebinding", "the name leads to addresses that no name may lead to", name=name)
                return Found(good, max(SHORTEST_TTL, ttl), exists=True)
            target = answer.canonical_name
        return Found((), max(SHORTEST_TTL, min(ttl, 30)), exists=True)


def _still(tenant: Tenant, policy: Policy, name: str) -> None:
    """What was found under rules of before opens nothing under the new ones. Raises Refused."""
    if tenant.policy is not policy:
        raise Refused("name", "the rules changed meanwhile", name=name)
