"""Where a request's body ends. No I/O. Source: RFC 9112 sections 6 and 7.1."""

import re

from dsec.gate.head import parse_fields
from dsec.gate.refusal import Refused

__all__ = ["BodyReader"]

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LONGEST_LINE = 8 * 1024


class BodyReader:
    """Finds the end of one body: `length` bytes, or chunks when None. Chunk extensions are refused."""

    def __init__(self, length: int | None) -> None:
        self._chunked = length is None
        self._left = length or 0
        self._line = bytearray()
        self._state = "size" if self._chunked else "data"
        self._trailer: list[bytes] = []
        self.done = length == 0

    def feed(self, data: bytes) -> int:
        """How many of these bytes belong to the body; `done` says whether it has ended. Raises Refused(`bad_http`)."""
        at = 0
        while at < len(data) and not self.done:
            if self._state == "data":
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                if not self._left:
                    self._state, self.done = "end", not self._chunked
                continue
            stop = data.find(b"\n", at) + 1
            part = data[at:stop] if stop else data[at:]
            self._line += part
            at += len(part)
            if len(self._line) > _LONGEST_LINE:
                raise Refused("bad_http", "a line in a chunked body without end")
            if stop:
                line = bytes(self._line)
                self._line.clear()
                self._end_line(line)
        return at

    def _end_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise Refused("bad_http", "a chunk's line that ends in a bare line feed")
        line = line[:-2]
        if self._state == "end":
            if line:
                raise Refused("bad_http", "a chunk longer than it says")
            self._state = "size"
        elif self._state == "size":
            if not _SIZE.fullmatch(line):
                raise Refused("bad_http", "a chunk of an impossible size")
            self._left = int(line, 16)
            self._state = "data" if self._left else "trailer"
        elif line:
            self._trailer.append(line)
            parse_fields(self._trailer)
            if sum(map(len, self._trailer)) > _LONGEST_LINE:
                raise Refused("bad_http", "a trailer without end")
        else:
            self.done = True
