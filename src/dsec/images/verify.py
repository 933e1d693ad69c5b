"""Reading a layer back as a sandbox would, against the record made at import: every attribute and every byte."""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from dsec.images.index import ChunkIndex
from dsec.images.inputs import Progress
from dsec.images.making import DATA, FILES, INDEX, META
from dsec.images.records import FileRecord, read_records
from dsec.images.spool import sha256_of
from dsec.images.store import MOUNT, LayerStore
from dsec.kernel.errors import KernelError
from dsec.kernel.mounts import mount_erofs, umount
from dsec.model.errors import ImageUnavailable
from dsec.model.layers import LayerManifest
from dsec.model.tree import EntryKind

__all__ = ["HAVE", "Damage", "Report", "check_chunks", "verify"]

HAVE = "have"

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TYPES = {
    EntryKind.FILE: stat.S_IFREG, EntryKind.DIR: stat.S_IFDIR, EntryKind.SYMLINK: stat.S_IFLNK,
    EntryKind.FIFO: stat.S_IFIFO, EntryKind.SOCKET: stat.S_IFSOCK, EntryKind.CHAR: stat.S_IFCHR,
    EntryKind.BLOCK: stat.S_IFBLK,
}  # fmt: skip
_MAX_DAMAGES = 1000


class Damage(Struct, frozen=True):
    """One thing that is not as it was recorded: at `path` in the layer, or in a file of the store."""

    path: str
    what: str


class Report(Struct, frozen=True, kw_only=True):
    """What was read back. `damages`: at most 1,000 of them; empty means that all is as it was."""

    digest: str
    entries: int
    bytes_read: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages


class _Findings:
    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self.entries = 0
        self.bytes_read = 0

    def add(self, path: bytes | str, what: str) -> None:
        if len(self.damages) < _MAX_DAMAGES:
            text = path if isinstance(path, str) else path.decode("utf-8", "backslashreplace")
            self.damages.append(Damage(text, what))


def verify(layers: LayerStore, digest: str, progress: Progress) -> Report:
    """Checks the store's files of layer `digest` against its manifest, mounts it aside, and reads back every path.

    What is wrong is in the report; raises NotFound for no such layer, ImageUnavailable when nothing can be read at all.
    """
    manifest, folder = layers.manifest(digest), layers.directory(digest)
    findings = _Findings()
    progress.step("check chunks", manifest.data.size)
    _check_files(folder, manifest, findings, progress)
    progress.step("verify", manifest.content_bytes)
    try:
        records = read_records(folder / FILES)
        with layers.scratch() as scratch, _mounted(folder, scratch / MOUNT) as root:
            _Reader(root, findings, progress).read(records, manifest.entries)
    except ImageUnavailable as error:
        findings.add(FILES, error.detail)
    return Report(
        digest=digest,
        entries=findings.entries,
        bytes_read=findings.bytes_read,
        damages=tuple(findings.damages),
    )


def check_chunks(folder: Path, manifest: LayerManifest, progress: Progress) -> list[int]:
    """The numbers of the chunks whose bytes in `folder`/data are not those that the index in the same folder names.

    Of a layer that is loaded on demand, the chunks that are there are read, by its `have`. Reads from the disk, not from what the
    page cache may hold. Raises ImageUnavailable when the index is damaged, or the data or `have` cannot be read or has another size.
    """
    index = ChunkIndex.read(folder / INDEX, manifest)
    have = _present(folder, index.count)
    bad = []
    try:
        with (folder / DATA).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.data.size:
                raise ImageUnavailable(f"{DATA} has {size} bytes, the manifest says {manifest.data.size}")
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for number, (start, length, digest) in enumerate(index):
                progress.add(length)
                if have is not None and not have[number >> 3] >> (number & 7) & 1:
                    continue
                if hashlib.sha256(os.pread(file.fileno(), length, start)).digest() != digest:
                    bad.append(number)
    except OSError as error:
        raise ImageUnavailable(f"{DATA} cannot be read: {error.strerror}") from error
    return bad


def _present(folder: Path, count: int) -> bytes | None:
    """The bitmap of the chunks that are there, the lowest bit first; None where the layer is whole."""
    try:
        have = (folder / HAVE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ImageUnavailable(f"{HAVE} cannot be read: {error.strerror}") from error
    if len(have) != (count + 7) // 8:
        raise ImageUnavailable(f"{HAVE} has {len(have)} bytes for {count} chunks")
    return have


def _check_files(folder: Path, manifest: LayerManifest, findings: _Findings, progress: Progress) -> None:
    for name, blob in ((META, manifest.meta), (FILES, manifest.files), (INDEX, manifest.index)):
        try:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != blob.size:
                    findings.add(name, f"{size} bytes, the manifest says {blob.size}")
                elif f"sha256:{sha256_of(file)}" != blob.digest:
                    findings.add(name, f"another digest than {blob.digest}")
        except OSError as error:
            findings.add(name, str(error.strerror))
    try:
        for number in check_chunks(folder, manifest, progress):
            findings.add(DATA, f"chunk {number} has other bytes")
    except ImageUnavailable as error:
        findings.add(DATA, error.detail)


@contextmanager
def _mounted(folder: Path, place: Path) -> Iterator[int]:
    place.mkdir()
    try:
        mount_erofs(str((folder / META).resolve()), str((folder / DATA).resolve()), str(place.resolve()))
    except KernelError as error:
        raise ImageUnavailable(f"the layer cannot be mounted: {error}") from error
    try:
        root = os.open(place, _OPEN_DIR)
        try:
            yield root
        finally:
            os.close(root)
    finally:
        umount(str(place))


class _Reader:
    """Reads the mounted layer whose root is the descriptor `root`."""

    def __init__(self, root: int, findings: _Findings, progress: Progress) -> None:
        self._root = root
        self._findings = findings
        self._progress = progress
        self._groups: dict[int, tuple[int, int]] = {}
        self._names: dict[int, int] = {}

    def read(self, records: Iterator[FileRecord], expected: int) -> None:
        """Reads every record's path, and looks for paths without a record."""
        listed, parent, fd = 0, b"", os.dup(self._root)
        try:
            for record in records:
                self._findings.entries += 1
                below, _, name = record.path.rpartition(b"/")
                try:
                    if below != parent:
                        os.close(fd)
                        fd, parent = self._open(below), below
                    listed += self._check(record, fd, name or b".")
                except OSError as error:
                    self._findings.add(record.path, str(error.strerror))
                    if fd < 0 or below != parent:
                        fd, parent = os.dup(self._root), b""
        finally:
            os.close(fd)
        if listed + 1 != self._findings.entries or self._findings.entries != expected:
            self._findings.add(
                "/",
                f"{listed + 1} paths are there, {self._findings.entries} are recorded, {expected} are in the manifest",
            )
        for group, (_, links) in self._groups.items():
            if self._names[group] != links:
                self._findings.add("/", f"an inode has {links} links but {self._names[group]} names")

    def _open(self, path: bytes) -> int:
        """A directory below the root, opened name by name: a path may be longer than the kernel takes at once."""
        fd = os.dup(self._root)
        for name in path.split(b"/") if path else ():
            try:
                below = os.open(name, _OPEN_DIR, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd

    def _check(self, record: FileRecord, parent: int, name: bytes) -> int:
        """Compares one path; gives the number of names in it if it is a directory."""
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = EntryKind(record.kind)
        for what, there, wanted in (
            ("type", stat.S_IFMT(found.st_mode), _TYPES[kind]),
            ("mode", oct(stat.S_IMODE(found.st_mode)), oct(record.mode)),
            ("owner", (found.st_uid, found.st_gid), (record.uid, record.gid)),
            ("time", found.st_mtime_ns, record.mtime * 10**9 + record.mtime_ns),
            ("device", (os.major(found.st_rdev), os.minor(found.st_rdev)), record.rdev),
        ):
            if there != wanted:
                self._findings.add(record.path, f"{what} is {there}, was {wanted}")
        self._check_links(record, found)
        self._check_xattrs(record, parent, name)
        if kind is EntryKind.SYMLINK and os.readlink(name, dir_fd=parent) != record.target:
            self._findings.add(record.path, "another target")
        if kind is EntryKind.FILE and stat.S_ISREG(found.st_mode):
            self._check_bytes(record, parent, name, found.st_size)
        if kind is EntryKind.DIR and stat.S_ISDIR(found.st_mode):
            fd = os.open(name, _OPEN_DIR, dir_fd=parent)
            try:
                return len(os.listdir(fd))
            finally:
                os.close(fd)
        return 0

    def _check_links(self, record: FileRecord, found: os.stat_result) -> None:
        if record.group:
            inode = self._groups.setdefault(record.group, (found.st_ino, found.st_nlink))
            self._names[record.group] = self._names.get(record.group, 0) + 1
            if inode[0] != found.st_ino:
                self._findings.add(record.path, "not the same inode as the other names of its file")
        elif record.kind != EntryKind.DIR and found.st_nlink != 1:
            self._findings.add(record.path, f"{found.st_nlink} links, was 1")

    def _check_xattrs(self, record: FileRecord, parent: int, name: bytes) -> None:
        place = b"/proc/self/fd/%d/%s" % (parent, name)
        names = os.listxattr(place, follow_symlinks=False)
        if not names and not record.xattrs:
            return
        there = {os.fsencode(n): os.getxattr(place, n, follow_symlinks=False) for n in names}
        if there != dict(record.xattrs):
            self._findings.add(record.path, "other extended attributes")

    def _check_bytes(self, record: FileRecord, parent: int, name: bytes, size: int) -> None:
        if size != record.size:
            self._findings.add(record.path, f"size is {size}, was {record.size}")
            return
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        with open(fd, "rb", buffering=0) as file:
            hasher = hashlib.sha256()
            while data := file.read(1 << 20):
                hasher.update(data)
                self._progress.add(len(data))
                self._findings.bytes_read += len(data)
        if hasher.digest() != record.sha256:
            self._findings.add(record.path, "other bytes")
