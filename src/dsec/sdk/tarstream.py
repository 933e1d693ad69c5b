"""A tar as it comes over the wire, parsed piece by piece in bounded memory. No I/O; every byte of it is hostile.

Formats: POSIX ustar and PAX (IEEE Std 1003.1, pax), and GNU long names. Headers are decoded by Python's tarfile.
"""

import tarfile
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from dsec.model.errors import RuntimeFailure

__all__ = ["Content", "Entry", "TarStream"]

Kind = Literal["file", "dir", "symlink", "link", "fifo", "device", "other"]

_BLOCK = tarfile.BLOCKSIZE
_EXTENDED_LIMIT = 1 << 20
_KINDS: dict[bytes, Kind] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.DIRTYPE: "dir",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "link",
    tarfile.FIFOTYPE: "fifo",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
}


class Entry(Struct, frozen=True, kw_only=True):
    """One member. `name` and `target` as written, bytes that are not UTF-8 as surrogates. `size`: bytes of content that
    follow as Content. `kind` other: of a type that is not known, or a sparse file."""

    name: str
    kind: Kind
    size: int
    mode: int
    mtime: float
    target: str


class Content(Struct, frozen=True):
    """Some content of the entry before it; `last` for the end of it, also of an empty file."""

    data: memoryview | bytes
    last: bool


class TarStream:
    """Feed it pieces; it answers entries and their content. Memory: one piece and one extended header (1 MiB)."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._content = 0  # bytes of the current entry's content still to come
        self._padding = 0
        self._skip = False
        self._extended: dict[str, str] = {}
        self._extended_kind = b""
        self._extended_left = -1
        self.ended = False

    def feed(self, piece: bytes) -> Iterator[Entry | Content]:
        """What `piece` completes. Raises RuntimeFailure where the stream is no tar."""
        self._pending += piece
        view = memoryview(bytes(self._pending))
        at = 0
        while not self.ended:
            if self._content:
                taken = min(self._content, len(view) - at)
                if taken == 0:
                    break
                self._content -= taken
                at += taken
                if not self._skip:
                    yield Content(view[at - taken : at], last=not self._content)
            elif self._padding:
                taken = min(self._padding, len(view) - at)
                if taken == 0:
                    break
                self._padding -= taken
                at += taken
            elif self._extended_left >= 0:
                if len(view) - at < self._extended_left:
                    break
                body = bytes(view[at : at + self._extended_left])
                at += len(body)
                self._padding, self._extended_left = -len(body) % _BLOCK, -1
                self._extend(body)
            else:
                if len(view) - at < _BLOCK:
                    break
                at += _BLOCK
                yield from self._header(bytes(view[at - _BLOCK : at]))
        self._pending = bytearray() if self.ended else bytearray(view[at:])

    def _header(self, block: bytes) -> Iterator[Entry | Content]:
        if not any(block):
            self.ended = True
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise RuntimeFailure(f"the archive from the sandbox is malformed: {error}") from error
        if info.size < 0:
            raise RuntimeFailure("the archive from the sandbox is malformed: negative size")
        if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if info.size > _EXTENDED_LIMIT:
                raise RuntimeFailure(f"the archive from the sandbox has a header of {info.size} bytes")
            self._extended_kind, self._extended_left = info.type, info.size
            return
        if info.type == tarfile.XGLTYPE:
            self._skip, self._content, self._padding = True, info.size, -info.size % _BLOCK
            return
        yield from self._entry(info)

    def _entry(self, info: tarfile.TarInfo) -> Iterator[Entry | Content]:
        extended, self._extended = self._extended, {}
        try:
            size = int(extended.get("size", info.size))
            mtime = float(extended.get("mtime", info.mtime))
        except ValueError as error:
            raise RuntimeFailure(f"the archive from the sandbox is malformed: {error}") from error
        if size < 0:
            raise RuntimeFailure("the archive from the sandbox is malformed: negative size")
        sparse = any(key.startswith("GNU.sparse") for key in extended)
        kind: Kind = "other" if sparse else _KINDS.get(info.type, "other")
        carried = size if kind in ("file", "other") else 0
        self._content, self._padding, self._skip = carried, -carried % _BLOCK, kind != "file"
        yield Entry(
            name=extended.get("path", info.name),
            kind=kind,
            size=carried,
            mode=info.mode,
            mtime=mtime,
            target=extended.get("linkpath", info.linkname),
        )
        if kind == "file" and carried == 0:
            yield Content(b"", last=True)

    def _extend(self, body: bytes) -> None:
        if self._extended_kind in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            key = "path" if self._extended_kind == tarfile.GNUTYPE_LONGNAME else "linkpath"
            self._extended[key] = body.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
            return
        at = 0
        while at < len(body) and body[at]:
            space = body.find(b" ", at, at + 10)
            digits = body[at:space] if space > at else b""
            end = at + int(digits) if digits.isdigit() else -1
            keyword, equals, value = body[space + 1 : end].partition(b"=")
            # The end lies behind the length itself, so that each record leads on.
            if not space < end <= len(body) or not equals or not value.endswith(b"\n"):
                raise RuntimeFailure("the archive from the sandbox is malformed: a PAX record")
            name = keyword.decode("utf-8", "surrogateescape")
            if name in ("path", "linkpath", "size", "mtime") or name.startswith("GNU.sparse"):
                self._extended[name] = value[:-1].decode("utf-8", "surrogateescape")
            at = end
