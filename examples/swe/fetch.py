"""Downloads: source distributions and wheels, at fixed versions and hashes, as data. No package's code runs here."""

import hashlib
import subprocess
import sys
from pathlib import Path

from unearth import PackageFinder

from examples.swe.tasks import HERE, Task

__all__ = ["base_archive", "key_of", "sdist", "wheels"]

BASE_PACKAGES = "python3,git,ca-certificates"
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
WHEELS = HERE / "wheels.txt"
# The interpreter of the base image.
TARGET = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none", "--abi", "abi3",
          "--platform", "manylinux2014_x86_64", "--platform", "any")  # fmt: skip


def key_of(*parts: str | bytes) -> str:
    """A short name for these very inputs."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:12]


def indexes() -> list[str]:
    """The package index that pip is configured to use; none means the usual one."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(pip, check=True, capture_output=True, text=True, timeout=60).stdout
    settings = dict(line.split("=", 1) for line in listing.splitlines() if "=" in line)
    found = settings.get(":env:.index-url") or settings.get("global.index-url")
    return [found.strip("'\"")] if found else []


def sdist(task: Task, cache: Path) -> Path:
    """The task's source distribution in `cache`. Raises ValueError where its hash is not the task's."""
    target = cache / "sdists" / f"{task.name}-{task.version}.tar.gz"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        finder = PackageFinder(index_urls=indexes(), no_binary=[":all:"])
        found = finder.find_best_match(f"{task.name}=={task.version}").best
        if found is None:
            raise LookupError(f"the package index has no source distribution of {task.name} {task.version}")
        part = target.with_suffix(".part")
        with finder.session.get_stream(found.link.normalized) as answer:
            answer.raise_for_status()
            with part.open("wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)
        part.replace(target)
    if hashlib.sha256(target.read_bytes()).hexdigest() != task.sha256:
        target.unlink()
        raise ValueError(f"{target.name}: its SHA-256 is not the one recorded for the task")
    return target


def wheels(cache: Path) -> Path:
    """The folder of wheels that workspaces install from, each of the hash in wheels.txt."""
    folder = cache / f"wheels-{key_of(WHEELS.read_bytes())}"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--require-hashes",
             *TARGET, "-d", str(part), "-r", str(WHEELS)],
            check=True, timeout=600, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        part.replace(folder)
    return folder


def base_archive(cache: Path) -> Path:
    """The base image's root as a tar, bootstrapped from Debian packages."""
    words = [word for path in LEFT_OUT for word in ("--dpkgopt", f"path-exclude={path}")]
    target = cache / f"base-{key_of(BASE_PACKAGES, *words)}.tar"
    if not target.is_file():
        part = target.with_name("part-" + target.name)
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", *words, "bookworm", str(part)],
            check=True, timeout=1200, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        part.replace(target)
    return target
