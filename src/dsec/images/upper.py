"""Reading the writable layer of a sandbox as a layer: a directory in overlayfs's form, which nothing changes any more.

Owners are plain there (0 is the sandbox's root), deletions are character devices 0/0, and folders that hide what lies beneath carry
trusted.overlay.opaque; all three go into the layer as they are. The directory was written by a tenant: what it holds is data.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from dsec.images.directory import KINDS, pieces_of
from dsec.images.inputs import ImportConfig, Notes, kept_xattrs
from dsec.model.errors import ImageUnavailable, InvalidArgument
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR, shown
from dsec.rules.scrub import Scrub

__all__ = ["Tally", "UpperInput"]

_LONGEST = 4096
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OURS = b"trusted.overlay."
_NESTED = b"user.overlay."
# Only mounts that take other options than ours make them; a layer with them would show other files than it holds.
_REFUSED = (b"trusted.overlay.redirect", b"trusted.overlay.metacopy")


class Tally(Struct):
    """What was counted: paths and bytes of files, each inode once."""

    entries: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """One path more, whose content adds `size` bytes."""
        self.entries += 1
        self.bytes += size


class _Folder(Struct):
    """A folder being read: its path, its names that are still to come (the next one last), and, when it was scrubbed, by what; `entry` is
    given out when something in it is kept."""

    path: bytes
    names: list[bytes]
    scrubbed: str | None
    entry: TreeEntry | None


class UpperInput:
    """The tree below `path`, as input `number`, without what `scrub` says. `entries` gives a composed tree: in the order of a layer, hard
    links as groups. Afterwards `kept`, by the first two names of paths, `scrubbed`, by rule, and `whiteouts` say what there was.
    """

    def __init__(self, path: Path, *, number: int, config: ImportConfig, notes: Notes, scrub: Scrub) -> None:
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self._root).st_dev
        self._number = number
        self._config = config
        self._notes = notes
        self._scrub = scrub
        self._groups: dict[int, int] = {}
        self._inodes: set[int] = set()
        self._count = 0
        self._bytes = 0
        self.kept: dict[str, Tally] = {}
        self.scrubbed: dict[str, Tally] = {}
        self.whiteouts = 0

    def close(self) -> None:
        """Lets go of the directory."""
        os.close(self._root)

    def entries(self) -> Iterator[TreeEntry]:
        """Raises InvalidArgument, naming the path, for what a layer must not hold and for what goes over a bound."""
        try:
            top = self._entry(b"", os.fstat(self._root))
            if top is not None:
                yield top
            stack = [self._folder(b"", None, None)]
            while stack:
                folder = stack[-1]
                if not folder.names:
                    stack.pop()
                    continue
                name = folder.names.pop()
                yield from self._next(stack, folder.path + b"/" + name if folder.path else name)
        except OSError as error:
            raise ImageUnavailable(f"the changes cannot be read: {error.strerror}") from error

    def _next(self, stack: list[_Folder], path: bytes) -> Iterator[TreeEntry]:
        """What one path gives: itself, before it the folders it is in that were held back; and its folder goes on the stack."""
        if len(path) >= _LONGEST:
            raise InvalidArgument(f"{shown(path)}: path of 4,096 bytes or more", field="path")
        found = os.stat(path, dir_fd=self._root, follow_symlinks=False)
        self._bound(path, found)
        kind = EntryKind.SOCKET if stat.S_ISSOCK(found.st_mode) else KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            raise InvalidArgument(f"{shown(path)}: no kind of file that a layer can hold", field="path")
        names = path.decode("utf-8", "surrogateescape").split("/")
        rule = stack[-1].scrubbed or self._scrub.rule(names, kind)
        if rule is not None and kind is not EntryKind.SOCKET and self._scrub.keeps(names):
            rule = None
        if rule is not None:
            self._tally(self.scrubbed, rule, found)
            if kind is EntryKind.DIR:
                stack.append(self._folder(path, rule, self._entry(path, found)))
            return
        for folder in stack:
            if folder.entry is not None:
                yield folder.entry
                folder.entry = None
        entry = self._entry(path, found)
        self.whiteouts += kind is EntryKind.CHAR
        self._tally(self.kept, "/" + "/".join(names[:2]), found)
        yield entry
        if kind is EntryKind.DIR:
            stack.append(self._folder(path, None, None))

    def _folder(self, path: bytes, scrubbed: str | None, entry: TreeEntry | None) -> _Folder:
        fd = os.open(path or b".", _OPEN_DIR, dir_fd=self._root)
        try:
            names = []
            for name in os.listdir(fd):
                names.append(os.fsencode(name))
                # Counted while they are listed: a folder may hold more names than there is memory for.
                if self._count + len(names) > self._config.entries:
                    raise self._too_many()
        finally:
            os.close(fd)
        return _Folder(path, sorted(names, reverse=True), scrubbed, entry)

    def _too_many(self) -> InvalidArgument:
        return InvalidArgument(f"more than {self._config.entries} changed paths", field="entries")

    def _bound(self, path: bytes, found: os.stat_result) -> None:
        self._count += 1
        if self._count > self._config.entries:
            raise self._too_many()
        if found.st_dev != self._device:
            raise InvalidArgument(f"{shown(path)}: on another file system", field="path")
        if found.st_ino in self._inodes:
            return
        if found.st_nlink > 1:
            self._inodes.add(found.st_ino)
        self._bytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
        if self._bytes > self._config.content_bytes:
            raise InvalidArgument(f"changed files of more than {self._config.content_bytes} bytes", field="content")

    def _tally(self, tallies: dict[str, Tally], name: str, found: os.stat_result) -> None:
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        tallies.setdefault(name, Tally()).add(size)

    def _entry(self, path: bytes, found: os.stat_result) -> TreeEntry:
        kind = KINDS[stat.S_IFMT(found.st_mode)]
        rdev = (os.major(found.st_rdev), os.minor(found.st_rdev))
        if kind is EntryKind.BLOCK or (kind is EntryKind.CHAR and rdev != (0, 0)):
            raise InvalidArgument(f"{shown(path)}: a device, which no sandbox can make", field="path")
        if kind is EntryKind.CHAR:
            return TreeEntry(path=path, kind=kind, mode=0)
        linked = found.st_nlink > 1 and kind is not EntryKind.DIR
        return TreeEntry(
            path=path,
            kind=kind,
            mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            mtime=found.st_mtime_ns // 10**9,
            mtime_ns=found.st_mtime_ns % 10**9,
            target=os.fsencode(os.readlink(path, dir_fd=self._root)) if kind is EntryKind.SYMLINK else b"",
            xattrs=self._xattrs(path, kind),
            content=Content(found.st_size, self._number, origin=path) if kind is EntryKind.FILE else None,
            group=self._groups.setdefault(found.st_ino, len(self._groups) + 1) if linked else 0,
        )

    def _xattrs(self, path: bytes, kind: EntryKind) -> tuple[tuple[bytes, bytes], ...]:
        place = b"/proc/self/fd/%d/%s" % (self._root, path or b".")
        pairs = []
        opaque = False
        for text in os.listxattr(place, follow_symlinks=False):
            name = os.fsencode(text)
            if name in _REFUSED:
                raise InvalidArgument(f"{shown(path)}: {shown(name)}, which is not ours", field="path")
            if name == OPAQUE_XATTR[0]:
                opaque = kind is EntryKind.DIR and os.getxattr(place, text, follow_symlinks=False) == OPAQUE_XATTR[1]
            elif name.startswith(_NESTED):
                self._notes.add(
                    f"attributes named {shown(_NESTED)}* were left out: they belong to overlays inside the sandbox"
                )
            elif not name.startswith(_OURS):
                pairs.append((name, os.getxattr(place, text, follow_symlinks=False)))
        kept = kept_xattrs(pairs, path, self._notes) if pairs else ()
        return tuple(sorted((*kept, OPAQUE_XATTR))) if opaque else kept

    def read(self, content: Content) -> Iterator[bytes]:
        """The file's bytes. Raises ImageUnavailable where it is not what `entries` found."""
        try:
            fd = os.open(content.origin, _OPEN_FILE, dir_fd=self._root)
            try:
                yield from pieces_of(fd, content)
            finally:
                os.close(fd)
        except OSError as error:
            raise ImageUnavailable(f"{shown(content.origin)}: {error.strerror} while it was read") from error
