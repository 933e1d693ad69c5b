"""Fourteen related images, as data sets of tasks have them: one base, three sets of dependencies, a checkout for each; in a store.

A registry keeps each distinct layer once, gzipped. A store keeps chunks, whatever layer they came in; the figure is its bytes, all of
them, over the bytes of the distinct gzipped layers.
"""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.rootfs import make_source

__all__ = ["measure_store"]

IMAGES, ENVIRONMENTS = 14, 3
BASE_FOLDERS = ("usr/bin", "usr/lib/x86_64-linux-gnu")
ENVIRONMENT_FOLDERS = (
    "usr/lib/python3",
    "usr/lib/gcc",
    "usr/share/perl",
    "usr/share/doc",
    "usr/share/vim",
    "usr/include",
)
BASE_BYTES, QUICK_BASE_BYTES = 250 << 20, 40 << 20
ENVIRONMENT_BYTES, QUICK_ENVIRONMENT_BYTES = 60 << 20, 10 << 20
SOURCE_FILES, QUICK_SOURCE_FILES = 3000, 400
CHANGED = 20  # of so many files of a checkout, another commit has one changed
IMPORT_SECONDS = 1200
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"


def _number(text: str, below: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % below


def _files(folders: tuple[str, ...], most: int) -> Iterator[Path]:
    """Files of this machine's packages, up to `most` bytes."""
    for folder in folders:
        for place, below, names in os.walk(Path("/") / folder):
            below.sort()
            for path in (Path(place, name) for name in sorted(names)):
                if path.is_symlink() or not path.is_file():
                    continue
                most -= path.stat().st_size
                if most < 0:
                    return
                yield path


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    # Read first: what this machine has may change while it is read.
    content = path.read_bytes()
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), path.stat().st_mode & 0o7777, 1_700_000_000
    tar.addfile(info, io.BytesIO(content))


def _base(most: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _files(BASE_FOLDERS, most):
            _add(tar, path, str(path).lstrip("/"))
    return out.getvalue()


def _environment(number: int, most: int) -> bytes:
    """Of four parts of what there is, one that all environments have and one of its own."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _files(ENVIRONMENT_FOLDERS, 2 * most):
            if _number(str(path), ENVIRONMENTS + 1) in (number, ENVIRONMENTS):
                _add(tar, path, f"opt/env{path}")
    return out.getvalue()


def _checkout(source: Path, number: int) -> bytes:
    """The checkout at commit `number`: the common tree, with some files of its own."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            name = f"work/{path.relative_to(source)}"
            content = path.read_bytes()
            if _number(f"{number} {name}", CHANGED) == 0:
                content += f"\n# changed by commit {number}\n".encode()
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1_700_000_000 + number
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


class _Layouts:
    """OCI layouts on disk; what several share is there once in memory only as its digest and size."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"
        self._blobs.mkdir()
        self.compressed: dict[str, int] = {}

    def layer(self, raw: bytes) -> tuple[dict[str, Any], str]:
        """A layer, kept gzipped: its descriptor and the digest of it unpacked."""
        packed = gzip.compress(raw, compresslevel=6, mtime=0)
        descriptor = self._keep(packed, _LAYER)
        self.compressed[descriptor["digest"]] = len(packed)
        return descriptor, f"sha256:{hashlib.sha256(raw).hexdigest()}"

    def image(self, at: Path, layers: list[tuple[dict[str, Any], str]]) -> Path:
        """A layout of its own for an image of layers."""
        config = {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [d for _, d in layers]},
        }
        manifest: dict[str, Any] = {
            "schemaVersion": 2, "mediaType": _MANIFEST, "config": self._keep(json.dumps(config).encode(), _CONFIG),
            "layers": [descriptor for descriptor, _ in layers],
        }  # fmt: skip
        top = self._keep(json.dumps(manifest).encode(), _MANIFEST)
        (at / "blobs/sha256").mkdir(parents=True)
        for descriptor in (top, manifest["config"], *manifest["layers"]):
            name = descriptor["digest"].removeprefix("sha256:")
            os.link(self._blobs / name, at / "blobs/sha256" / name)
        (at / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (at / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))
        return at

    def _keep(self, raw: bytes, kind: str) -> dict[str, Any]:
        name = hashlib.sha256(raw).hexdigest()
        (self._blobs / name).write_bytes(raw)
        return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(raw)}


def _gzipped(layouts: _Layouts, make: Callable[[int], bytes], most: int) -> tuple[dict[str, Any], str]:
    return layouts.layer(make(most))


def _dsec(state: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "dsec", "image", words[0], "--state", str(state), *words[1:]]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"dsec image {' '.join(words)}: {done.stderr.strip()[-400:]}")
    return done.stdout


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_store(place: Path, quick: bool) -> dict[str, float]:
    """Makes, imports and pushes the images below the folder `place`. Gives `store_over_compressed`, the bytes that it is made of,
    and `push_s`, seconds that the push of all took."""
    with tempfile.TemporaryDirectory(prefix="related-", dir=place) as folder, ThreadPoolExecutor(2) as pool:
        here = Path(folder)
        layouts = _Layouts(here)
        make_source(here / "source", QUICK_SOURCE_FILES if quick else SOURCE_FILES)
        base_bytes = QUICK_BASE_BYTES if quick else BASE_BYTES
        environment_bytes = QUICK_ENVIRONMENT_BYTES if quick else ENVIRONMENT_BYTES
        base = pool.submit(_gzipped, layouts, _base, base_bytes)
        environments = [
            pool.submit(_gzipped, layouts, partial(_environment, number), environment_bytes)
            for number in range(ENVIRONMENTS)
        ]
        names = []
        for number in range(IMAGES):
            own = layouts.layer(_checkout(here / "source", number))
            layers = [base.result(), environments[number % ENVIRONMENTS].result(), own]
            at = layouts.image(here / f"image{number}", layers)
            names.append(f"related/{number}")
            _dsec(here / "state", "import", names[-1], str(at))
        begin = time.perf_counter()
        _dsec(here / "state", "push", "--store", f"file://{here}/store", *names)
        seconds = time.perf_counter() - begin
        stored, compressed = _bytes_below(here / "store"), sum(layouts.compressed.values())
        return {
            "store_over_compressed": stored / compressed, "store_bytes": stored, "compressed_bytes": compressed,
            "distinct_layers": len(layouts.compressed), "images": IMAGES, "push_s": seconds,
        }  # fmt: skip
