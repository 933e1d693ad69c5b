"""The layer store of a node: STATE/layers/<64 hex>/ with manifest.json, meta.erofs, data and files.zst.

A layer is made in a folder of its own below STATE/tmp and renamed into place when all of it is on disk; so a killed import
publishes nothing. Such folders are locked by their maker; the next one to make a folder removes those whose maker has died.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from dsec.images.blob import CHUNK_BYTES, BlobWriter, write_contents
from dsec.images.inputs import Input, Progress
from dsec.images.records import FileRecord, RecordHead, to_erofs, write_records
from dsec.images.spool import Digest, sha256_of
from dsec.kernel.erofs import BLOCK_BYTES, MAX_DATA_BLOCKS, erofs_image
from dsec.kernel.errors import KernelError
from dsec.kernel.mounts import umount
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound
from dsec.model.layers import Blob, ImageConfig, LayerKind, LayerManifest
from dsec.model.tree import TreeEntry
from dsec.ports.clock import Clock

__all__ = ["DATA", "FILES", "MANIFEST", "META", "MOUNT", "LayerStore"]

MANIFEST, META, DATA, FILES = "manifest.json", "meta.erofs", "data", "files.zst"
MOUNT = "mnt"
_PREFIX = "import-"
_LOCK = ".lock"


class LayerStore:
    """The layers below the state directory `state`. Safe to use from several processes at once."""

    def __init__(self, state: Path, clock: Clock) -> None:
        self._state = state
        self._layers = state / "layers"
        self._tmp = state / "tmp"
        self._clock = clock
        self._manifests: dict[str, LayerManifest] = {}

    def directory(self, digest: str) -> Path:
        """Where a layer's files are, or would be. Raises InvalidArgument for what is no digest."""
        return self._layers / Digest(digest).hex

    def digests(self) -> list[str]:
        """All published layers, sorted."""
        if not self._layers.is_dir():
            return []
        return sorted(f"sha256:{entry.name}" for entry in os.scandir(self._layers) if len(entry.name) == 64)

    def manifest(self, digest: str) -> LayerManifest:
        """A layer's manifest, its digest checked. Raises NotFound, and ImageUnavailable for a damaged one."""
        known = self._manifests.get(digest)
        if known is not None:
            return known
        path = self.directory(digest) / MANIFEST
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"no layer {digest} in the store", what="layer") from None
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise ImageUnavailable(f"the manifest of layer {digest} is damaged")
        manifest = msgspec.json.decode(raw, type=LayerManifest)
        if len(self._manifests) >= 4096:
            self._manifests.clear()
        self._manifests[digest] = manifest
        return manifest

    def exists(self, digest: str) -> bool:
        return (self.directory(digest) / MANIFEST).is_file()

    def stored_bytes(self, digest: str) -> int:
        """Bytes that the layer takes on disk; holes are not counted."""
        try:
            return sum(entry.stat().st_blocks * 512 for entry in os.scandir(self.directory(digest)))
        except FileNotFoundError:
            return 0

    def naming(self) -> AbstractContextManager[None]:
        """While this is held, `collecting` waits: a layer is published, or found, and gets its name."""
        self._make(self._layers)
        return _locked(self._layers / _LOCK, fcntl.LOCK_SH)

    def collecting(self) -> AbstractContextManager[None]:
        """While this is held, no layer gets a name."""
        self._make(self._layers)
        return _locked(self._layers / _LOCK, fcntl.LOCK_EX)

    def remove(self, digest: str) -> None:
        """Removes a layer's files; running sandboxes that have it mounted keep reading it. Missing: nothing to do."""
        self._manifests.pop(digest, None)
        with self.scratch() as folder:
            try:
                self.directory(digest).rename(folder / "removed")
            except FileNotFoundError:
                return

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new folder of this process's own below STATE/tmp, removed at the end; removes folders of dead processes too."""
        self._make(self._tmp)
        with _locked(self._tmp / _LOCK):
            self._clean()
            folder = self._tmp / f"{_PREFIX}{self._clock.random(8).hex()}"
            folder.mkdir(mode=0o700)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=False)
            os.close(fd)

    def build(
        self,
        kind: LayerKind,
        entries: Sequence[TreeEntry],
        inputs: Sequence[Input],
        config: ImageConfig,
        folder: Path,
        progress: Progress,
        then: Callable[[str], None],
    ) -> str:
        """Makes and publishes a layer of composed `entries`; `folder` is from `scratch`. Gives the layer's digest.

        `then` is called with the digest to give it a name before `collect` may see it. Raises InvalidArgument for what a
        layer cannot hold.
        """
        made = folder / "layer"
        made.mkdir(mode=0o755)
        with (made / DATA).open("xb", buffering=0) as file:
            with BlobWriter(file) as blob:
                records = write_contents(entries, inputs, blob, progress)
                size = blob.position
                digest, chunk_hashes = blob.finish()
            progress.step("sync", None)
            os.fsync(file.fileno())
            # Sandboxes read a small part of an image: what nobody has read yet takes no memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = Blob(digest=digest, size=size)
        files = _write(made / FILES, RecordHead(1, CHUNK_BYTES, chunk_hashes), records)
        meta = _write_meta(made / META, records, files, data)
        manifest = LayerManifest(
            kind=kind,
            meta=meta,
            data=data,
            files=files,
            chunk_bytes=CHUNK_BYTES,
            hash_root=f"sha256:{hashlib.sha256(chunk_hashes).hexdigest()}",
            entries=len(records),
            content_bytes=sum(record.size for record in records),
            config=config,
        )
        with self.naming():
            digest = self._publish(made, manifest)
            then(digest)
        return digest

    def _publish(self, made: Path, manifest: LayerManifest) -> str:
        raw = msgspec.json.encode(manifest, order="deterministic")
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        with (made / MANIFEST).open("xb") as file:
            file.write(raw)
            _sync(file)
        _sync_directory(made)
        target = self.directory(digest)
        if not target.exists():
            try:
                made.rename(target)
            except OSError:
                # Another import of the same content was first.
                if not (target / MANIFEST).exists():
                    raise
        _sync_directory(self._layers)
        return digest

    def clean(self) -> None:
        """Removes what dead processes left below STATE/tmp."""
        self._make(self._tmp)
        with _locked(self._tmp / _LOCK):
            self._clean()

    def _make(self, folder: Path) -> None:
        # Nobody but root looks in: images hold set-uid files of root, and their mounts are below too.
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def _clean(self) -> None:
        for entry in os.scandir(self._tmp):
            if not entry.name.startswith(_PREFIX):
                continue
            fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                _discard(Path(entry.path))
            finally:
                os.close(fd)


def _discard(folder: Path) -> None:
    """Removes a dead process's folder; a killed `verify` leaves a layer mounted in it."""
    place = folder / MOUNT
    if os.path.ismount(place):
        try:
            umount(str(place), lazy=True)
        except KernelError as error:
            raise ImageUnavailable(f"{place} cannot be unmounted: {error}") from error
    shutil.rmtree(folder)


@contextmanager
def _locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(path: Path, head: RecordHead, records: Sequence[FileRecord]) -> Blob:
    with path.open("x+b") as file:
        write_records(file, head, records)
        _sync(file)
        file.seek(0)
        return Blob(digest=f"sha256:{sha256_of(file)}", size=file.tell())


def _write_meta(path: Path, records: Sequence[FileRecord], files: Blob, data: Blob) -> Blob:
    blocks = (data.size + BLOCK_BYTES - 1) // BLOCK_BYTES
    if blocks > MAX_DATA_BLOCKS:
        raise InvalidArgument(f"a layer of {data.size} bytes; the format ends at 16 TiB", field="source")
    # Equal trees get equal images, so the image's identity follows from its content.
    uuid = hashlib.sha256(f"{files.digest} {data.digest}".encode()).digest()[:16]
    try:
        image = erofs_image([to_erofs(record) for record in records], uuid, blocks)
    except ValueError as error:
        raise InvalidArgument(str(error), field="source") from error
    with path.open("xb") as file:
        file.write(image)
        _sync(file)
    return Blob(digest=f"sha256:{hashlib.sha256(image).hexdigest()}", size=len(image))
