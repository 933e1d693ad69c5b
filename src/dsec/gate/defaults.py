"""Where the clients that are installed on this node get packages from: read at run time out of their own configuration and defaults.

DSec itself names no package registry. What is not installed, or does not say, is missing.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsec.gate.services import Upstream

__all__ = ["upstreams"]

_SECONDS = 20
_PIP_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
_PIP_ORDER = (":env:", "install", "download", "global", "site", "user")
_APT = Path("/etc/apt")
_CARGO_INDEX = re.compile(rb"sparse\+(https://[a-z0-9.-]{4,80}/)")
_LONGEST_FILE = 1 << 20


def upstreams() -> dict[str, Upstream]:
    """By service: pypi, npm, goproxy, debian, crates. Takes about a second: clients are slow to start. Each gets at most 20 s."""
    asked: dict[str, Callable[[], Upstream | None]] = {
        "pypi": _pip, "npm": _npm, "goproxy": _go, "debian": lambda: _apt(_APT), "crates": lambda: _cargo(Path.home() / ".cargo"),
    }  # fmt: skip
    with ThreadPoolExecutor(len(asked)) as threads:
        found = {name: threads.submit(ask) for name, ask in asked.items()}
    return {name: upstream for name, future in found.items() if (upstream := future.result()) is not None}


def _said(*words: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    program = words[0] if words[0].startswith("/") else shutil.which(words[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *words[1:]],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _of(url: str, hosts: Iterable[str] = ()) -> Upstream | None:
    split = urlsplit(url.strip())
    if split.scheme not in ("http", "https") or not split.hostname:
        return None
    return Upstream(index=url.strip(), hosts=tuple(sorted({split.hostname, *hosts})))


def _pip() -> Upstream | None:
    for python in (sys.executable, "python3"):
        listed = _said(python, "-m", "pip", "config", "list")
        if (chosen := pip_index(listed.splitlines())) and (upstream := _of(chosen)):
            return upstream
        if upstream := _of(_said(python, "-c", _PIP_DEFAULT)):
            return upstream
    return None


def pip_index(lines: Sequence[str]) -> str | None:
    """The index that `pip config list` names, by pip's own order."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"(:env:|\w+)\.index-url='([^']+)'", line.strip())
        if match:
            found[match[1]] = match[2]
    return next((found[section] for section in _PIP_ORDER if section in found), None)


def _npm() -> Upstream | None:
    return _of(_said("npm", "config", "get", "registry"))


def _go() -> Upstream | None:
    for part in re.split(r"[,|]", _said("go", "env", "GOPROXY").strip()):
        if upstream := _of(part):
            return upstream
    return None


def _apt(folder: Path) -> Upstream | None:
    """Hosts of all sources of apt."""
    hosts: set[str] = set()
    for path in [
        folder / "sources.list",
        *sorted(folder.glob("sources.list.d/*.list")),
        *sorted(folder.glob("sources.list.d/*.sources")),
    ]:
        for line in _text(path).splitlines():
            if line.lstrip().startswith(("deb", "URIs:")):
                hosts |= {host for url in re.findall(r"https?://\S+", line) if (host := urlsplit(url).hostname)}
    return Upstream(hosts=tuple(sorted(hosts))) if hosts else None


def _cargo(home: Path) -> Upstream | None:
    """cargo's index, and where the index says that files are, once cargo has asked it."""
    index = _cargo_configured(home) or _cargo_built_in()
    if index is None:
        return None
    hosts = set()
    for path in home.glob("registry/index/*/config.json"):
        try:
            given = json.loads(_text(path))
        except ValueError:
            continue
        target = given.get("dl") if isinstance(given, dict) else None
        if isinstance(target, str) and (host := urlsplit(target).hostname):
            hosts.add(host)
    return _of(index, hosts)


def _cargo_configured(home: Path) -> str | None:
    try:
        content: dict[str, Any] = tomllib.loads(_text(home / "config.toml"))
    except tomllib.TOMLDecodeError:
        return None
    sources = content.get("source", {})
    replaced = sources.get("crates-io", {}).get("replace-with") if isinstance(sources, dict) else None
    url = sources.get(replaced, {}).get("registry") if replaced else None
    return str(url).removeprefix("sparse+") if url else None


def _cargo_built_in() -> str | None:
    program = _said("rustup", "which", "cargo").strip() or shutil.which("cargo")
    if not program:
        return None
    try:
        match = _CARGO_INDEX.search(Path(program).read_bytes())
    except OSError:
        return None
    return match[1].decode() if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:_LONGEST_FILE]
    except OSError:
        return ""
