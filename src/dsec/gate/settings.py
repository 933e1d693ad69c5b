"""What the gate is told by the operator: limits, mirrors and credentials."""

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from dsec.model.settings import check_positive, setting

__all__ = ["GATEWAY_NAMES", "RELAY_PORT", "RESOLVER_PORT", "Credential", "GateSettings", "MirrorService"]

RESOLVER_PORT, RELAY_PORT = 53, 3129
# Names of the node's own end of every link; mirrors are reached by the first.
GATEWAY_NAMES = ("mirror.dsec.internal", "gateway.dsec.internal")


@dataclass(frozen=True)
class GateSettings:
    """The resolver, relay and mirrors. Limits are for each sandbox unless they say otherwise."""

    user: str = setting("nobody", "user of the host that the process becomes once it has its sockets")
    nameservers: tuple[str, ...] = setting((), "addresses of DNS servers to ask; none: those of /etc/resolv.conf")
    queries_s: int = setting(50, "DNS queries a second; four times as many at once")
    wildcard_names_min: int = setting(
        60, "different names a minute that match by a wildcard: what can be told to a name's owner"
    )
    queries_at_once: int = setting(32, "DNS queries under way")
    connections: int = setting(256, "connections through the relay and to mirrors")
    connections_total: int = setting(
        8192, "connections and queries of all sandboxes together; beyond it each still has 16"
    )
    head_seconds: float = setting(10.0, "seconds until a connection must have said which host it wants")
    connect_seconds: float = setting(10.0, "seconds for reaching a host")
    idle_seconds: float = setting(900.0, "seconds without a byte either way, after which a relayed connection is cut")
    cache_mb: int = setting(20_000, "MB of disk for packages that mirrors have fetched, of the node")
    file_mb: int = setting(8_000, "MB of the largest package")
    index_seconds: float = setting(600.0, "seconds for which a mirror's list of releases is not asked for again")
    downloads: int = setting(32, "downloads of mirrors at once, of the node")

    def __post_init__(self) -> None:
        check_positive(self, *(name for name in self.__dataclass_fields__ if name not in ("user", "nameservers")))


class MirrorService(Struct, frozen=True, kw_only=True):
    """A mirror that the gate serves at `port` of the gateway. `upstream`: base URL of the index, registry or proxy behind it.

    `credential`: name of one that is sent to the upstream's host, "" for none. `hosts`: others that files may come from, wherever these are.
    """

    service: str
    kind: Literal["pypi", "npm", "goproxy", "plain"]
    port: int
    upstream: str
    credential: str = ""
    hosts: tuple[str, ...] = ()


class Credential(Struct, frozen=True, kw_only=True):
    """A field that is added to requests for `hosts` on their way; sandboxes never see `value`.

    A request in the clear goes on by TLS to `port`, or as it is where `plain`. With `certificate` and `key` (PEM files) TLS of a sandbox for these
    hosts ends at the gate, so that the field can be added there too.
    """

    name: str
    hosts: tuple[str, ...]
    value: str
    header: str = "Authorization"
    certificate: str = ""
    key: str = ""
    port: int = 443
    plain: bool = False

    def __repr__(self) -> str:
        return f"Credential({self.name!r}, {self.hosts!r})"
