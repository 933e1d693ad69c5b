"""Images made by hand: members of a tar, tars, and OCI layouts, by the standard library alone."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PACKERS", "Image", "Member", "descriptor", "file", "folder", "image", "index_of", "layout_files", "link", "other",
    "packed_directory", "sha", "symlink", "tar", "write_layout",
]  # fmt: skip

Member = tuple[tarfile.TarInfo, bytes]
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    "+gzip": lambda raw: gzip.compress(raw, 1, mtime=0),
}


def file(name: str, data: bytes = b"", **fields: Any) -> Member:
    """A regular file; `fields` are those of TarInfo."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def other(name: str, kind: bytes, **fields: Any) -> Member:
    """A member of another kind."""
    info, _ = file(name, b"", **fields)
    info.type = kind
    return info, b""


def folder(name: str, **fields: Any) -> Member:
    """A directory."""
    return other(name, tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def symlink(name: str, target: str) -> Member:
    """A symbolic link."""
    return other(name, tarfile.SYMTYPE, linkname=target)


def link(name: str, target: str) -> Member:
    """A hard link."""
    return other(name, tarfile.LNKTYPE, linkname=target)


def tar(members: Sequence[Member], form: int = tarfile.PAX_FORMAT) -> bytes:
    """The members as one archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def packed_directory(root: Path) -> bytes:
    """A directory as a layer; everything belongs to root."""
    out = io.BytesIO()

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        return info

    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, arcname=".", filter=owned)
    return out.getvalue()


def sha(raw: bytes) -> str:
    """A digest as OCI writes it."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


@dataclass
class Image:
    """An image's blobs, and the descriptor of its manifest."""

    blobs: dict[str, bytes]
    manifest: dict[str, Any]
    config: bytes
    layers: list[bytes]


def image(
    layers: Sequence[bytes],
    packing: str = "+gzip",
    run: dict[str, Any] | None = None,
    arch: str = ARCH,
    packers: Mapping[str, Callable[[bytes], bytes]] = PACKERS,
) -> Image:
    """An OCI image of layers given as plain tars."""
    packed = [packers[packing](layer) for layer in layers]
    rootfs = {"type": "layers", "diff_ids": [sha(layer) for layer in layers]}
    config = json.dumps({"architecture": arch, "os": "linux", "config": run or {}, "rootfs": rootfs}).encode()
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
    """What refers to a blob."""
    return {"mediaType": media_type, "digest": sha(raw), "size": len(raw)}


def index_of(manifests: Sequence[dict[str, Any]]) -> bytes:
    """An index of manifests."""
    return json.dumps({"schemaVersion": 2, "manifests": list(manifests)}).encode()


def layout_files(made: Image, index: bytes | None = None) -> dict[str, bytes]:
    """The files of an OCI layout."""
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index or index_of([made.manifest])}
    files.update({f"blobs/sha256/{digest.removeprefix('sha256:')}": blob for digest, blob in made.blobs.items()})
    return files


def write_layout(root: Path, files: Mapping[str, bytes]) -> Path:
    """Writes them below `root`."""
    for name, raw in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)
    return root
