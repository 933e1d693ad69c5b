"""What a sandbox sent, written below one local directory and nowhere else.

Rules: every step from the target downwards is opened by descriptor without following links; files appear whole, by
rename; links are made and never followed; a link's own target must lead, by its text, to something below the target.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.model.errors import InvalidArgument, RuntimeFailure
from dsec.sdk.records import Refusal, Transfer
from dsec.sdk.tarstream import Content, Entry, TarStream

__all__ = ["FileReceiver", "Unpacker"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 1024
_REFUSED_KEPT = 1000
# what the shape of one entry can cause; anything else (a full disk, say) is the local machine's and ends the download
_ENTRY_FAULTS = {
    errno.ELOOP: "leads through a symbolic link",
    errno.ENOTDIR: "leads through something that is no directory",
    errno.EISDIR: "a directory is in its place",
    errno.EEXIST: "something else is in its place",
    errno.ENOTEMPTY: "a directory is in its place",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ENOENT: "what it links to is not there",
    errno.EINVAL: "its name is not valid here",
    errno.EILSEQ: "its name is not valid here",
    errno.EMLINK: "too many links",
}


class _RefusedError(Exception):
    """This entry is left out; the text says why."""


def _fresh() -> str:
    return f".dsec-{secrets.token_hex(8)}"


def _local(error: OSError, target: Path) -> InvalidArgument:
    return InvalidArgument(f"{target}: {error.strerror}", field="target")


class FileReceiver:
    """One file to one local path: the old file stays until the new one is whole. Set-id bits are dropped."""

    def __init__(self, target: Path, mode: int) -> None:
        self._target = target
        self._mode = mode & 0o777
        self._part: Path | None = None
        self._handle = -1
        self._size = 0

    def open(self) -> None:
        """Begin. Raises InvalidArgument where the target is a directory or cannot be written."""
        try:
            if self._target.is_dir():
                raise InvalidArgument(f"{self._target}: is a directory", field="target")
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._part = self._target.parent / _fresh()
            self._handle = os.open(self._part, _NEW_FILE, 0o600)
        except OSError as error:
            raise _local(error, self._target) from error

    def feed(self, piece: bytes) -> None:
        """More of it."""
        try:
            _write(self._handle, piece)
        except OSError as error:
            raise _local(error, self._target) from error
        self._size += len(piece)

    def finish(self) -> Transfer:
        """It is whole: put it in place."""
        if self._part is None:
            raise InvalidArgument("not open", field="target")
        try:
            os.fchmod(self._handle, self._mode)
            os.rename(self._part, self._target)
        except OSError as error:
            raise _local(error, self._target) from error
        self._part = None
        return Transfer(entries=1, size=self._size)

    def close(self) -> None:
        """Let go; what is not whole is removed. May be called again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self._part is not None:
            self._part.unlink(missing_ok=True)
            self._part = None


def _write(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


class Unpacker:
    """A tar of the directory `source` of a sandbox, below `target`. Not for use by two threads at once."""

    def __init__(self, target: Path, source: str) -> None:
        self._target = target
        self._source = [part for part in source.split("/") if part not in ("", ".")] if source.startswith("/") else None
        self._stream = TarStream()
        self._root = -1
        self._near: tuple[tuple[str, ...], int] = ((), -1)  # the directory used last, and its descriptor
        self._file: tuple[Entry, tuple[str, ...], str, int] | None = None
        self._entries = 0
        self._size = 0
        self._refused: list[Refusal] = []
        self._refused_more = 0

    def open(self) -> None:
        """Make the target directory. Raises InvalidArgument where that cannot be."""
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            self._root = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _local(error, self._target) from error

    def feed(self, piece: bytes) -> None:
        """More of the tar. Raises RuntimeFailure for what is no tar, InvalidArgument where the local disk fails."""
        for item in self._stream.feed(piece):
            if isinstance(item, Entry):
                with self._naming(item.name):
                    self._begin(item)
            elif self._file is not None:
                self._more(item)

    def finish(self) -> Transfer:
        """The summary. Raises RuntimeFailure where the tar breaks off."""
        if not self._stream.ended or self._file is not None:
            raise RuntimeFailure("the archive from the sandbox breaks off")
        refused = list(self._refused)
        if self._refused_more:
            refused.append(Refusal(path="", reason=f"and {self._refused_more} more entries"))
        return Transfer(entries=self._entries, size=self._size, refused=tuple(refused))

    def close(self) -> None:
        """Let go; a file that is not whole is removed. May be called again."""
        if self._file is not None:
            _, _, part, handle = self._file
            self._file = None
            os.close(handle)
            os.unlink(part, dir_fd=self._near[1])
        for handle in {self._near[1], self._root} - {-1}:
            os.close(handle)
        self._near, self._root = ((), -1), -1

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except _RefusedError as refused:
            self._refuse(name, str(refused))
        except OSError as error:
            reason = _ENTRY_FAULTS.get(error.errno or 0)
            if reason is None:
                raise _local(error, self._target) from error
            self._refuse(name, reason)
        except ValueError as error:  # an embedded NUL
            self._refuse(name, str(error))

    def _refuse(self, name: str, reason: str) -> None:
        if len(self._refused) < _REFUSED_KEPT:
            self._refused.append(Refusal(path=name[:4096], reason=reason))
        else:
            self._refused_more += 1

    def _begin(self, entry: Entry) -> None:
        parts = _parts(entry.name)
        if entry.kind in ("fifo", "device", "other"):
            raise _RefusedError({"fifo": "a pipe", "device": "a device"}.get(entry.kind, "of an unknown kind"))
        if not parts:
            if entry.kind != "dir":
                raise _RefusedError("names the target itself")
            return
        parent, name = self._directory(parts[:-1]), parts[-1]
        if entry.kind == "dir":
            self._make_directory(parent, name, entry.mode)
        elif entry.kind == "symlink":
            self._make_symlink(parent, name, self._link_text(entry.target, len(parts) - 1))
        elif entry.kind == "link":
            self._make_link(parent, name, _parts(entry.target))
        else:
            part = _fresh()
            self._file = (entry, parts, part, os.open(part, _NEW_FILE, 0o600, dir_fd=parent))
            return
        self._entries += 1

    def _directory(self, parts: tuple[str, ...], make: bool = True) -> int:
        """A descriptor of the directory, which stays ours; its missing parents are made."""
        if self._near[1] >= 0 and self._near[0] == parts:
            return self._near[1]
        handle = os.dup(self._root)
        try:
            for part in parts:
                handle = self._step(handle, part, make)
        except OSError:
            os.close(handle)
            raise
        if self._near[1] >= 0:
            os.close(self._near[1])
        self._near = (parts, handle)
        return handle

    def _step(self, handle: int, part: str, make: bool) -> int:
        try:
            below = os.open(part, _DIRECTORY, dir_fd=handle)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(part, 0o755, dir_fd=handle)
            below = os.open(part, _DIRECTORY, dir_fd=handle)
        os.close(handle)
        return below

    def _make_directory(self, parent: int, name: str, mode: int) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
        handle = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            os.fchmod(handle, (mode & 0o777) | 0o700)  # its owner must be able to fill it
        finally:
            os.close(handle)

    def _link_text(self, text: str, depth: int) -> str:
        """The target to write for a link `depth` directories below the top; refuses one that leads out.

        ".." may only lead: then each step back is out of a real directory, and by induction every link ends inside.
        """
        if not text:
            raise _RefusedError("a link to nothing")
        if text.startswith("/"):
            steps = [part for part in text.split("/") if part not in ("", ".")]
            if self._source is None or steps[: len(self._source)] != self._source:
                raise _RefusedError("an absolute link out of the tree")
            text = "/".join([".."] * depth + steps[len(self._source) :]) or "."
        steps = [part for part in text.split("/") if part not in ("", ".")]
        back = 0
        while back < len(steps) and steps[back] == "..":
            back += 1
        if back > depth:
            raise _RefusedError("a link out of the tree")
        if ".." in steps[back:]:
            raise _RefusedError("a link with '..' behind a name, which may lead out of the tree")
        return text

    def _make_symlink(self, parent: int, name: str, text: str) -> None:
        part = _fresh()
        os.symlink(text, part, dir_fd=parent)
        self._place(parent, part, name)

    def _make_link(self, parent: int, name: str, source: tuple[str, ...]) -> None:
        if not source:
            raise _RefusedError("a link to the target itself")
        kept = os.dup(parent)
        part = _fresh()
        try:
            origin = self._directory(source[:-1], make=False)
            if not stat.S_ISREG(os.stat(source[-1], dir_fd=origin, follow_symlinks=False).st_mode):
                raise _RefusedError("a hard link to something that is no file")
            os.link(source[-1], part, src_dir_fd=origin, dst_dir_fd=kept, follow_symlinks=False)
            self._place(kept, part, name)
        finally:
            os.close(kept)

    def _place(self, parent: int, part: str, name: str) -> None:
        try:
            os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.unlink(part, dir_fd=parent)
            raise
        # renaming one hard link onto another of the same file does nothing, and leaves both
        try:
            os.unlink(part, dir_fd=parent)
        except FileNotFoundError:
            return

    def _more(self, content: Content) -> None:
        if self._file is None:
            return
        entry, parts, part, handle = self._file
        try:
            _write(handle, content.data)
            self._size += len(content.data)
            if not content.last:
                return
            os.fchmod(handle, entry.mode & 0o777)
            os.utime(handle, (_time(entry.mtime), _time(entry.mtime)))
        except OSError as error:
            raise _local(error, self._target) from error
        self._file = None
        os.close(handle)
        with self._naming(entry.name):
            self._size -= entry.size  # until it is in place
            self._place(self._near[1], part, parts[-1])
            self._size += entry.size
            self._entries += 1


def _time(mtime: float) -> float:
    """A time that every file system can hold; also for nan and infinities."""
    return mtime if -(2.0**31) <= mtime < 2.0**33 else 0.0


def _parts(name: str) -> tuple[str, ...]:
    """The steps of a member's name; refuses what could lead out."""
    if "\0" in name:
        raise _RefusedError("a NUL in its name")
    if name.startswith("/"):
        raise _RefusedError("an absolute path")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _RefusedError("'..' in its path")
    if len(parts) > _DEPTH:
        raise _RefusedError(f"deeper than {_DEPTH} directories")
    return parts
