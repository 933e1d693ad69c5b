"""Addresses that a name never leads to, whatever its owner answers: the host itself, its neighbours, and private networks (rebinding)."""

import ipaddress
import socket
from collections.abc import Sequence
from functools import lru_cache

from dsec.model.network import Allow
from dsec.rules.netpolicy import CARRIERS, GUARDED, NEVER

__all__ = ["Reach"]

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]

# Where in them an IPv4 address begins: NAT64 (RFC 6052), 6to4 (RFC 3056). In other carriers nobody can tell.
_CARRIED = ((ipaddress.IPv6Network("64:ff9b::/96"), 0), (ipaddress.IPv6Network("2002::/16"), 80))


@lru_cache(maxsize=1024)
def _networks(texts: tuple[str, ...]) -> _Networks:
    return tuple(ipaddress.ip_network(text) for text in texts)


def _inside(address: Ip, networks: _Networks) -> bool:
    return any(address in network for network in networks if network.version == address.version)


class Reach:
    """Judges addresses of answers. `forbidden`: further prefixes that no rule opens, such as the sandboxes' own."""

    def __init__(self, forbidden: Sequence[str] = ()) -> None:
        self._never = _networks(NEVER + tuple(forbidden))
        self._guarded = _networks(GUARDED)

    def may(self, text: str, allows: Sequence[Allow]) -> bool:
        """Whether a name may lead to the address `text`, for a sandbox that is allowed `allows` by address."""
        address = ipaddress.ip_address(text)
        if not self._by_prefix(address, allows) or is_local(text):
            return False
        if not _inside(address, _networks(CARRIERS)):
            return True
        for network, shift in _CARRIED:
            if address in network:
                inner = ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
                return self._by_prefix(inner, allows) and not is_local(str(inner))
        return False

    def _by_prefix(self, address: Ip, allows: Sequence[Allow]) -> bool:
        if _inside(address, self._never):
            return False
        if not _inside(address, self._guarded):
            return True
        return _inside(address, _networks(tuple(allow.network for allow in allows if allow.via == "direct")))


def is_local(text: str) -> bool:
    """Whether this host itself has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((text, 0))
        except OSError:
            return False
    return True
