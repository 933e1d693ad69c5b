"""Settings of the kernel's network: all of the router's own, and the few of the host's that forwarding needs, which are put back."""

import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOENT
from pathlib import Path

from dsec import _native
from dsec.kernel.errors import KernelError, from_kernel, kernel_op

__all__ = ["HostSysctls", "devices_in", "router_sysctls", "way_out_mtu"]

_NET = "/proc/sys/net/"
_SO_NETNS_COOKIE = 71
_SIOCGIFMTU = 0x8921
_MTU, _MTU_LEAST = 1500, 1280
_ROUTER = {
    "ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1",
    # The answer to a refused packet carries its mark, by which it may pass to the sandbox.
    "ipv4/fwmark_reflect": "1", "ipv6/fwmark_reflect": "1",
    # Refusals are bounded for each sandbox by the programs; the kernel's bound would make one a second of them.
    "ipv4/icmp_ratelimit": "0", "ipv6/icmp/ratelimit": "0",
    "ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0", "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0", "ipv6/conf/all/accept_ra": "0", "ipv6/conf/default/accept_ra": "0",
}  # fmt: skip
_HOST = {"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1"}
_exchange = from_kernel(_native.exchange_in)


def router_sysctls(netns: int) -> None:
    """Makes the namespace a router. Raises KernelError."""
    for name, value in _ROUTER.items():
        _exchange(netns, _NET + name, value)


class HostSysctls:
    """Forwarding on the host, which all nodes of one share: the first turns it on, the last puts back what was before. `run`: where that is
    kept meanwhile, by namespace."""

    def __init__(self, run: Path = Path("/run/dsec")) -> None:
        self._run = run

    def set(self, netns: int) -> None:
        """Turns forwarding on; where it is off, what was before is kept first. Raises KernelError."""
        with self._alone(netns) as kept:
            before = {name: _exchange(netns, _NET + name, None) for name in _HOST}
            changed = {name: value for name, value in before.items() if value != _HOST[name]}
            if "ipv6/conf/all/forwarding" in changed:
                # A forwarding host no longer listens to routers, unless it is told to: its own way out may come from one.
                for name in devices_in(netns):
                    path = f"ipv6/conf/{name}/accept_ra"
                    if _exchange(netns, _NET + path, None) == "1":
                        changed[path] = "1"
            if not changed:
                return
            earlier = json.loads(kept.read_text()) if kept.exists() else {}
            kept.write_text(json.dumps({**changed, **earlier}))
            for name in changed:
                _exchange(netns, _NET + name, _HOST.get(name, "2"))

    def restore(self, netns: int, prefix: str) -> None:
        """Puts back what `set` changed, unless a device with a name of `prefix` says that another node is there. Raises KernelError."""
        with self._alone(netns) as kept:
            if not kept.exists() or any(name.startswith(prefix) for name in devices_in(netns)):
                return
            for name, value in json.loads(kept.read_text()).items():
                try:
                    _exchange(netns, _NET + name, value)
                except KernelError as error:
                    # An interface may have gone meanwhile.
                    if error.errno != ENOENT:
                        raise
            kept.unlink()

    @contextmanager
    def _alone(self, netns: int) -> Iterator[Path]:
        """The file of the namespace's values, while no other node reads or writes it."""
        with kernel_op("sysctls", str(self._run)):
            self._run.mkdir(parents=True, exist_ok=True, mode=0o755)
            lock = os.open(self._run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield self._run / f"sysctls-{_cookie(netns)}.json"
            finally:
                os.close(lock)


def _cookie(netns: int) -> int:
    """A number that no other network namespace of this boot has, had or will have; inode numbers are used again."""
    with socket.socket(fileno=from_kernel(_native.socket_in)(netns, socket.AF_INET, socket.SOCK_DGRAM)) as made:
        return int.from_bytes(made.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), "little")


def way_out_mtu(netns: int) -> int:
    """The largest packet, in bytes, of the device of the namespace's default route, IPv4's before IPv6's; 1500 where there is none, and 1280, the
    least of IPv6, at least. Raises KernelError."""
    v4 = [line.split() for line in _exchange(netns, "/proc/thread-self/net/route", None).splitlines()[1:]]
    v6 = [line.split() for line in _exchange(netns, "/proc/thread-self/net/ipv6_route", None).splitlines()]
    ways = [fields[0] for fields in v4 if fields[1] == fields[7] == "0" * 8]
    ways += [fields[-1] for fields in v6 if fields[:2] == ["0" * 32, "00"] and fields[-1] != "lo"]
    if not ways:
        return _MTU
    asked = struct.pack("16si12x", ways[0].encode(), 0)
    made = from_kernel(_native.socket_in)(netns, socket.AF_INET, socket.SOCK_DGRAM)
    with socket.socket(fileno=made) as line, kernel_op("mtu", ways[0]):
        found: int = struct.unpack("16si12x", fcntl.ioctl(line, _SIOCGIFMTU, asked))[1]
    return max(found, _MTU_LEAST)


def devices_in(netns: int) -> list[str]:
    """Names of the namespace's devices."""
    listing = _exchange(netns, "/proc/thread-self/net/dev", None)
    return [line.split(":")[0].strip() for line in listing.splitlines()[2:]]
