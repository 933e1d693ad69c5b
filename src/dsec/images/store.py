"""The layer store of a node: STATE/layers/<64 hex>/ with manifest.json, meta.erofs, data, index and files.zst.

A layer is made in a folder of its own below STATE/tmp and renamed into place when all of it is on disk; so a killed import
publishes nothing. Such folders are locked by their maker; the next one to make a folder removes those whose maker has died.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dsec.images.making import MANIFEST, Made
from dsec.images.manifests import MAX_MANIFEST_BYTES, decode_manifest
from dsec.images.spool import Digest
from dsec.kernel.errors import KernelError
from dsec.kernel.mounts import umount
from dsec.model.errors import ImageUnavailable, NotFound
from dsec.model.layers import LayerManifest
from dsec.ports.clock import Clock

__all__ = ["MOUNT", "LayerStore"]

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

    @property
    def spool(self) -> Path:
        """Where imports leave what they have fetched and unpacked."""
        return self._state / "spool"

    def directory(self, digest: str) -> Path:
        """Where a layer's files are, or would be. Raises InvalidArgument for what is no digest."""
        return self._layers / Digest(digest).hex

    def digests(self) -> list[str]:
        """All published layers, sorted."""
        if not self._layers.is_dir():
            return []
        return sorted(f"sha256:{entry.name}" for entry in os.scandir(self._layers) if len(entry.name) == 64)

    def manifest(self, digest: str) -> LayerManifest:
        """A layer's manifest, checked. Raises NotFound, and ImageUnavailable for a damaged one or another version's."""
        known = self._manifests.get(digest)
        if known is not None:
            return known
        path = self.directory(digest) / MANIFEST
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            raise NotFound(f"no layer {digest} in the store", what="layer") from None
        manifest = decode_manifest(raw, digest)
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

    def publish(self, made: Sequence[Made], then: Callable[[str], None]) -> str:
        """Puts the layers of one image, lowest first, into the store, and gives the digest of the topmost.

        `then` is called with it to give it a name before `collecting` may see them. Raises NotFound when a layer that lies
        below one of them is missing.
        """
        with self.naming():
            for layer in made:
                self._publish(layer)
            then(made[-1].digest)
        return made[-1].digest

    def _publish(self, made: Made) -> None:
        for below in made.manifest.below:
            if not self.exists(below):
                raise NotFound(f"no layer {below} in the store, which {made.digest} lies on", what="layer")
        _sync_directory(made.folder)
        target = self.directory(made.digest)
        if not target.exists():
            try:
                made.folder.rename(target)
            except OSError:
                # Another import of the same content was first.
                if not (target / MANIFEST).exists():
                    raise
        _sync_directory(self._layers)

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


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
