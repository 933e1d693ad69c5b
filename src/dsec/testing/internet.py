"""A fake internet for tests and benchmarks, of network namespaces alone: nothing in it reaches the machine's own links.

    host ---- link "net0" (bridge) ---- world: router, DNS, web, echo, metadata
                     |
                 neighbour: another machine on the host's own network

Dual stack. The world has no route to anything behind the host, so what the host does not translate gets no answer. Needs root.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

from dsec.testing.netns import Netns
from dsec.testing.netservices import Dns, Echo, TestCa, Web

__all__ = ["HOST", "METADATA", "NAMESERVERS", "NEIGHBOUR", "ROUTER", "Internet"]

ROUTER = ("192.0.2.1", "2001:db8:2::1")
HOST = ("192.0.2.2", "2001:db8:2::2")
NEIGHBOUR = ("192.0.2.3", "2001:db8:2::3")
NAMESERVERS = ("198.51.100.53", "2001:db8:100::53")
_Server = TypeVar("_Server", Dns, Web, Echo)
METADATA = ("169.254.169.254", "fd00:ec2::254")


class Internet:
    """The namespaces `host`, `world` and `neighbour`, `dns` on NAMESERVERS, and an HTTP server on METADATA; a context manager.

    A process that is to run on the fake host is started within `host.inside()`; so is a Node of dsec.testing.node.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.host, self.world, self.neighbour = Netns("host"), Netns("world"), Netns("neighbour")
        self.ca = TestCa()
        self.dns = Dns(self.world, NAMESERVERS)
        self.metadata = Web(self.world, self.ca, METADATA, ["metadata.test"])

    def __enter__(self) -> "Internet":
        with ExitStack() as stack:
            for place in (self.world, self.host, self.neighbour):
                stack.enter_context(place)
            self._connect()
            self.add_addresses(NAMESERVERS + METADATA)
            for server in (self.dns, self.metadata):
                server.start()
                stack.callback(server.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add_addresses(self, addresses: Iterable[str]) -> None:
        """Gives the world more addresses."""
        self.world.ip(*(f"addr replace {a} dev lo" + (" nodad" if ":" in a else "") for a in addresses))

    def dns_server(self, *addresses: str) -> Dns:
        """Another DNS server, started, at addresses of its own."""
        self.add_addresses(addresses)
        return self._started(Dns(self.world, addresses))

    def web(self, addresses: Iterable[str], names: Iterable[str], **ports: int) -> Web:
        """A web server, started. `ports`: http and https, default 80 and 443."""
        listed = tuple(addresses)
        self.add_addresses(listed)
        return self._started(Web(self.world, self.ca, listed, names, **ports))

    def echo(self, addresses: Iterable[str], port: int, place: Netns | None = None) -> Echo:
        """A TCP and UDP echo, started; in the world (which gets the addresses), or in a `place` that has them."""
        listed = tuple(addresses)
        if place is None:
            self.add_addresses(listed)
        return self._started(Echo(place or self.world, listed, port))

    def _started(self, server: _Server) -> _Server:
        server.start()
        self._stack.callback(server.stop)
        return server

    def _connect(self) -> None:
        self.world.ip("link add net0 type bridge forward_delay 0 mcast_snooping 0", "link set net0 up")
        self.world.sysctl("ipv4.ip_forward", "1")
        self.world.sysctl("ipv6.conf.all.forwarding", "1")
        for place, addresses in ((self.host, HOST), (self.neighbour, NEIGHBOUR)):
            port = f"to-{place.name}"
            self.world.ip(
                f"link add {port} type veth peer name eth0 netns {place.path}",
                f"link set {port} master net0 up",
            )
            place.ip(
                f"addr add {addresses[0]}/24 dev eth0", f"addr add {addresses[1]}/64 dev eth0 nodad", "link set eth0 up",
                f"route add default via {ROUTER[0]}", f"route add default via {ROUTER[1]}",
            )  # fmt: skip
        self.world.ip(f"addr add {ROUTER[0]}/24 dev net0", f"addr add {ROUTER[1]}/64 dev net0 nodad")
