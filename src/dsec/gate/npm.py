"""An npm registry as of a date: packages whose versions are filtered by the registry's own times. Source: npm's registry documentation."""

import base64
import binascii
import re
from typing import Any

import msgspec

from dsec.gate.pypi import seconds
from dsec.gate.refusal import Refused

__all__ = ["hashes_of", "package_name", "parse", "tarball_name", "visible"]

_NAME = re.compile(r"(?:@[A-Za-z0-9._~-]{1,100}/)?[A-Za-z0-9._~-]{1,200}")
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:-([0-9A-Za-z.-]+))?(?:\+.*)?")
# What installing does not need; it is most of a package's list.
_LEFT_OUT = ("readme", "readmeFilename", "maintainers", "contributors", "author", "keywords", "users", "homepage", "bugs", "repository", "description",
             "_npmUser", "_npmOperationalInternal", "gitHead", "_nodeVersion", "_npmVersion", "directories", "_attachments")  # fmt: skip
Package = dict[str, Any]


def package_name(text: str) -> str:
    """A package's name out of a path. Raises Refused(`not_found`)."""
    if not _NAME.fullmatch(text) or ".." in text:
        raise Refused("not_found", "no name of a package")
    return text


def parse(content: bytes) -> Package:
    """A package's list, without what installing does not need. Raises Refused(`upstream`)."""
    try:
        package = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Refused("upstream", "the registry's answer is no package") from error
    versions = package.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(one, dict) for one in versions.values()):
        raise Refused("upstream", "the registry's answer is no package")
    for one in [package, *versions.values()]:
        for key in _LEFT_OUT:
            one.pop(key, None)
    return package


def visible(package: Package, before: float | None) -> Package:
    """The package as it was: versions, times and tags from before the date. What has no time is not there."""
    times, versions = package.get("time"), package["versions"]
    if not isinstance(times, dict):
        times = {}
    if before is not None:
        versions = {
            name: one
            for name, one in versions.items()
            if (at := seconds(_text(times.get(name)))) is not None and at < before
        }
    tags = package.get("dist-tags")
    tags = {tag: name for tag, name in tags.items() if name in versions} if isinstance(tags, dict) else {}
    if versions and "latest" not in tags:
        tags["latest"] = max(versions, key=_order)
    shown = {name: text for name, text in times.items() if name in versions or name == "created"}
    if versions and shown:
        shown["modified"] = max(str(shown[name]) for name in shown)
    return {**package, "versions": versions, "dist-tags": tags, "time": shown}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _order(version: str) -> tuple[bool, tuple[int, ...]]:
    """Versions without a pre-release mark come last, the highest at the end."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return False, ()
    return match[4] is None, tuple(int(part) for part in match.groups()[:3])


def tarball_name(version: dict[str, Any]) -> str | None:
    """The file's name of a version's tarball."""
    dist = version.get("dist")
    url = dist.get("tarball") if isinstance(dist, dict) else None
    return url.rpartition("/")[2] if isinstance(url, str) else None


def hashes_of(version: dict[str, Any]) -> dict[str, str]:
    """Hashes of its tarball, hexadecimal."""
    dist, found = version["dist"], {}
    for part in str(dist.get("integrity") or "").split():
        algorithm, _, text = part.partition("-")
        try:
            found[algorithm] = base64.b64decode(text.partition("?")[0], validate=True).hex()
        except (ValueError, binascii.Error):
            continue
    if not found and isinstance(dist.get("shasum"), str):
        found["sha1"] = dist["shasum"]
    return {name: text for name, text in found.items() if name in ("sha512", "sha384", "sha256", "sha1")}
