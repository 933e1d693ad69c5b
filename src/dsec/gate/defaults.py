"""Where the package clients installed on this node get packages from: asked of themselves, so that no host is written down here."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from dsec.gate.services import Upstream

__all__ = ["upstreams"]

_SECONDS = 20.0
_PIP_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
_APT = Path("/etc/apt")


def upstreams() -> dict[str, Upstream]:
    """By service, what is known; a client that is not installed or says nothing has no entry. Takes about a second: clients are slow to start."""
    asked: dict[str, Callable[[], Upstream | None]] = {
        "pypi": _pip, "npm": _npm, "goproxy": _go, "debian": _apt, "crates": _cargo,
    }  # fmt: skip
    with ThreadPoolExecutor(len(asked)) as threads:
        found = {name: threads.submit(ask) for name, ask in asked.items()}
    return {name: upstream for name, future in found.items() if (upstream := future.result()) is not None}


def _said(*argv: str) -> str:
    """What a program prints; "" where it cannot run or fails."""
    program = shutil.which(argv[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *argv[1:]], capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _index(url: str) -> Upstream | None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return Upstream(index=url, hosts=(parts.hostname,))


def _pip() -> Upstream | None:
    for python in dict.fromkeys((sys.executable, "python3")):
        get = (python, "-m", "pip", "config", "get")
        configured = _said(*get, ":env:.index-url") or _said(*get, "global.index-url")
        found = _index(configured or _said(python, "-c", _PIP_DEFAULT))
        if found is not None:
            return found
    return None


def _npm() -> Upstream | None:
    return _index(_said("npm", "config", "get", "registry"))


def _go() -> Upstream | None:
    for each in re.split(r"[,|]", _said("go", "env", "GOPROXY")):
        found = _index(each.strip())
        if found is not None:
            return found
    return None


def _apt() -> Upstream | None:
    files = [_APT / "sources.list", *sorted((_APT / "sources.list.d").glob("*"))]
    hosts: dict[str, None] = {}
    for file in files:
        if file.suffix not in (".list", ".sources") or not file.is_file():
            continue
        lines = [line for line in file.read_text(errors="replace").splitlines() if not line.lstrip().startswith("#")]
        hosts |= dict.fromkeys(re.findall(r"\bhttps?://(?:[^/@\s]*@)?([A-Za-z0-9.-]+)", "\n".join(lines)))
    return Upstream(hosts=tuple(hosts)) if hosts else None


def _cargo() -> Upstream | None:
    """From its configuration alone: cargo tells its built-in index to nobody."""
    told = _said("cargo", "config", "get", "--format", "json-value", "-Zunstable-options")
    hosts = dict.fromkeys(re.findall(r"https?://([A-Za-z0-9.-]+)", told))
    home = Path.home() / ".cargo/config.toml"
    if home.is_file():
        hosts |= dict.fromkeys(
            re.findall(
                r"^[^#\n]*https?://(?:[^/@\s]*@)?([A-Za-z0-9.-]+)", home.read_text(errors="replace"), re.MULTILINE
            )
        )
    return Upstream(hosts=tuple(hosts)) if hosts else None
