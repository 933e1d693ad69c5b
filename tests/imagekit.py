"""Images for tests: archives written by the standard library and by hand, OCI layouts, and stores in a folder."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from dsec.images.importing import BuildArgs, Importer, Quiet, open_path
from dsec.images.inputs import ImportConfig, Notes
from dsec.images.names import NameStore
from dsec.images.oci import Platform
from dsec.images.store import LayerStore
from dsec.images.tar import TarInput
from dsec.kernel.clock import SystemClock
from dsec.model.layers import NameRecord
from dsec.model.tree import TreeEntry

CLOCK = SystemClock()


@dataclass
class Shelf:
    """A store in a folder, as the commands use it."""

    state: Path
    config: ImportConfig = field(default_factory=ImportConfig)

    def __post_init__(self) -> None:
        self.layers = LayerStore(self.state, CLOCK)
        self.names = NameStore(self.state, self.layers, CLOCK)
        self.importer = Importer(self.layers, self.names, CLOCK, self.config)

    def import_image(
        self, name: str, source: Path, ref: str | None = None, wanted: Platform | None = None
    ) -> NameRecord:
        with self.layers.scratch() as folder:
            work = self.importer.workshop(folder, Quiet())
            return self.importer.image(name, open_path(source, ref, wanted, work), work)

    def build(self, args: BuildArgs) -> NameRecord:
        return self.importer.layer(args, Quiet())


def file(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def other(name: str, kind: bytes, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info, _ = file(name, b"", **fields)
    info.type = kind
    return info, b""


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return other(name, tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return other(name, tarfile.SYMTYPE, linkname=target)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return other(name, tarfile.LNKTYPE, linkname=target)


def tar(members: Sequence[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@contextmanager
def reading(raw: bytes, config: ImportConfig | None = None, *, whole: bool = True) -> Iterator[TarInput]:
    notes = Notes()
    yield TarInput(io.BytesIO(raw), number=0, config=config or ImportConfig(), notes=notes, whole=whole)


def read_all(raw: bytes, config: ImportConfig | None = None) -> list[tuple[TreeEntry, bytes]]:
    with reading(raw, config) as archive:
        entries = list(archive.entries())
        return [(e, b"".join(archive.read(e.content)) if e.content else b"") for e in entries]


def sha(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()


PACKERS = {
    "": lambda raw: raw,
    "+gzip": lambda raw: gzip.compress(raw, mtime=0),
    "+zstd": lambda raw: zstandard.ZstdCompressor().compress(raw),
}


@dataclass
class Image:
    """An image's blobs, and the descriptor of its manifest."""

    blobs: dict[str, bytes]
    manifest: dict[str, Any]
    config: bytes
    layers: list[bytes]


def image(
    layers: Sequence[bytes], packing: str = "+gzip", run: dict[str, Any] | None = None, arch: str = "amd64"
) -> Image:
    """An OCI image of layers given as plain tars."""
    packed = [PACKERS[packing](layer) for layer in layers]
    config = json.dumps(
        {
            "architecture": arch,
            "os": "linux",
            "config": run or {},
            "rootfs": {"type": "layers", "diff_ids": [sha(layer) for layer in layers]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [descriptor(blob, f"application/vnd.oci.image.layer.v1.tar{packing}") for blob in packed],
        }
    ).encode()
    blobs = {sha(blob): blob for blob in [config, manifest, *packed]}
    top = descriptor(manifest, "application/vnd.oci.image.manifest.v1+json")
    return Image(blobs, top, config, list(layers))


def descriptor(raw: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": sha(raw), "size": len(raw)}


def index_of(manifests: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": list(manifests)}).encode()


def layout_files(made: Image, index: bytes | None = None) -> dict[str, bytes]:
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index or index_of([made.manifest])}
    files.update({f"blobs/sha256/{digest.removeprefix('sha256:')}": blob for digest, blob in made.blobs.items()})
    return files


def write_layout(root: Path, files: dict[str, bytes]) -> Path:
    for name, raw in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)
    return root
