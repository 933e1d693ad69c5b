"""The two tables of nftables: in the router, what becomes of packets that the programs marked; on the host, translation and a wall."""

import ipaddress
import shutil
from errno import EINVAL, ENOENT

from dsec import _native
from dsec.kernel.errors import KernelError, from_kernel

__all__ = ["MARK_RELAY", "delete_table", "host_table", "load_tables", "router_table"]

MARK_REFUSED, MARK_RELAY = 0xD5EC0001, 0xD5EC0002
# The programs forget a silent connection after an hour. The host's own five days would let sandboxes that come and go fill the table of
# connections that all of the host shares.
_QUIET_SECONDS = 3700
_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def router_table(gateway_v4: str, gateway_v6: str, relay_port: int) -> str:
    """Refused packets are answered, relayed ones handed to the relay with their address as it was."""
    refused, relay = f"meta mark {MARK_REFUSED:#x}", f"meta mark {MARK_RELAY:#x} meta l4proto tcp"
    return f"""
add table inet dsec
delete table inet dsec
table inet dsec {{
  chain judged {{
    type filter hook prerouting priority mangle; policy accept;
    {refused} meta l4proto tcp reject with tcp reset
    {refused} reject with icmpx admin-prohibited
    {relay} meta nfproto ipv4 tproxy ip to {gateway_v4}:{relay_port} accept
    {relay} meta nfproto ipv6 tproxy ip6 to [{gateway_v6}]:{relay_port} accept
  }}
}}
"""


def host_table(name: str, link: str, v4: ipaddress.IPv4Network, v6: ipaddress.IPv6Network) -> str:
    """What comes from the router over `link` goes out under the host's addresses, and never to the host itself."""
    refuse = "meta l4proto tcp reject with tcp reset"
    otherwise = "reject with icmpx admin-prohibited"
    nobody = (
        f"ip daddr {{ 127.0.0.0/8, 169.254.0.0/16, {v4} }}",
        f"ip6 daddr {{ fe80::/10, {v6} }}",
        "fib daddr type != unicast",
    )
    timeouts = "\n".join(
        f"  ct timeout quiet_{l3} {{ protocol tcp; l3proto {l3}; policy = {{ established : {_QUIET_SECONDS} }}; }}" for l3 in ("ip", "ip6")
    )  # fmt: skip
    walls = "\n".join(f'    iifname "{link}" {what} {answer}' for what in nobody for answer in (refuse, otherwise))
    return f"""
add table inet {name}
delete table inet {name}
table inet {name} {{
{timeouts}
  chain to_host {{
    type filter hook input priority -10; policy accept;
    iifname "{link}" {refuse}
    iifname "{link}" {otherwise}
  }}
  chain through {{
    type filter hook forward priority -10; policy accept;
{walls}
    iifname "{link}" ct state new meta l4proto tcp meta nfproto ipv4 ct timeout set "quiet_ip"
    iifname "{link}" ct state new meta l4proto tcp meta nfproto ipv6 ct timeout set "quiet_ip6"
    oifname "{link}" ct state established,related accept
    oifname "{link}" drop
  }}
  chain translated {{
    type nat hook postrouting priority srcnat; policy accept;
    iifname "{link}" masquerade
  }}
}}
"""


def load_tables(netns: int, text: str) -> None:
    """Has nft carry out `text` in a namespace, all of it or nothing. Raises KernelError ENOENT where nft is not installed."""
    program = shutil.which("nft", path=_PATH)
    if program is None:
        raise KernelError("nft: apt-get install nftables", "nft", ENOENT)
    status, said = from_kernel(_native.run_in)(netns, [program, "-f", "-"], text)
    if status != 0:
        raise KernelError("nft: " + " ".join(said.split())[:300], "nft", EINVAL)


def delete_table(netns: int, name: str) -> None:
    """Removes a table; done when it is not there, as where nft, which alone could have made it, is not."""
    if shutil.which("nft", path=_PATH) is None:
        return
    load_tables(netns, f"add table inet {name}\ndelete table inet {name}\n")
