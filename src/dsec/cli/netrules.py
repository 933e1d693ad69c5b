"""Network rules as words of a command line."""

import ipaddress
from collections.abc import Sequence

import click

from dsec.model.network import NetworkRule, NetworkRules

__all__ = ["RULE_HELP", "network_rules"]

RULE_HELP = (
    "What it may reach; may be repeated: none (no network that can be opened later), off (nothing for now), a service (pypi, pypi:before=2024-05-01), "
    "a host (a.test, *.a.test:443), or addresses (203.0.113.0/24:80-90/udp)."
)


def network_rules(words: Sequence[str]) -> NetworkRules | None:
    """The rules of all `words`; None without one. Raises click.BadParameter."""
    if not words or tuple(words) == ("none",):
        return None
    rules: NetworkRules = {}
    for number, word in enumerate(words):
        if word == "off":
            continue
        name, value = _rule(word, number)
        if name in rules:
            raise click.BadParameter(f"{name} is named twice", param_hint="--network")
        rules[name] = value
    return rules


def _rule(word: str, number: int) -> tuple[str, bool | NetworkRule]:
    text, _, protocol = word.rpartition("/") if word.endswith(("/tcp", "/udp", "/icmp", "/any")) else (word, "", "")
    protocols = (protocol,) if protocol else ()
    where, sign, rest = text.rpartition(":")
    if not sign or not rest or (_prefix(text) is not None):
        where, rest = text, ""
    prefix = _prefix(where.strip("[]") if where.startswith("[") else where)
    ports = (rest,) if rest else ()
    if prefix is not None:
        return f"rule-{number}", NetworkRule(cidrs=(prefix,), ports=ports, protocols=protocols)  # type: ignore[arg-type]
    if "." in where:
        return f"rule-{number}", NetworkRule(hosts=(where,), ports=ports, protocols=protocols)  # type: ignore[arg-type]
    if not rest:
        return where, True
    return where, _options(where, rest)


def _options(service: str, text: str) -> NetworkRule:
    options: dict[str, str] = {}
    for part in text.split(";"):
        name, sign, value = part.partition("=")
        if not sign or name not in ("before", "modules", "credential"):
            raise click.BadParameter(
                f"{service}:{text} is not SERVICE:before=DATE, modules=A,B or credential=NAME", param_hint="--network"
            )
        options[name] = value
    modules = tuple(options["modules"].split(",")) if "modules" in options else ()
    return NetworkRule(before=options.get("before"), modules=modules, credential=options.get("credential"))


def _prefix(text: str) -> str | None:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        return None
