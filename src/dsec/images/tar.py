"""Reading tar archives: v7, ustar, GNU (long names, sparse), PAX (names, times, sizes, attributes, sparse 0.0, 0.1 and 1.0).

Own code, since the standard library's reader loops for ever on negative sizes, takes a damaged header for the end, rounds
times to floats, and reads headers of any size into memory (Python 3.11). Nothing here touches a path of the host: entries
are data. Sources: POSIX pax, the GNU tar manual ("Basic Tar Format", "Sparse Formats").
"""

from collections.abc import Iterator
from typing import BinaryIO

from dsec.images.inputs import ImportConfig, Notes, kept_xattrs
from dsec.model.errors import ImageUnavailable, InvalidArgument
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import shown

__all__ = ["TarInput"]

_BLOCK = 512
_PIECE = 1 << 20
_ZEROS = bytes(_BLOCK)
_KINDS = {
    b"0": EntryKind.FILE, b"\0": EntryKind.FILE, b"7": EntryKind.FILE, b"S": EntryKind.FILE, b"1": EntryKind.LINK,
    b"2": EntryKind.SYMLINK, b"3": EntryKind.CHAR, b"4": EntryKind.BLOCK, b"5": EntryKind.DIR, b"D": EntryKind.DIR,
    b"6": EntryKind.FIFO,
}  # fmt: skip
_WITH_DATA = {b"0", b"\0", b"7", b"S", b"D", b"x", b"X", b"g", b"L", b"K", b"V"}
_XATTR = b"SCHILY.xattr."

_Records = list[tuple[bytes, bytes]]


def _damaged(why: str, at: int) -> InvalidArgument:
    return InvalidArgument(f"damaged archive: {why} (header at byte {at})", field="source")


def _number(raw: bytes, at: int) -> int:
    """A numeric field: octal text, or base-256 with the top bit set (GNU), which may be negative."""
    if raw[0] & 0x80:
        bits = 8 * len(raw) - 1
        value = int.from_bytes(raw, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value
    # What most writers write, without a look for a NUL: this runs seven times an entry.
    text = raw.rstrip(b"\0 ")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        text = raw.split(b"\0", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise _damaged("a number is not octal", at) from None


def _decimal(text: bytes, at: int, limit: int) -> int:
    if not text.isdigit() or len(text) > 20 or int(text) > limit:
        raise _damaged(f"an extended header's number is {shown(text[:40])}", at)
    return int(text)


def _time(text: bytes, at: int) -> tuple[int, int]:
    """Seconds (rounded down) and nanoseconds of a decimal time, which may be negative; digits past the ninth are cut."""
    sign, digits = text[:1] == b"-", text.removeprefix(b"-")
    whole, _, part = digits.partition(b".")
    if not whole.isdigit() or (part and not part.isdigit()) or len(whole) > 18:
        raise _damaged(f"an extended header's time is {shown(text[:40])}", at)
    seconds, nanos = int(whole), int(part[:9].ljust(9, b"0"))
    if sign:
        return (-seconds - 1, 1_000_000_000 - nanos) if nanos else (-seconds, 0)
    return seconds, nanos


def _text(raw: bytes) -> bytes:
    return raw.split(b"\0", 1)[0]


class _Extended:
    """What extended headers say of the entry that follows them."""

    __slots__ = ("fields", "link", "name", "offsets", "xattrs")

    def __init__(self) -> None:
        self.name: bytes | None = None
        self.link: bytes | None = None
        self.fields: dict[bytes, bytes] = {}
        self.xattrs: _Records = []
        self.offsets: list[tuple[bytes, bytes]] = []

    def take(self, records: _Records) -> None:
        for key, value in records:
            if key.startswith(_XATTR):
                self.xattrs.append((key.removeprefix(_XATTR), value))
            elif key == b"GNU.sparse.offset":
                self.offsets.append((value, b""))
            elif key == b"GNU.sparse.numbytes" and self.offsets:
                self.offsets[-1] = (self.offsets[-1][0], value)
            else:
                self.fields[key] = value


class TarInput:
    """An uncompressed tar archive in `file` (seekable), as input `number` of an import.

    `whole`: refuse an archive without its end mark, as it may be cut off; False where a digest has been checked already.
    """

    def __init__(self, file: BinaryIO, *, number: int, config: ImportConfig, notes: Notes, whole: bool = True) -> None:
        self._file = file
        self._number = number
        self._config = config
        self._notes = notes
        self._whole = whole
        self._size = file.seek(0, 2)
        self._global = _Extended()
        self._content_bytes = 0

    def close(self) -> None:
        self._file.close()

    def entries(self) -> Iterator[TreeEntry]:
        """Each entry in order. Raises InvalidArgument for a damaged or cut archive, or one beyond the bounds."""
        at, count = 0, 0
        extended = _Extended()
        while (header := self._header(at)) is not None:
            kind = header[156:157]
            size = self._stored_size(header, kind, extended, at)
            data = at + _BLOCK
            if kind in b"xXgLK":
                payload = self._payload(data, size, at)
                self._extend(kind, payload, extended, at)
            else:
                if kind != b"V":
                    count += 1
                    if count > self._config.entries:
                        raise InvalidArgument(f"more than {self._config.entries} entries in a layer", field="source")
                    if kind == b"S":
                        data = self._skip_sparse_headers(header, data)
                    yield self._entry(header, kind, extended, size, (at, data))
                extended = _Extended()
            at = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if extended.fields or extended.name:
            raise _damaged("an extended header with nothing behind it", at)

    def read(self, content: Content) -> Iterator[bytes]:
        """The file's bytes; holes as zeros. Raises ImageUnavailable when the archive has become shorter."""
        self._file.seek(content.offset)
        pieces = content.pieces
        if pieces is None:
            if content.size <= _PIECE:
                yield self._file.read(content.size)
                return
            pieces = ((0, content.size),)
        position = 0
        for start, length in pieces:
            yield from _zeros(start - position)
            left = length
            while left:
                data = self._file.read(min(left, _PIECE))
                if not data:
                    raise ImageUnavailable("the archive became shorter while it was read")
                left -= len(data)
                yield data
            position = start + length
        yield from _zeros(content.size - position)

    def _header(self, at: int) -> bytes | None:
        self._file.seek(at)
        header = self._file.read(_BLOCK)
        if len(header) == _BLOCK and header != _ZEROS:
            if not _sum_is_right(header):
                raise _damaged("a header's checksum is wrong" if at else "this is not a tar archive", at)
            return header
        if header != _ZEROS and (self._whole or header):
            raise _damaged("it ends without its end mark, so it may be cut off", at)
        return None

    def _stored_size(self, header: bytes, kind: bytes, extended: _Extended, at: int) -> int:
        if kind not in _WITH_DATA:
            return 0
        size = _number(header[124:136], at)
        if kind not in b"xXgLK":
            given = extended.fields.get(b"size", self._global.fields.get(b"size"))
            size = size if given is None else _decimal(given, at, 1 << 62)
        if size < 0 or at + _BLOCK + size > self._size:
            raise _damaged("a file is longer than the archive, which may be cut off", at)
        return size

    def _payload(self, data: int, size: int, at: int) -> bytes:
        if size > self._config.header_bytes:
            raise _damaged(f"an extended header of {size} bytes; the bound is {self._config.header_bytes}", at)
        self._file.seek(data)
        return self._file.read(size)

    def _extend(self, kind: bytes, payload: bytes, extended: _Extended, at: int) -> None:
        if kind == b"L":
            extended.name = _text(payload)
        elif kind == b"K":
            extended.link = _text(payload)
        else:
            (self._global if kind == b"g" else extended).take(_pax(payload, at))

    def _skip_sparse_headers(self, header: bytes, data: int) -> int:
        more = header[482]
        while more:
            self._file.seek(data)
            block = self._file.read(_BLOCK)
            if len(block) < _BLOCK:
                raise _damaged("it ends inside a sparse file's map", data)
            data, more = data + _BLOCK, block[504]
        return data

    def _entry(self, header: bytes, flag: bytes, extended: _Extended, size: int, place: tuple[int, int]) -> TreeEntry:
        at = place[0]
        fields = {**self._global.fields, **extended.fields} if self._global.fields else extended.fields
        path = fields.get(b"GNU.sparse.name") or fields.get(b"path") or extended.name or _name(header)
        kind = _KINDS.get(flag)
        if kind is None:
            raise InvalidArgument(f"{shown(path)}: entries of type {shown(flag)} are not known", field="source")
        if kind is EntryKind.FILE and path.endswith(b"/"):
            kind = EntryKind.DIR
        target = fields.get(b"linkpath") or extended.link or _text(header[157:257])
        mtime, nanos = _number(header[136:148], at), 0
        if b"mtime" in fields:
            mtime, nanos = _time(fields[b"mtime"], at)
        if not -(1 << 62) < mtime < 1 << 62:
            raise _damaged("a time beyond all bounds", at)
        is_device = kind in (EntryKind.CHAR, EntryKind.BLOCK)
        has_target = kind in (EntryKind.SYMLINK, EntryKind.LINK)
        xattrs = self._global.xattrs + extended.xattrs
        return TreeEntry(
            path=path,
            kind=kind,
            mode=_number(header[100:108], at) & 0o7777,
            uid=_owner(fields.get(b"uid"), header[108:116], path, at),
            gid=_owner(fields.get(b"gid"), header[116:124], path, at),
            mtime=mtime,
            mtime_ns=nanos,
            rdev=_device(header, path, at) if is_device else (0, 0),
            target=target if has_target else b"",
            xattrs=kept_xattrs(xattrs, path, self._notes) if xattrs else (),
            content=self._content(header, flag, extended, size, place) if kind is EntryKind.FILE else None,
        )

    def _content(self, header: bytes, flag: bytes, extended: _Extended, size: int, place: tuple[int, int]) -> Content:
        at, data = place
        fields = extended.fields
        if flag == b"S":
            content = self._sparse(
                _gnu_map(self._file, header, at, self._config.sparse_pieces),
                _number(header[483:495], at),
                size,
                data,
                at,
            )
        elif fields.get(b"GNU.sparse.major") == b"1":
            pieces, skipped = self._map_in_data(data, size, at)
            real = _decimal(fields.get(b"GNU.sparse.realsize", b""), at, 1 << 62)
            content = self._sparse(pieces, real, size - skipped, data + skipped, at)
        elif b"GNU.sparse.map" in fields or extended.offsets:
            flat = [n for pair in extended.offsets for n in pair] or fields[b"GNU.sparse.map"].split(b",")
            numbers = [_decimal(n, at, 1 << 62) for n in flat if n]
            real = _decimal(fields.get(b"GNU.sparse.size", b""), at, 1 << 62)
            content = self._sparse(list(zip(numbers[::2], numbers[1::2], strict=False)), real, size, data, at)
        else:
            content = Content(size, self._number, data)
        self._content_bytes += content.size
        if self._content_bytes > self._config.content_bytes:
            raise InvalidArgument(f"files of more than {self._config.content_bytes} bytes in a layer", field="source")
        return content

    def _sparse(self, pieces: list[tuple[int, int]], real: int, stored: int, data: int, at: int) -> Content:
        position = total = 0
        for start, length in pieces:
            if start < position or length < 0 or len(pieces) > self._config.sparse_pieces:
                raise _damaged("a sparse file's map is out of order or too long", at)
            position, total = start + length, total + length
        if position > real or total > stored:
            raise _damaged("a sparse file's map does not fit its size", at)
        kept = tuple((start, length) for start, length in pieces if length)
        return Content(real, self._number, data, pieces=kept)

    def _map_in_data(self, data: int, size: int, at: int) -> tuple[list[tuple[int, int]], int]:
        """PAX sparse 1.0: decimal lines before the data (count, then offset and length of each), padded to a block."""
        self._file.seek(data)
        room = min(size, self._config.sparse_pieces * 42)
        lines = self._file.read(room).split(b"\n")
        count = _decimal(lines[0], at, self._config.sparse_pieces)
        if len(lines) < 2 * count + 2:
            raise _damaged("a sparse file's map is cut off", at)
        numbers = [_decimal(line, at, 1 << 62) for line in lines[1 : 2 * count + 1]]
        used = sum(len(line) + 1 for line in lines[: 2 * count + 1])
        return list(zip(numbers[::2], numbers[1::2], strict=True)), (used + _BLOCK - 1) // _BLOCK * _BLOCK


def _sum_is_right(header: bytes) -> bool:
    try:
        return _number(header[148:156], 0) == sum(header) - sum(header[148:156]) + 8 * 32
    except InvalidArgument:
        return False


def _name(header: bytes) -> bytes:
    name = _text(header[:100])
    if header[257:263] == b"ustar\0":
        prefix = _text(header[345:500])
        return prefix + b"/" + name if prefix else name
    return name


def _owner(given: bytes | None, raw: bytes, path: bytes, at: int) -> int:
    owner = _number(raw, at) if given is None else _decimal(given, at, 1 << 62)
    if not 0 <= owner < 0xFFFF_FFFF:
        raise InvalidArgument(f"{shown(path)}: owner {owner} is not a user or group number", field="path")
    return owner


def _device(header: bytes, path: bytes, at: int) -> tuple[int, int]:
    major, minor = _number(header[329:337], at), _number(header[337:345], at)
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise InvalidArgument(f"{shown(path)}: device {major}:{minor} is beyond what Linux has", field="path")
    return major, minor


def _zeros(count: int) -> Iterator[bytes]:
    full, rest = divmod(count, _PIECE)
    block = bytes(_PIECE) if full else b""
    for _ in range(full):
        yield block
    if rest:
        yield bytes(rest)


def _pax(payload: bytes, at: int) -> _Records:
    """Records of the form "length key=value\\n", the length counting itself; values are bytes of any kind."""
    records, position = [], 0
    while position < len(payload):
        space = payload.find(b" ", position, position + 20)
        length = payload[position:space]
        end = position + int(length) if space > 0 and length.isdigit() else -1
        equals = payload.find(b"=", space, end)
        if not space < equals < end <= len(payload) or payload[end - 1 : end] != b"\n":
            if not payload[position:].strip(b"\0"):
                break
            raise _damaged("an extended header is malformed", at)
        records.append((payload[space + 1 : equals], payload[equals + 1 : end - 1]))
        position = end
    return records


def _gnu_map(file: BinaryIO, header: bytes, at: int, limit: int) -> list[tuple[int, int]]:
    """The map of an old GNU sparse file: 4 pairs in the header, 21 in each block that follows it."""
    pieces, block, first, count, more = [], header, 386, 4, header[482]
    position = at + _BLOCK
    while True:
        for index in range(count):
            raw = block[first + 24 * index : first + 24 * index + 24]
            if raw[:1] == b"\0":
                break
            pieces.append((_number(raw[:12], at), _number(raw[12:], at)))
        if not more:
            return pieces
        if len(pieces) > limit:
            raise _damaged("a sparse file's map is too long", at)
        file.seek(position)
        block, first, count = file.read(_BLOCK), 0, 21
        position, more = position + _BLOCK, block[504]
