"""Images in files: OCI layouts (a directory, or a tar of one) and what `docker save` writes. Source: OCI image-layout.md.

Archives are opened as data: a blob named in one is read at its place in it; no name from it becomes a path of the host.
"""

import functools
import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from dsec.images.inputs import Source
from dsec.images.oci import Descriptor, LayerBlob, Manifest, Platform, Workshop, choose, config_of, load, parse, stack
from dsec.images.spool import Digest
from dsec.images.tar import TarInput
from dsec.model.errors import InvalidArgument, NotFound
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import components

__all__ = ["ArchiveParts", "LayoutDirectory", "image_in_archive", "open_layout", "top_of"]

_REF = "org.opencontainers.image.ref.name"
_NAME = "io.containerd.image.name"
_LOOK_AT = 5000


class _Window(io.RawIOBase):
    """A range of an open file as a file of its own."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = max(0, min(len(buffer), self._size - self._at))
        data = os.pread(self._file.fileno(), room, self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class LayoutDirectory:
    """The parts of an OCI layout in a directory."""

    checked = False

    def __init__(self, root: Path, work: Workshop) -> None:
        self._root = root
        self._work = work

    def file(self, name: str) -> bytes:
        path = self._root / name
        if not path.is_file():
            raise InvalidArgument(f"not an OCI layout: {name} is missing", field="source")
        with path.open("rb") as file:
            return _bounded(file, self._work)

    def document(self, descriptor: Descriptor) -> bytes:
        with self.blob(descriptor) as file:
            raw = _bounded(file, self._work)
        Digest(descriptor.digest).check(hashlib.sha256(raw).hexdigest(), "a document")
        return raw

    def blob(self, descriptor: Descriptor) -> BinaryIO:
        path = self._root / "blobs/sha256" / Digest(descriptor.digest).hex
        if not path.is_file():
            raise NotFound(f"blob {descriptor.digest} is missing in the layout", what="blob")
        return path.open("rb")


class ArchiveParts:
    """The parts of an image in an uncompressed tar: an OCI layout's, or those of `docker save`, by their name in it."""

    checked = False

    def __init__(self, path: Path, found: Mapping[bytes, TreeEntry], work: Workshop) -> None:
        self._path = path
        self._found = found
        self._work = work

    def has(self, name: str) -> bool:
        return name.encode() in self._found

    def open(self, name: str) -> BinaryIO:
        """The file of this name, through symlinks inside the archive (older docker writes them for repeated layers)."""
        wanted = components(os.fsencode(name))
        for _ in range(8):
            entry = self._found.get(b"/".join(wanted))
            if entry is None:
                break
            if entry.kind in (EntryKind.SYMLINK, EntryKind.LINK):
                start = wanted[:-1] if entry.kind is EntryKind.SYMLINK else ()
                wanted = _joined(start, entry.target)
                continue
            if entry.content is None or entry.content.pieces is not None:
                break
            window = _Window(self._path, entry.content.offset, entry.content.size)
            return io.BufferedReader(window, 128 << 10)
        raise InvalidArgument(f"{name[:200]!a} is missing in the archive", field="source")

    def file(self, name: str) -> bytes:
        with self.open(name) as file:
            return _bounded(file, self._work)

    def document(self, descriptor: Descriptor) -> bytes:
        with self.blob(descriptor) as file:
            raw = _bounded(file, self._work)
        Digest(descriptor.digest).check(hashlib.sha256(raw).hexdigest(), "a document")
        return raw

    def blob(self, descriptor: Descriptor) -> BinaryIO:
        return self.open(f"blobs/sha256/{Digest(descriptor.digest).hex}")


class _Saved(Struct, frozen=True, rename="pascal"):
    """One image in the manifest.json of `docker save`."""

    config: str
    layers: tuple[str, ...]
    repo_tags: tuple[str, ...] | None = None


def _bounded(file: BinaryIO, work: Workshop) -> bytes:
    raw = file.read(work.config.document_bytes + 1)
    if len(raw) > work.config.document_bytes:
        raise InvalidArgument(f"a document of more than {work.config.document_bytes} bytes", field="source")
    return raw


def _joined(start: tuple[bytes, ...], target: bytes) -> tuple[bytes, ...]:
    parts = list(start)
    for part in target.split(b"/"):
        if part == b"..":
            parts = parts[:-1]
        elif part not in (b"", b"."):
            parts.append(part)
    return tuple(parts)


def top_of(index: bytes, ref: str | None, wanted: Platform) -> Descriptor:
    """The manifest that index.json leads to: the one named `ref`, or the only one for the platform. Raises NotFound."""
    candidates = parse(index, Manifest, "index.json").manifests
    if ref is not None:
        named = [c for c in candidates if ref in (c.annotations.get(_REF), c.annotations.get(_NAME), c.digest)]
        if not named:
            there = sorted(c.annotations.get(_REF, c.digest) for c in candidates)
            raise NotFound(f"the layout has no image {ref!a}; it has {there}", what="image")
        candidates = tuple(named)
    return choose(candidates, wanted, "the layout")


def open_layout(root: Path, ref: str | None, wanted: Platform, work: Workshop) -> Source:
    """The image in an OCI layout directory."""
    parts = LayoutDirectory(root, work)
    return load(parts, top_of(parts.file("index.json"), ref, wanted), f"oci:{root}", wanted, work)


def image_in_archive(path: Path, origin: str, ref: str | None, wanted: Platform, work: Workshop) -> Source | None:
    """The image in the uncompressed tar at `path`; None when it holds none, so that it is a root filesystem itself.

    An image's archive has its few names at the front: no more than 5,000 entries are looked at to find out.
    """
    with path.open("rb", buffering=128 << 10) as file:
        found: dict[bytes, TreeEntry] = {}
        marks = 0
        for count, entry in enumerate(TarInput(file, number=0, config=work.config, notes=work.notes).entries()):
            name = b"/".join(components(entry.path)) if not entry.path.startswith(b"/") else b""
            found[name] = entry
            marks += name in (b"oci-layout", b"manifest.json", b"index.json")
            if count >= _LOOK_AT and not marks:
                return None
    parts = ArchiveParts(path, found, work)
    if parts.has("oci-layout") and parts.has("index.json"):
        return load(parts, top_of(parts.file("index.json"), ref, wanted), origin, wanted, work)
    if parts.has("manifest.json") and _looks_saved(parts):
        return docker_archive(parts, origin, ref, wanted, work)
    return None


def _looks_saved(parts: ArchiveParts) -> bool:
    try:
        parse(parts.file("manifest.json"), list[_Saved], "manifest.json")
    except InvalidArgument:
        return False
    return True


def docker_archive(parts: ArchiveParts, origin: str, ref: str | None, wanted: Platform, work: Workshop) -> Source:
    """An image that `docker save` wrote (before it wrote OCI layouts)."""
    images = parse(parts.file("manifest.json"), list[_Saved], "manifest.json")
    tags = [tag for image in images for tag in image.repo_tags or ()]
    if ref is not None:
        images = [image for image in images if ref in (image.repo_tags or ())]
    if len(images) != 1:
        raise InvalidArgument(
            f"the archive holds {len(images)} such images; choose one with --ref: {tags}", field="ref"
        )
    config, diff_ids = config_of(parts.file(images[0].config), wanted)
    if len(diff_ids) != len(images[0].layers):
        raise InvalidArgument("the archive's layers and its config do not agree", field="source")
    layers = [LayerBlob(functools.partial(parts.open, name)) for name in images[0].layers]
    work.progress.step("unpack", None)
    return stack(layers, diff_ids, config, origin, work, checked=False)
