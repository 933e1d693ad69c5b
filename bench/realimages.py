"""Real images for benchmarks: roots bootstrapped from Debian packages (bench/images.toml), kept as tars below a cache folder.

`CACHE/roots/NAME-KEY.tar.zst` is a root, where KEY is a hash of what it is made from; `CACHE/debs/SUITE` are the packages, downloaded
once for all roots of a release.
"""

import hashlib
import json
import os
import subprocess
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import replace

from bench.rootfs import make_rootfs, make_source

__all__ = ["RealImage", "named", "real_images", "root_of"]

TABLE = Path(__file__).with_name("images.toml")
BUILD_SECONDS = 3000
TREE_FILES = 4000
EPOCH = "1700000000"  # time of everything that a package step makes, so that a root made again is the same


class RealImage(Struct, frozen=True, forbid_unknown_fields=True):
    """A root: Debian `packages` of a release `suite`, or one `built` here by name. `run`: a command that prints "ok" at its
    end; none for an image in which nothing can be run. `tree`: number of a source tree of its own that it has too; 0: none."""

    name: str
    run: tuple[str, ...]
    suite: str = ""
    packages: tuple[str, ...] = ()
    built: str = ""
    tree: int = 0

    @property
    def key(self) -> str:
        """Changes with what the root is made from."""
        words = [EPOCH, self.suite, self.built, *sorted(self.packages), *([str(self.tree)] if self.tree else [])]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]

    @property
    def known_as(self) -> str:
        """Its name in stores and on nodes."""
        return f"{self.name}-{self.key}"

    def variant(self, tree: int) -> "RealImage":
        """The same with the source tree of that number."""
        return replace(self, name=f"{self.name}-{tree}", tree=tree) if tree else self


def real_images() -> list[RealImage]:
    """All images of the table, in its order."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text())
    return [convert({"name": name, **fields}, RealImage) for name, fields in table.items()]


def named(name: str) -> RealImage:
    """The image of that name in the table. Raises StopIteration where it has none."""
    return next(image for image in real_images() if image.name == name)


def root_of(image: RealImage, cache: Path) -> Path:
    """The tar of an image's root, made where it is not in the cache yet. Raises subprocess.CalledProcessError with what
    mmdebstrap said where the packages cannot be had."""
    target = cache / "roots" / f"{image.name}-{image.key}.tar.zst"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"part-{os.getpid()}.tar.zst")
        try:
            if image.tree:
                _add_tree(image, cache, part)
            else:
                (_build if image.built else _bootstrap)(image, cache, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def _build(image: RealImage, cache: Path, part: Path) -> None:
    """A root that is made by hand: a static busybox, or nothing at all."""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        root, plain = Path(folder, "root"), Path(folder, "root.tar")
        root.mkdir()
        if image.built == "busybox":
            make_rootfs(root)
        with tarfile.open(plain, "w") as tar:
            tar.add(root, arcname=".")
        subprocess.run(["zstd", "-q", "-1", str(plain), "-o", str(part)], check=True, timeout=60)


def _add_tree(image: RealImage, cache: Path, part: Path) -> None:
    """The root without the tree, and the tree in /work."""
    plain = replace(image, name=image.name.removesuffix(f"-{image.tree}"), tree=0)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        joined = Path(folder, "root.tar")
        make_source(Path(folder, "work"), TREE_FILES, seed=image.tree)
        subprocess.run(["zstd", "-dq", str(root_of(plain, cache)), "-o", str(joined)], check=True, timeout=600)
        with tarfile.open(joined, "a") as tar:
            tar.add(Path(folder, "work"), arcname="./work")
        subprocess.run(["zstd", "-q", "-1", str(joined), "-o", str(part)], check=True, timeout=600)


def _bootstrap(image: RealImage, cache: Path, part: Path) -> None:
    """mmdebstrap, with the packages that earlier roots needed linked into its download folder, and new ones linked back."""
    debs, work = cache / "debs" / image.suite, cache / "tmp"
    for folder in (debs, work):
        folder.mkdir(parents=True, exist_ok=True)
    archives = '"$1"/var/cache/apt/archives'
    link = "find {} -maxdepth 1 -name '*.deb' -exec cp -ln -t {} {{}} +"
    words = [
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(image.packages)}",
        "--aptopt=Acquire::Languages none", "--dpkgopt=force-unsafe-io", "--skip=download/empty,essential/unlink",
        f"--setup-hook=mkdir -p {archives}; {link.format(f'{debs!s}', archives)}",
        f"--customize-hook={link.format(archives, f'{debs!s}')}",
        image.suite, str(part),
    ]  # fmt: skip
    environ = {**os.environ, "TMPDIR": str(work), "SOURCE_DATE_EPOCH": EPOCH, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(words, check=True, timeout=BUILD_SECONDS, env=environ, stdin=subprocess.DEVNULL)
