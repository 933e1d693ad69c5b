"""A local tree as a tar stream (POSIX PAX), in pieces of bounded size, without threads or temporary files."""

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from dsec.model.errors import InvalidArgument
from dsec.sdk.records import Refusal, Transfer

__all__ = ["PIECE", "Packer", "read_pieces"]

PIECE = 1 << 18
"""Bytes of a piece, about; headers of small files are gathered up to it."""
WHOLE = 1 << 19
"""Bytes of a piece of a single file, at most."""
_BLOCK = tarfile.BLOCKSIZE


def _open(path: str | os.PathLike[str], follow: bool) -> int:
    # not blocking: a pipe put in a file's place must not stop the transfer
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        return os.open(path, flags)
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error.strerror}", field="source") from error


def read_pieces(path: Path, digest: "hashlib._Hash") -> Iterator[bytes]:
    """The content of one regular file, and `digest` of what was yielded. Raises InvalidArgument where it is none or cannot
    be read."""
    handle = _open(path, follow=True)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise InvalidArgument(f"{path}: not a regular file or directory", field="source")
        while piece := os.read(handle, WHOLE):
            digest.update(piece)
            yield piece
    finally:
        os.close(handle)


class Packer:
    """Packs what `root` holds; names are relative to it. After `pieces` has ended, `sha256` (of the tar) and `summary` are
    those of the whole. Owners are written as 0: the receiver decides."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._digest = hashlib.sha256()
        self._links: dict[tuple[int, int], str] = {}
        self._buffer = bytearray()
        self._entries = 0
        self._size = 0
        self._refused: list[Refusal] = []

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes made so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def summary(self) -> Transfer:
        """What was packed so far."""
        return Transfer(entries=self._entries, size=self._size, refused=tuple(self._refused))

    def pieces(self) -> Iterator[bytes]:
        """The tar. Raises InvalidArgument where something cannot be read or a file changes its size meanwhile."""
        for piece in self._tree():
            self._buffer += piece
            if len(self._buffer) >= PIECE:
                yield self._flush()
        self._buffer += bytes(2 * _BLOCK)
        yield self._flush()

    def _flush(self) -> bytes:
        piece = bytes(self._buffer)
        self._buffer.clear()
        self._digest.update(piece)
        return piece

    def _tree(self) -> Iterator[bytes]:
        # a stack of open listings, so depth is bounded by memory and not by recursion
        pending = [("", str(self._root))]
        while pending:
            prefix, directory = pending.pop()
            for name in sorted(self._names(directory)):
                path, relative = os.path.join(directory, name), prefix + name
                try:
                    status = os.lstat(path)
                except FileNotFoundError as error:
                    raise InvalidArgument(f"{path}: removed while it was read", field="source") from error
                if stat.S_ISDIR(status.st_mode):
                    pending.append((relative + "/", path))
                yield from self._entry(relative, path, status)

    def _names(self, directory: str) -> list[str]:
        try:
            return os.listdir(directory)
        except OSError as error:
            raise InvalidArgument(f"{directory}: {error.strerror}", field="source") from error

    def _entry(self, relative: str, path: str, status: os.stat_result) -> Iterator[bytes]:
        info = tarfile.TarInfo(relative)
        info.mode = stat.S_IMODE(status.st_mode)
        info.mtime = int(status.st_mtime)
        key = (status.st_dev, status.st_ino)
        if stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        elif stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
        elif not stat.S_ISREG(status.st_mode):
            self._refused.append(Refusal(path=relative, reason="neither file, directory, link nor pipe"))
            return
        elif status.st_nlink > 1 and key in self._links:
            info.type, info.linkname = tarfile.LNKTYPE, self._links[key]
        else:
            self._links.update({key: relative} if status.st_nlink > 1 else {})
            yield from self._file(info, path)
            return
        self._entries += 1
        yield _header(info)

    def _file(self, info: tarfile.TarInfo, path: str) -> Iterator[bytes]:
        handle = _open(path, follow=False)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{path}: replaced while it was read", field="source")
            info.size = left = status.st_size
            self._entries += 1
            yield _header(info)
            while left:
                piece = os.read(handle, min(left, PIECE))
                if not piece:
                    raise InvalidArgument(f"{path}: became shorter while it was read", field="source")
                left -= len(piece)
                self._size += len(piece)
                yield piece
            yield bytes(-info.size % _BLOCK)
        finally:
            os.close(handle)


def _header(info: tarfile.TarInfo) -> bytes:
    try:
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    except ValueError as error:
        raise InvalidArgument(f"{info.name}: {error}", field="source") from error
