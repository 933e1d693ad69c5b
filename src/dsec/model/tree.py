"""A tree of files as data: what archives and directories are read into, and layers are written from."""

from enum import IntEnum

from msgspec import Struct

__all__ = ["Content", "EntryKind", "TreeEntry"]


class EntryKind(IntEnum):
    """What a path is. The first seven numbers are those of the image writer; LINK is a hard link, known by its target's path."""

    FILE = 0
    DIR = 1
    SYMLINK = 2
    FIFO = 3
    SOCKET = 4
    CHAR = 5
    BLOCK = 6
    LINK = 7


class Content(Struct, frozen=True, gc=False):
    """Where a file's bytes are: in input number `source`, from byte `offset` on; or, for a directory, at path `origin`.

    `pieces`: for a sparse file the (offset in the file, length) of each piece of data; the pieces lie one behind the other
    in the input and the rest of the file reads as zeros. Sizes in bytes.
    """

    size: int
    source: int = 0
    offset: int = 0
    origin: bytes = b""
    pieces: tuple[tuple[int, int], ...] | None = None


class TreeEntry(Struct, frozen=True, gc=False):
    """One path with all its attributes.

    `path`: as the input has it until composed, then without leading or trailing slash, empty for the root. `mode`:
    permission bits, set-uid, set-gid and sticky. `mtime` in seconds and `mtime_ns` in nanoseconds to add. `rdev`: major
    and minor of a device. `target`: of a symlink, or the path that a LINK is linked to. `group`: in a composed tree,
    entries of one non-zero group are one inode.
    """

    path: bytes
    kind: EntryKind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    mtime_ns: int = 0
    rdev: tuple[int, int] = (0, 0)
    target: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    content: Content | None = None
    group: int = 0
