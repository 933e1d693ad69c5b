"""A Go module proxy for some modules, as of a date. Source: the Go modules reference, "GOPROXY protocol"."""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from dsec.gate.pypi import seconds
from dsec.gate.refusal import Refused

__all__ = ["Asked", "asked", "escaped", "highest", "info_seconds", "within"]

_ESCAPED = re.compile(r"[a-z0-9!._~/-]{1,500}")
_MODULE = re.compile(r"[A-Za-z0-9._~-]+(?:/[A-Za-z0-9._~-]+)*")
_VERSION = re.compile(r"v\d+\.\d+\.\d+[0-9A-Za-z.+-]{0,100}")
_NUMBERS = re.compile(r"v(\d{1,9})\.(\d{1,9})\.(\d{1,9})(-[0-9A-Za-z.-]+)?(?:\+.*)?")
_KINDS = ("info", "mod", "zip")


class Asked(msgspec.Struct, frozen=True):
    """A request: `module` as Go writes it, and what of it: list, latest, or a version's info, mod or zip."""

    module: str
    what: str
    version: str = ""


def asked(path: str) -> Asked:
    """A request's path, without the first slash. Raises Refused(`not_found`)."""
    path = unquote(path)
    if path.endswith("/@latest"):
        return Asked(_module(path.removesuffix("/@latest")), "latest")
    module, slash, rest = path.partition("/@v/")
    if slash and rest == "list":
        return Asked(_module(module), "list")
    version, dot, kind = rest.rpartition(".")
    version = _unescaped(version) if dot else ""
    if not slash or kind not in _KINDS or not _VERSION.fullmatch(version):
        raise Refused("not_found", "no request that a module proxy knows")
    return Asked(_module(module), kind, version)


def within(module: str, prefixes: Sequence[str]) -> bool:
    """Whether one of the prefixes is the module or a path above it; none: all are."""
    return not prefixes or any(
        module == prefix or module.startswith(prefix + "/") for prefix in (p.rstrip("/") for p in prefixes)
    )


def escaped(text: str) -> str:
    """Go's form for paths: "!x" for an upper-case X."""
    return re.sub(r"[A-Z]", lambda match: "!" + match[0].lower(), text)


def info_seconds(content: bytes) -> float | None:
    """When the version was made, out of its .info."""
    try:
        info: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return seconds(info["Time"]) if isinstance(info.get("Time"), str) else None


def highest(versions: Sequence[str]) -> str | None:
    """The one that @latest means: the highest release, else the highest of all."""
    return max(versions, key=_order, default=None)


def _order(version: str) -> tuple[bool, tuple[int, ...], str]:
    match = _NUMBERS.fullmatch(version)
    if match is None:
        return False, (), version
    return match[4] is None, tuple(int(part) for part in match.groups()[:3]), version


def _unescaped(text: str) -> str:
    if not _ESCAPED.fullmatch(text) or text.endswith("!") or re.search(r"![^a-z]", text):
        raise Refused("not_found", "no path of a module")
    return re.sub(r"!([a-z])", lambda match: match[1].upper(), text)


def _module(text: str) -> str:
    module = _unescaped(text)
    if not _MODULE.fullmatch(module) or ".." in module:
        raise Refused("not_found", "no path of a module")
    return module
