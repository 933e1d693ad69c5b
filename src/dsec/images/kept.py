"""What an import that was cut off had fetched or unpacked whole: STATE/spool/<kind>-<hex>, found again by its digest.

A file gets there when its digest has been checked, by renaming, and is checked again when it is found, as the host may have died
before it was on disk. Whoever uses one holds a lock on it; what nobody uses goes when room is needed, the oldest first, and by
`dsec cache gc`. An import that ends well leaves nothing here.
"""

import fcntl
import os
from pathlib import Path
from typing import BinaryIO, Literal

from dsec.images.spool import Digest, sha256_of

__all__ = ["Kept"]

Kind = Literal["blob", "tar"]


class Kept:
    """The files below `folder`, at most `most` bytes of them. `blob`: a layer as it is fetched; `tar`: one unpacked."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._claimed: dict[Path, BinaryIO] = {}
        self._mine: set[Path] = set()

    def claim(self, kind: Kind, digest: Digest) -> bool:
        """Whether that file is there and has its digest; `open` will find it then, whatever others do."""
        path = self._path(kind, digest)
        file = self._claimed.get(path) or self._checked(path, digest)
        if file is not None:
            self._claimed[path] = file
        return file is not None

    def open(self, kind: Kind, digest: Digest) -> BinaryIO | None:
        """That file, at its start; None where it is not there. A damaged one is removed."""
        path = self._path(kind, digest)
        return self._claimed.pop(path, None) or self._checked(path, digest)

    def keep(self, kind: Kind, digest: Digest, path: Path, file: BinaryIO) -> Path:
        """Moves the file `path`, open as `file`, whose digest has been checked, to the others; where it is then. Left where it is
        if there is no room for it."""
        size = os.fstat(file.fileno()).st_size
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._evict(self._most - size) > self._most - size:
            return path
        target = self._path(kind, digest)
        fcntl.flock(file, fcntl.LOCK_SH)
        path.rename(target)
        self._mine.add(target)
        return target

    def discard(self, kind: Kind, digest: Digest) -> None:
        """That file is not needed any more. Whoever has it open keeps it."""
        self._path(kind, digest).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of what was claimed and not opened."""
        for file in self._claimed.values():
            file.close()
        self._claimed.clear()

    def finish(self) -> None:
        """The import is done: what it kept or found here goes."""
        self.close()
        for path in self._mine:
            path.unlink(missing_ok=True)

    def clear(self, *, dry_run: bool = False) -> int:
        """Removes what nobody uses; the bytes that it had."""
        if dry_run:
            return sum(size for _, size, _ in self._listed())
        before = sum(size for _, size, _ in self._listed())
        return before - self._evict(0)

    def _path(self, kind: Kind, digest: Digest) -> Path:
        return self._folder / f"{kind}-{digest.hex}"

    def _checked(self, path: Path, digest: Digest) -> BinaryIO | None:
        try:
            file = path.open("rb", buffering=128 << 10)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            if sha256_of(file) == digest.hex:
                file.seek(0)
                self._mine.add(path)
                return file
            path.unlink(missing_ok=True)
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _listed(self) -> list[tuple[float, int, Path]]:
        """(time, bytes, path) of each file, the oldest first."""
        try:
            found = [(entry.stat(), Path(entry.path)) for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        return sorted((seen.st_mtime, seen.st_size, path) for seen, path in found)

    def _evict(self, most: int) -> int:
        """Removes unused files until the rest has at most `most` bytes, or no more can go; the bytes that are left."""
        listed = self._listed()
        left = sum(size for _, size, _ in listed)
        for _, size, path in listed:
            if left <= most:
                break
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                path.unlink(missing_ok=True)
                left -= size
        return left
