"""Settings of the kernel's network: all of the router's own, and the few of the host's that forwarding needs, which are put back."""

import json
import os
from errno import ENOENT
from pathlib import Path

from dsec import _native
from dsec.kernel.errors import KernelError, from_kernel, kernel_op

__all__ = ["HostSysctls", "router_sysctls"]

_NET = "/proc/sys/net/"
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
    """Forwarding on the host. `kept`: file with the values from before, as long as they are changed."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept

    def set(self, netns: int) -> None:
        """Turns forwarding on; where it is off, what was before is kept first. Raises KernelError."""
        before = {name: _exchange(netns, _NET + name, None) for name in _HOST}
        changed = {name: value for name, value in before.items() if value != _HOST[name]}
        if "ipv6/conf/all/forwarding" in changed:
            # A forwarding host no longer listens to routers, unless it is told to: its own way out may come from one.
            for name in _interfaces(netns):
                path = f"ipv6/conf/{name}/accept_ra"
                if _exchange(netns, _NET + path, None) == "1":
                    changed[path] = "1"
        if not changed:
            return
        with kernel_op("write", str(self._kept)):
            earlier = json.loads(self._kept.read_text()) if self._kept.exists() else {}
            self._kept.write_text(json.dumps({**changed, **earlier}))
        for name in changed:
            _exchange(netns, _NET + name, _HOST.get(name, "2"))

    def restore(self, netns: int) -> None:
        """Puts back what `set` changed. Raises KernelError."""
        if not self._kept.exists():
            return
        with kernel_op("read", str(self._kept)):
            before = json.loads(self._kept.read_text())
        for name, value in before.items():
            try:
                _exchange(netns, _NET + name, value)
            except KernelError as error:
                # An interface may have gone meanwhile.
                if error.errno != ENOENT:
                    raise
        with kernel_op("unlink", str(self._kept)):
            os.unlink(self._kept)


def _interfaces(netns: int) -> list[str]:
    """Names of the namespace's devices."""
    listing = _exchange(netns, "/proc/thread-self/net/dev", None)
    return [line.split(":")[0].strip() for line in listing.splitlines()[2:]]
