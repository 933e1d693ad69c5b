"""Reading a directory of the host as a layer: by descriptors, never through a symlink, so that nothing outside it is read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dsec.images.inputs import ImportConfig, Notes, kept_xattrs
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import shown

__all__ = ["KINDS", "DirectoryInput", "pieces_of"]

_PIECE = 1 << 20
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KINDS = {
    stat.S_IFREG: EntryKind.FILE, stat.S_IFDIR: EntryKind.DIR, stat.S_IFLNK: EntryKind.SYMLINK,
    stat.S_IFIFO: EntryKind.FIFO, stat.S_IFCHR: EntryKind.CHAR, stat.S_IFBLK: EntryKind.BLOCK,
}  # fmt: skip


def pieces_of(fd: int, content: Content) -> Iterator[bytes]:
    """As many bytes of an open file as it was listed with. Raises ImageUnavailable where it ends before, OSError."""
    left = content.size
    while left:
        data = os.read(fd, min(left, _PIECE))
        if not data:
            raise ImageUnavailable(f"{shown(content.origin)} changed while it was read")
        left -= len(data)
        yield data


class DirectoryInput:
    """The tree below `path`, as input `number` of an import.

    The layer's root is 0755, 0:0 and its time 0: the directory's own attributes are those of its place on the host. What
    lies on another filesystem than `path` is left out and noted, and so are sockets. `owner`: (uid, gid) of everything,
    instead of what the host says.
    """

    def __init__(
        self, path: Path, *, number: int, config: ImportConfig, notes: Notes, owner: tuple[int, int] | None = None
    ) -> None:
        try:
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{path} does not exist", what="directory") from None
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field="source") from error
        self._number = number
        self._config = config
        self._notes = notes
        self._owner = owner
        self._device = os.fstat(self._root).st_dev
        self._first_name: dict[int, bytes] = {}
        self._count = 0
        self._bytes = 0
        self._open: tuple[bytes, int] | None = None

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None
        os.close(self._root)

    def entries(self) -> Iterator[TreeEntry]:
        """Each path, directories before what is in them. Raises ImageUnavailable when the tree changes under it."""
        yield TreeEntry(path=b"", kind=EntryKind.DIR, mode=0o755)
        waiting = [b""]
        while waiting:
            below = waiting.pop()
            try:
                fd = self._directory(below)
                names = sorted(os.fsencode(name) for name in os.listdir(fd))
                for name in names:
                    entry = self._entry(fd, name, below + b"/" + name if below else name)
                    if entry is None:
                        continue
                    if entry.kind is EntryKind.DIR:
                        waiting.append(entry.path)
                    yield entry
            except OSError as error:
                raise ImageUnavailable(f"{shown(below)}: {error.strerror} while it was read") from error

    def read(self, content: Content) -> Iterator[bytes]:
        """The file's bytes. Raises ImageUnavailable when it is no longer what `entries` found."""
        below, _, name = content.origin.rpartition(b"/")
        try:
            fd = os.open(name, _OPEN_FILE, dir_fd=self._directory(below))
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or found.st_size != content.size:
                    raise ImageUnavailable(f"{shown(content.origin)} changed while it was read")
                yield from pieces_of(fd, content)
            finally:
                os.close(fd)
        except OSError as error:
            raise ImageUnavailable(f"{shown(content.origin)}: {error.strerror} while it was read") from error

    def _directory(self, path: bytes) -> int:
        """A descriptor of a directory below the root, opened name by name; kept until another is asked for."""
        if not path:
            return self._root
        if self._open is not None:
            if self._open[0] == path:
                return self._open[1]
            os.close(self._open[1])
            self._open = None
        fd = os.dup(self._root)
        try:
            for name in path.split(b"/"):
                below = os.open(name, _OPEN_DIR, dir_fd=fd)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        self._open = (path, fd)
        return fd

    def _entry(self, parent: int, name: bytes, path: bytes) -> TreeEntry | None:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            self._notes.add("sockets were left out: they are of use to the processes that made them only")
            return None
        if found.st_dev != self._device:
            self._notes.add(f"{shown(path)} was left out: another filesystem is mounted there")
            return None
        self._count += 1
        if self._count > self._config.entries:
            raise InvalidArgument(f"more than {self._config.entries} entries in a layer", field="source")
        first = self._first_name.setdefault(found.st_ino, path) if found.st_nlink > 1 else path
        uid, gid = self._owner or (found.st_uid, found.st_gid)
        common = {"uid": uid, "gid": gid, "mtime": found.st_mtime_ns // 10**9, "mtime_ns": found.st_mtime_ns % 10**9}
        if first != path and kind is not EntryKind.DIR:
            return TreeEntry(path=path, kind=EntryKind.LINK, target=first)
        return TreeEntry(
            path=path,
            kind=kind,
            mode=stat.S_IMODE(found.st_mode),
            rdev=(os.major(found.st_rdev), os.minor(found.st_rdev)),
            target=os.fsencode(os.readlink(name, dir_fd=parent)) if kind is EntryKind.SYMLINK else b"",
            xattrs=self._xattrs(parent, name, path, kind),
            content=self._content(path, found.st_size) if kind is EntryKind.FILE else None,
            **common,
        )

    def _content(self, path: bytes, size: int) -> Content:
        self._bytes += size
        if self._bytes > self._config.content_bytes:
            raise InvalidArgument(f"files of more than {self._config.content_bytes} bytes in a layer", field="source")
        return Content(size, self._number, origin=path)

    def _xattrs(self, parent: int, name: bytes, path: bytes, kind: EntryKind) -> tuple[tuple[bytes, bytes], ...]:
        # The calls by descriptor refuse pipes, devices and symlinks, so all go by name below the parent's descriptor.
        place = b"/proc/self/fd/%d/%s" % (parent, name)
        names = os.listxattr(place, follow_symlinks=False)
        if not names:
            return ()
        pairs = [(os.fsencode(n), os.getxattr(place, n, follow_symlinks=False)) for n in names]
        return kept_xattrs(pairs, path, self._notes)
