"""From what a caller writes under `network_rules` to a policy. Whatever cannot be enforced as written is refused by name."""

import re
from calendar import timegm
from collections.abc import Mapping

from dsec.model.errors import InvalidArgument, Unsupported
from dsec.model.network import (
    Allow,
    MirrorRule,
    NameRule,
    NetLimits,
    NetworkRule,
    NetworkRules,
    Policy,
    Protocol,
    Service,
)
from dsec.model.spec import SandboxSpec
from dsec.rules.netpolicy import PER_PREFIX, Grounds, Network, inherited, network_of, normal_form, plain_name, without

__all__ = [
    "check_network",
    "check_rules",
    "compiled",
    "environment",
    "first_rules",
    "linked",
    "phase_rules",
    "ports_of",
    "wants_network",
]

_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?\Z")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)\Z")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~/-]{0,254}\Z")
_RULES_MAX, _LIST_MAX, _PHASES_MAX, _ALIASES_MAX = 64, 64, 16, 16
_ALLOWS_MAX, _NAMES_MAX = 2048, 1024
_FLOWS_MAX, _NEW_FLOWS_MAX = 16384, 10_000
_ADDRESS = re.compile(r"([0-9]+|0x[0-9a-f]*)\Z")


def linked(spec: SandboxSpec) -> bool:
    """Whether the sandbox has a device beside the loopback, so that its rules may change later."""
    return spec.network_rules is not None or bool(spec.network_phases) or spec.network_group is not None


def wants_network(spec: SandboxSpec) -> str | None:
    """The first field that needs a node which enforces rules; None where loopback alone is what was asked for."""
    for field, rules in _all_rules(spec):
        for name, value in rules.items():
            if value is not False:
                return f"{field}.{name}"
    return "network_group" if spec.network_group is not None else None


def _all_rules(spec: SandboxSpec) -> list[tuple[str, NetworkRules]]:
    found = [] if spec.network_rules is None else [("network_rules", spec.network_rules)]
    return found + [(f"network_phases.{name}", rules) for name, rules in spec.network_phases.items()]


def phase_rules(spec: SandboxSpec, phase: str) -> NetworkRules:
    """The rules of a phase. Raises InvalidArgument for one that the sandbox was not created with."""
    try:
        return spec.network_phases[phase]
    except KeyError as error:
        known = ", ".join(spec.network_phases) or "none"
        raise InvalidArgument(f"no such phase; there are: {known}", field="phase") from error


def first_rules(spec: SandboxSpec) -> tuple[str | None, NetworkRules]:
    """The phase in force when a sandbox begins, and its rules."""
    if not spec.network_phases:
        return None, spec.network_rules or {}
    phase = spec.network_phase or next(iter(spec.network_phases))
    return phase, phase_rules(spec, phase)


def check_network(spec: SandboxSpec) -> None:
    """Raises InvalidArgument naming the first field that says something impossible. Which services there are, a node knows."""
    if spec.network_rules is not None and spec.network_phases:
        raise InvalidArgument("give rules or phases, not both", field="network_phases")
    if len(spec.network_phases) > _PHASES_MAX:
        raise InvalidArgument(f"at most {_PHASES_MAX} phases", field="network_phases")
    for phase in spec.network_phases:
        if not _NAME.match(phase):
            raise InvalidArgument("a phase's name is 1 to 64 of a-z, 0-9 and inner . _ -", field="network_phases")
    if spec.network_phase is not None and spec.network_phase not in spec.network_phases:
        raise InvalidArgument("one of the names in network_phases", field="network_phase")
    for field, rules in _all_rules(spec):
        check_rules(rules, field)
    limits = spec.network_limits
    for name, value, least in (
        ("egress_bytes_s", limits.egress_bytes_s, 1024), ("ingress_bytes_s", limits.ingress_bytes_s, 1024),
        ("flows", limits.flows, 1), ("new_flows_s", limits.new_flows_s, 1),
    ):  # fmt: skip
        if value is not None and not least <= value <= 1 << 40:
            raise InvalidArgument(f"{least} or more", field=f"network_limits.{name}")
    for name, value, most in (("flows", limits.flows, _FLOWS_MAX), ("new_flows_s", limits.new_flows_s, _NEW_FLOWS_MAX)):
        if value > most:
            raise InvalidArgument(f"at most {most}", field=f"network_limits.{name}")
    if spec.network_group is not None and not _NAME.match(spec.network_group):
        raise InvalidArgument("1 to 64 of a-z, 0-9 and inner . _ -", field="network_group")
    if spec.aliases and spec.network_group is None:
        raise InvalidArgument("aliases are names in a network_group", field="aliases")
    if len(spec.aliases) > _ALIASES_MAX or not all(_LABEL.match(alias) for alias in spec.aliases):
        raise InvalidArgument(f"at most {_ALIASES_MAX} names of a-z, 0-9, _ and inner hyphens", field="aliases")


def check_rules(rules: NetworkRules, field: str) -> None:
    """Raises InvalidArgument for what no node could mean."""
    if len(rules) > _RULES_MAX:
        raise InvalidArgument(f"at most {_RULES_MAX} names", field=field)
    _check_size(rules, field)
    for name, value in rules.items():
        here = f"{field}.{name[:64]}"
        if not _NAME.match(name):
            raise InvalidArgument("a rule's name is 1 to 64 of a-z, 0-9 and inner . _ -", field=here)
        several = value if isinstance(value, tuple) else ()
        if isinstance(value, tuple) and not 1 <= len(value) <= _LIST_MAX:
            raise InvalidArgument(f"1 to {_LIST_MAX} rules", field=here)
        for index, rule in enumerate(several):
            _check_rule(rule, f"{here}[{index}]")
        if isinstance(value, NetworkRule):
            _check_rule(value, here)


def _check_size(rules: NetworkRules, field: str) -> None:
    """Before anything else is looked at: what a request holds must not cost the node more than it cost the caller."""
    given = [each for value in rules.values() for each in (value if isinstance(value, tuple) else (value,))]
    found = [rule for rule in given if isinstance(rule, NetworkRule)]
    if sum(len(rule.hosts) for rule in found) > _NAMES_MAX:
        raise InvalidArgument(f"more than {_NAMES_MAX} hosts together", field=field)
    if sum(1 + len(rule.cidrs) + len(rule.ports) for rule in found) > _ALLOWS_MAX:
        raise InvalidArgument(f"more than {_ALLOWS_MAX} rules, prefixes and ports together", field=field)


def _check_rule(rule: NetworkRule, field: str) -> None:
    for name, items in (
        ("hosts", rule.hosts), ("cidrs", rule.cidrs), ("ports", rule.ports), ("protocols", rule.protocols), ("modules", rule.modules),
    ):  # fmt: skip
        if len(items) > _LIST_MAX:
            raise InvalidArgument(f"at most {_LIST_MAX}", field=f"{field}.{name}")
    for host in rule.hosts:
        _check_host(host, f"{field}.hosts")
    for cidr in rule.cidrs:
        _network(cidr, f"{field}.cidrs")
    ports_of(rule.ports, f"{field}.ports")
    if rule.hosts and rule.strict and set(rule.protocols) - {"tcp"}:
        raise InvalidArgument(
            "a host's name can be checked in TCP alone; strict=False allows its addresses without a check", field=f"{field}.protocols"
        )  # fmt: skip
    if not rule.strict and not rule.hosts:
        raise InvalidArgument("strict is about hosts, and none is given", field=f"{field}.strict")
    if rule.credential is not None and (rule.cidrs or not rule.strict):
        raise InvalidArgument("a credential goes to hosts by name, checked strictly", field=f"{field}.credential")
    if rule.before is not None:
        _moment(rule.before, f"{field}.before")
    for module in rule.modules:
        if not _MODULE.match(module) or ".." in module:
            raise InvalidArgument("a module path or the beginning of some", field=f"{field}.modules")


def _check_host(host: str, field: str) -> None:
    name = plain_name(host).removeprefix("*.")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.match(label) for label in labels):
        raise InvalidArgument(
            "a host name in ASCII (an international one in its xn-- form), or *. and one", field=field, value=host[:256]
        )
    if _ADDRESS.match(labels[-1]):
        raise InvalidArgument("an address belongs in cidrs", field=field, value=host)


def _network(text: str, field: str) -> Network:
    try:
        return network_of(text)
    except ValueError as error:
        raise InvalidArgument(f"not a prefix of IPv4 or IPv6: {error}", field=field, value=text[:64]) from error


def ports_of(ports: tuple[int | str, ...], field: str) -> tuple[tuple[int, int], ...]:
    """Ranges of port numbers, merged and in order. Raises InvalidArgument."""
    ranges = []
    for port in ports:
        low, sign, high = str(port).partition("-")
        high = high if sign else low
        if not (low.isascii() and low.isdecimal() and high.isascii() and high.isdecimal()) or len(low + high) > 10:
            raise InvalidArgument('a port number, or a range as "8000-8100"', field=field)
        if not 1 <= int(low) <= int(high) <= 65535:
            raise InvalidArgument("ports are 1 to 65535, the lower first", field=field)
        ranges.append((int(low), int(high)))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def _moment(text: str, field: str) -> float:
    found = _DATE.match(text)
    if found is not None:
        year, month, day = map(int, found.groups())
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        days = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
        if year >= 1970 and 1 <= month <= 12 and 1 <= day <= days[month - 1]:
            return float(timegm((year, month, day, 0, 0, 0)))
    raise InvalidArgument("a date as YYYY-MM-DD", field=field)


class _Compiling:
    """One pass over the rules of a sandbox."""

    def __init__(self, services: Mapping[str, Service], grounds: Grounds) -> None:
        self._services = services
        self._grounds = grounds
        self._holes = [network_of(text) for text in grounds.forbidden]
        self.allows: list[Allow] = []
        self.names: list[NameRule] = []
        self.mirrors: dict[str, MirrorRule] = {}

    def value(self, name: str, value: bool | NetworkRule, field: str) -> None:
        options = value if isinstance(value, NetworkRule) else NetworkRule()
        if isinstance(value, bool) or not (value.hosts or value.cidrs):
            self._service(name, options, field)
            return
        if name in self._services:
            raise InvalidArgument(f"{name} is a service; give a rule of your own another name", field=field)
        if options.before is not None or options.modules:
            raise InvalidArgument("before and modules are options of a service", field=field)
        for cidr in options.cidrs:
            self._address(cidr, options, f"{field}.cidrs")
        self._hosts(name, options, options.hosts, field)

    def _credential(self, name: str | None, field: str) -> str:
        if name is not None and name not in self._grounds.credentials:
            raise InvalidArgument("this node holds no such credential", field=f"{field}.credential")
        return name or ""

    def _hosts(self, name: str, rule: NetworkRule, hosts: tuple[str, ...], field: str) -> None:
        protocols: tuple[Protocol, ...] = tuple(sorted(set(rule.protocols))) or ("tcp",)
        ports = ports_of(rule.ports, field) or ((80, 80), (443, 443))
        if hosts and len(ports) * len(protocols) > PER_PREFIX:
            raise InvalidArgument(f"more than {PER_PREFIX} protocols and ranges of ports for a host", field=field)
        if len(self.names) + len(hosts) > _NAMES_MAX:
            raise InvalidArgument(f"more than {_NAMES_MAX} hosts together", field=field)
        for host in hosts:
            self.names.append(
                NameRule(
                    pattern=plain_name(host), ports=ports, protocols=protocols, strict=rule.strict, service=name,
                    credential=self._credential(rule.credential, field),
                )
            )  # fmt: skip

    def _address(self, cidr: str, rule: NetworkRule, field: str) -> None:
        asked = _network(cidr, field)
        for hole in self._holes:
            if asked.version == hole.version and asked.subnet_of(hole):  # type: ignore[arg-type]
                raise InvalidArgument(f"{cidr} is never reached from a sandbox", field=field, value=cidr)
        ports = ports_of(rule.ports, field) or ((0, 65535),)
        protocols: tuple[Protocol, ...] = tuple(sorted(set(rule.protocols))) or ("tcp",)
        for part in without(asked, self._holes):
            for protocol in protocols:
                for low, high in ports if protocol != "icmp" else ((0, 65535),):
                    self.allows.append(Allow(network=str(part), protocol=protocol, low=low, high=high))
            # Before the next one is made: what a small request multiplies to must not fill the memory.
            if len(self.allows) > _ALLOWS_MAX:
                raise InvalidArgument(f"more than {_ALLOWS_MAX} prefixes and ranges together", field=field)

    def known(self, name: str, field: str) -> Service:
        """The service of that name. Raises InvalidArgument for none."""
        service = self._services.get(name)
        if service is None:
            known = ", ".join(sorted(self._services)) or "none"
            raise InvalidArgument(f"no service of this node, and no hosts or cidrs; services: {known}", field=field)
        return service

    def _service(self, name: str, options: NetworkRule, field: str) -> None:
        service = self.known(name, field)
        if service.why_not:
            raise Unsupported(f"this node cannot provide {name}: {service.why_not}", feature=field)
        if options.ports or options.protocols or not options.strict:
            raise InvalidArgument("a service has its own ports and protocols", field=field)
        credential = self._credential(options.credential, field) or service.credential
        if service.mirror is None:
            if options.before is not None or options.modules:
                raise Unsupported(f"{name} has no mirror here, which could show less than all", feature=field)
            rule = NetworkRule(hosts=service.hosts, ports=service.ports, credential=credential or None)
            self._hosts(name, rule, service.hosts, field)
            return
        if options.before is not None and service.mirror == "plain":
            raise Unsupported(f"{name} is not shown by date", feature=f"{field}.before")
        if options.modules and service.mirror != "goproxy":
            raise Unsupported(f"{name} has no modules", feature=f"{field}.modules")
        before = None if options.before is None else _moment(options.before, f"{field}.before")
        self.mirrors[name] = MirrorRule(
            kind=service.mirror, port=service.port, before=before, modules=options.modules, credential=credential
        )
        self.gateway("tcp", service.port)

    def gateway(self, protocol: Protocol, port: int) -> None:
        """The node itself, at its address among the sandboxes."""
        for address, length in ((self._grounds.gateway_v4, 32), (self._grounds.gateway_v6, 128)):
            self.allows.append(Allow(network=f"{address}/{length}", protocol=protocol, low=port, high=port))


def compiled(
    rules: NetworkRules,
    services: Mapping[str, Service],
    grounds: Grounds,
    *,
    field: str = "network_rules",
    limits: NetLimits | None = None,
    group: str = "",
    aliases: tuple[str, ...] = (),
) -> Policy:
    """The policy of `rules` on a node, in its normal form. Raises InvalidArgument and Unsupported naming the field, also for a name
    that is False: whoever writes it believes that it is known."""
    check_rules(rules, field)
    compiling = _Compiling(services, grounds)
    for name, value in rules.items():
        here = f"{field}.{name}"
        if value is False:
            compiling.known(name, here)
        elif isinstance(value, tuple):
            for index, rule in enumerate(value):
                if not (rule.hosts or rule.cidrs):
                    raise InvalidArgument("each rule of a list has hosts or cidrs", field=f"{here}[{index}]")
                compiling.value(name, rule, f"{here}[{index}]")
        else:
            compiling.value(name, value, here)
    if compiling.names or group:
        compiling.gateway("udp", 53)
        compiling.gateway("tcp", 53)
    policy = normal_form(
        Policy(
            allows=tuple(compiling.allows), names=tuple(compiling.names), mirrors=compiling.mirrors, limits=limits or NetLimits(),
            group=group, aliases=aliases,
        )
    )  # fmt: skip
    for prefix, allows in inherited(policy.allows).items():
        if len(allows) > PER_PREFIX:
            raise InvalidArgument(f"more than {PER_PREFIX} protocols and ranges of ports for {prefix}", field=field)
    return policy


def environment(names: set[str], services: Mapping[str, Service], grounds: Grounds) -> dict[str, str]:
    """What is set in a sandbox so that its tools find the mirrors of the services `names`."""
    env: dict[str, str] = {}
    for name in sorted(names & set(services)):
        service = services[name]
        mirror = f"http://{grounds.gateway_v4}:{service.port}"
        for key, value in service.env.items():
            env[key] = value.replace("{mirror}", mirror).replace("{gateway}", grounds.gateway_v4)
    return env
