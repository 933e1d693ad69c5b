"""Heads of HTTP/1.x as a relay must see them. No I/O. Source: RFC 9110, RFC 9112.

Each form in which two parsers may see two different requests is refused, and what goes on is written anew from what was read, so
that the server sees what was checked.
"""

import re

from msgspec import Struct

from dsec.gate.hostname import hostname
from dsec.gate.refusal import Refused

__all__ = ["LONGEST_HEAD", "HeadReader", "Head", "parse_head", "parse_status", "split_authority"]

LONGEST_HEAD = 64 * 1024
MOST_FIELDS = 128
_METHOD = re.compile(rb"[A-Z][A-Z0-9_-]{0,31}")
_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: [^\r\n]*)?")
# Fields between two neighbours: the gate writes its own, or none.
_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"upgrade", b"http2-settings"}
)


class Head(Struct, frozen=True):
    """One request. `host` is in the form for comparisons; `port` is the one that Host names, None without.

    `length`: bytes of body that follow, None for a chunked body. `upgrade`: it asks for WebSocket.
    """

    method: str
    target: bytes
    version: bytes
    host: str
    port: int | None
    fields: tuple[tuple[bytes, bytes], ...]
    length: int | None = 0
    upgrade: bool = False
    close: bool = False

    def field(self, name: bytes) -> bytes | None:
        """The value of the first field of that name (lower case)."""
        return next((value for key, value in self.fields if key.lower() == name), None)

    def encode(self, replaced: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
        """The head for the server. `replaced`: fields that stand in place of the client's own of the same names."""
        gone = _HOP | {name.lower() for name, _ in replaced}
        lines = [b"%s %s %s" % (self.method.encode(), self.target, self.version)]
        lines += [b"%s: %s" % field for field in self.fields if field[0].lower() not in gone]
        lines += [b"%s: %s" % field for field in replaced]
        if self.upgrade:
            lines += [b"Connection: Upgrade", b"Upgrade: websocket"]
        elif self.close:
            lines += [b"Connection: close"]
        elif self.version == b"HTTP/1.0":
            lines += [b"Connection: keep-alive"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class HeadReader:
    """Collects bytes until the empty line. Keeps at most 64 KiB; what comes after the head is in `rest`."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._searched = 0

    @property
    def pending(self) -> bool:
        """Whether part of a head is there."""
        return bool(self._kept)

    def feed(self, data: bytes) -> bytes | None:
        """The head without its last empty line, once it is whole. Raises Refused(`bad_http`) beyond the limit."""
        self._kept += data
        end = self._kept.find(b"\r\n\r\n", max(0, self._searched - 3))
        self._searched = len(self._kept)
        if end > LONGEST_HEAD or (end < 0 and self._searched > LONGEST_HEAD):
            raise Refused("bad_http", "a head of more than 64 KiB")
        if end < 0:
            return None
        head = bytes(self._kept[:end]).removeprefix(b"\r\n")  # RFC 9112 2.2: an empty line before a request is ignored
        del self._kept[: end + 4]
        self._searched = 0
        return head

    def put_back(self, data: bytes) -> None:
        """Gives back what was taken by `rest` and belongs to the next head."""
        self._kept[:0] = data

    def rest(self) -> bytes:
        """What came after the head, handed over."""
        rest = bytes(self._kept)
        self._kept.clear()
        self._searched = 0
        return rest


def parse_head(head: bytes, *, named: bool = True) -> Head:
    """One request's head, without the empty line. `named`: Host must be a name; else it may be an address. Raises Refused: `bad_http`, `method`, `no_host`, `bad_name`, `address`."""
    first, *lines = head.split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3:
        raise Refused("bad_http", "no request line")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Refused("bad_http", "not a version of HTTP that can be checked")
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise Refused("bad_http", "no request line")
    if method in (b"CONNECT", b"TRACE"):
        raise Refused("method", f"{method.decode()} is not let through")
    fields = parse_fields(lines)
    hosts = [value for name, value in fields if name.lower() == b"host"]
    if len(hosts) != 1:
        raise Refused("no_host", "a request names its host in one Host field")
    target, authority = _origin_form(method, target)
    host, port = split_authority(hosts[0]) if named else _any_authority(hosts[0])
    if authority is not None and (split_authority if named else _any_authority)(authority) != (host, port):
        raise Refused("bad_http", "the target and Host name two hosts", name=host)
    connection = _tokens(fields, b"connection")
    close = b"close" in connection or (version == b"HTTP/1.0" and b"keep-alive" not in connection)
    upgrade = b"upgrade" in connection and _tokens(fields, b"upgrade") == [b"websocket"] and version == b"HTTP/1.1"
    length = _body_length(fields, version)
    if upgrade and length != 0:
        raise Refused("bad_http", "an upgrade with a body", name=host)
    return Head(method.decode(), target, version, host, port, fields, length, upgrade, close)


def parse_fields(lines: list[bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Fields of a head or trailer. Raises Refused(`bad_http`) for folded lines, spaces before the colon, and control bytes."""
    if len(lines) > MOST_FIELDS:
        raise Refused("bad_http", "more fields than anyone needs")
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Refused("bad_http", "a line that is no field")
        fields.append((name, value))
    return tuple(fields)


def parse_status(head: bytes) -> int:
    """The status of an answer's head. Raises Refused(`bad_http`)."""
    match = _STATUS.fullmatch(head.split(b"\r\n", 1)[0])
    if match is None:
        raise Refused("bad_http", "the server's answer is no HTTP")
    return int(match[1])


def split_authority(raw: bytes) -> tuple[str, int | None]:
    """host[:port]. Raises Refused: `bad_name`, `address` (also for [v6])."""
    if raw.startswith(b"["):
        raise Refused("address", "an address, not a name")
    host, colon, port = raw.partition(b":")
    if colon and not (re.fullmatch(rb"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise Refused("bad_name", "a host with an impossible port")
    return hostname(host), int(port) if colon else None


def _any_authority(raw: bytes) -> tuple[str, int | None]:
    if not re.fullmatch(rb"[A-Za-z0-9.:\[\]_-]{1,260}", raw):
        raise Refused("bad_name", "no host")
    return raw.decode().lower(), None


def _origin_form(method: bytes, target: bytes) -> tuple[bytes, bytes | None]:
    """The target in origin form, and the authority of an absolute form."""
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target, None
    if target[:7].lower() != b"http://":
        raise Refused("bad_http", "a target of an unknown form")
    split = re.fullmatch(rb"([^/?#@\\]+)([/?][^#]*)?", target[7:])
    if split is None:
        raise Refused("bad_http", "a target of an unknown form")
    path = split[2] or b"/"
    return (path if path.startswith(b"/") else b"/" + path), split[1]


def _tokens(fields: tuple[tuple[bytes, bytes], ...], wanted: bytes) -> list[bytes]:
    values = [value for name, value in fields if name.lower() == wanted]
    return [token.strip(b" \t").lower() for value in values for token in value.split(b",")]


def _body_length(fields: tuple[tuple[bytes, bytes], ...], version: bytes) -> int | None:
    lengths = [value for name, value in fields if name.lower() == b"content-length"]
    codings = [value.lower() for name, value in fields if name.lower() == b"transfer-encoding"]
    if codings:
        if codings != [b"chunked"] or lengths or version != b"HTTP/1.1":
            raise Refused("bad_http", "a body whose end two servers could see in two places")
        return None
    if not lengths:
        return 0
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        raise Refused("bad_http", "a body whose end two servers could see in two places")
    return int(lengths[0])
