"""Addresses that a name never leads to, whatever its owner answers: the host itself, its neighbours, and private networks (rebinding)."""

import ipaddress
import socket
from collections.abc import Sequence
from functools import lru_cache

from dsec.model.network import Allow

__all__ = ["GUARDED", "NEVER", "Reach"]

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]

# Opened by no rule at all.
NEVER = (
    "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3",
    "::/96", "::1/128", "::ffff:0:0/96", "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::254/128", "100.100.100.200/32",
)  # fmt: skip
# Opened by a rule that names the addresses, not by a name that leads there.
GUARDED = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "fc00::/7")
# Prefixes that carry an IPv4 address, and the bit where it begins: NAT64 (RFC 6052), 6to4 (RFC 3056).
_CARRIERS = ((ipaddress.IPv6Network("64:ff9b::/96"), 0), (ipaddress.IPv6Network("2002::/16"), 80))


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
        if isinstance(address, ipaddress.IPv6Address):
            for network, shift in _CARRIERS:
                if address in network:
                    inner = ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
                    return self._by_prefix(inner, allows) and not is_local(str(inner))
        return True

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
