"""The host's table of connections: what it remembers of a sandbox that is gone, its next tenant's flows would be taken for."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from errno import EBADMSG, ENOENT

from dsec import _native
from dsec.kernel.errors import KernelError, from_kernel, kernel_op

__all__ = ["forget_sources"]

_NETFILTER = 12
_GET, _DELETE = 0x101, 0x102
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_NESTED = 0x8000
_TUPLE_ORIG, _FILTER = 1, 25
_TUPLE_IP, _V4_SRC, _V6_SRC = 1, 1, 3
_ORIG_FLAGS, _BY_SOURCE = 1, 1
_ROOM = 1 << 16
_SECONDS = 5.0
_head = struct.Struct("=IHHII")
_family = struct.Struct("=BBH")
_attribute = struct.Struct("=HH")


def forget_sources(netns: int, addresses: Sequence[str]) -> int:
    """Removes connections that these addresses began; answers how many. Raises KernelError."""
    made = from_kernel(_native.socket_in)(netns, socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
    with socket.socket(fileno=made) as line, kernel_op("conntrack", "netlink"):
        line.settimeout(_SECONDS)
        count = 0
        for address in addresses:
            family, source = _source(address)
            tuples = [body for kind, body in _asked(line, _GET, _DUMP, family, _wanted(source)) if kind == _TUPLE_ORIG]
            for body in tuples:
                count += _removed(line, family, _packed(_TUPLE_ORIG | _NESTED, body))
        return count


def _source(address: str) -> tuple[int, bytes]:
    """Family, and the attribute that says the source."""
    ip = ipaddress.ip_address(address)
    if ip.version == 4:
        return socket.AF_INET, _packed(_V4_SRC, ip.packed)
    return socket.AF_INET6, _packed(_V6_SRC, ip.packed)


def _wanted(source: bytes) -> bytes:
    """A filter: entries whose first packet came from there."""
    flags = _packed(_ORIG_FLAGS, struct.pack("=I", _BY_SOURCE))
    return _packed(_TUPLE_ORIG | _NESTED, _packed(_TUPLE_IP | _NESTED, source)) + _packed(_FILTER | _NESTED, flags)


def _packed(kind: int, body: bytes) -> bytes:
    return _attribute.pack(_attribute.size + len(body), kind) + body.ljust((len(body) + 3) & ~3, b"\0")


def _removed(line: socket.socket, family: int, which: bytes) -> int:
    """1, or 0 where it ended by itself meanwhile."""
    try:
        list(_asked(line, _DELETE, _ACK, family, which))
    except OSError as error:
        if error.errno == ENOENT:
            return 0
        raise
    return 1


def _asked(line: socket.socket, kind: int, flags: int, family: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes of all entries in the answer to a request. Raises OSError."""
    length = _head.size + _family.size + len(body)
    line.sendto(_head.pack(length, kind, _REQUEST | flags, 1, 0) + _family.pack(family, 0, 0) + body, (0, 0))
    while True:
        data, at = line.recv(_ROOM), 0
        while at < len(data):
            size, told, _, _, _ = _head.unpack_from(data, at)
            if size < _head.size:
                raise KernelError("conntrack", "netlink", EBADMSG)
            if told in (_ERROR, _DONE):
                number = -int.from_bytes(data[at + _head.size : at + _head.size + 4], "little", signed=True)
                if number > 0:
                    raise OSError(number, os.strerror(number))
                return
            yield from _attributes(data[at + _head.size + _family.size : at + size])
            at += (size + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _attribute.size <= len(data):
        size, kind = _attribute.unpack_from(data, at)
        yield kind & ~_NESTED, data[at + _attribute.size : at + size]
        at += max((size + 3) & ~3, _attribute.size)
