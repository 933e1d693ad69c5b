"""The first flight of TLS: which host a ClientHello asks for. No I/O. Source: RFC 8446 sections 4.1.2 and 5.1, RFC 6066, RFC 9849.

Whatever cannot be read exactly is refused: the relay must see the very name that the server will see.
"""

from dsec.gate.hostname import hostname
from dsec.gate.refusal import Refused

__all__ = ["LONGEST_HELLO", "HelloReader"]

LONGEST_HELLO = 32 * 1024
_LONGEST_RECORD = 1 << 14
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME = 0
# encrypted_client_hello and its forerunner: the outer name is not the one that counts.
_ENCRYPTED = frozenset({0xFE0D, 0xFFCE})


class HelloReader:
    """Feed it what the client sends; it answers the name once the ClientHello is whole. Keeps at most 32 KiB."""

    def __init__(self) -> None:
        self._record = bytearray()
        self._message = bytearray()

    def feed(self, data: bytes) -> str | None:
        """The host name asked for, or None while more is needed. Raises Refused: `not_tls`, `no_sni`, `ech`, `bad_name`, `address`."""
        self._record += data
        while self._take_record():
            if len(self._message) >= 4 and (name := self._whole()) is not None:
                return name
        if len(self._record) > _LONGEST_RECORD + 5:
            raise Refused("not_tls", "a record longer than records are")
        return None

    def _take_record(self) -> bool:
        """Moves one whole record's content to the message; False when there is none."""
        record = self._record
        if record and record[0] != _HANDSHAKE:
            raise Refused("not_tls", "no handshake record")
        if len(record) >= 2 and record[1] != 3:
            raise Refused("not_tls", "not a version of TLS")
        if len(record) < 5:
            return False
        length = int.from_bytes(record[3:5], "big")
        if not 0 < length <= _LONGEST_RECORD:
            raise Refused("not_tls", "a record of an impossible length")
        if len(record) < 5 + length:
            return False
        self._message += record[5 : 5 + length]
        del record[: 5 + length]
        return True

    def _whole(self) -> str | None:
        if self._message[0] != _CLIENT_HELLO:
            raise Refused("not_tls", "the handshake does not begin with a ClientHello")
        length = int.from_bytes(self._message[1:4], "big")
        if length > LONGEST_HELLO:
            raise Refused("not_tls", "a ClientHello of more than 32 KiB")
        if len(self._message) < 4 + length:
            return None
        if len(self._message) > 4 + length:
            raise Refused("not_tls", "more than a ClientHello in its records")
        return _name(bytes(self._message[4:]))


class _Cursor:
    """Reads fields of a message; a field that is not there is a refusal."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Refused("not_tls", "a ClientHello that ends before its fields do")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Cursor":
        """A field that begins with its length, of `size` bytes."""
        return _Cursor(self.take(self.number(size)))


def _name(body: bytes) -> str:
    hello = _Cursor(body)
    hello.take(2 + 32)
    session, ciphers, compressions = hello.vector(1), hello.vector(2), hello.vector(1)
    if session.left > 32 or ciphers.left < 2 or ciphers.left % 2 or compressions.left < 1:
        raise Refused("not_tls", "a ClientHello with impossible fields")
    if not hello.left:
        raise Refused("no_sni", "a ClientHello without extensions")
    extensions = hello.vector(2)
    if hello.left:
        raise Refused("not_tls", "bytes after the extensions")
    seen: set[int] = set()
    name: str | None = None
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in seen:
            raise Refused("not_tls", "an extension is there twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(content)
    if seen & _ENCRYPTED:
        raise Refused("ech", "the name is encrypted (ECH), so it cannot be checked", name=name or "")
    if name is None:
        raise Refused("no_sni", "the ClientHello names no server")
    return name


def _server_name(content: _Cursor) -> str:
    names = content.vector(2)
    if content.left or names.number(1) != 0:
        raise Refused("not_tls", "a server name of an unknown form")
    raw = names.vector(2)
    if names.left:
        raise Refused("not_tls", "more than one server name")
    return hostname(raw.take(raw.left))
