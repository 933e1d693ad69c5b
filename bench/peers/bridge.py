"""The bridge of a running dockerd that has a network namespace of its own: a container on it, and a server behind the daemon's masquerade."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.peers.docker import IMAGE, SOCKET, Docker, request, why_not
from dsec.testing.netns import Netns

__all__ = ["bridge", "why_no_bridge"]

_PEERCRED = 12
OUTSIDE = ("192.0.2.1", "192.0.2.2")


def _daemon() -> int:
    """The daemon's pid."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(SOCKET)
        return int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED)[:4], "little")


def why_no_bridge() -> str | None:
    """Why it cannot be a peer here, and what to do; None where it can."""
    if why := why_not():
        return why
    if os.path.samefile(f"/proc/{_daemon()}/ns/net", "/proc/self/ns/net"):
        return "dockerd has the machine's own network, where no test traffic may go: start one in a namespace (CONTRIBUTING.md)"
    return None


def _place(stack: ExitStack, name: str, pid: int) -> Netns:
    """The network namespace of a process."""
    place = Netns(name)
    place.fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, place.fd)
    stack.callback(place.loop.close)
    return place


@contextmanager
def bridge(rootfs: Path, server: str) -> Iterator[tuple[Netns, Netns]]:
    """A container's namespace, and one with the address `server` that it reaches over the bridge and the daemon's masquerade."""
    with ExitStack() as stack:
        docker = Docker(rootfs)
        stack.callback(request, "DELETE", f"/images/{IMAGE}?force=true")
        daemon = _place(stack, "dockerd", _daemon())
        world = stack.enter_context(Netns("bridged"))
        daemon.ip(
            f"link add bench0 type veth peer name eth0 netns {world.path}",
            f"addr add {OUTSIDE[0]}/24 dev bench0",
            "link set bench0 up",
            f"route add {server}/32 via {OUTSIDE[1]}",
        )
        world.ip(f"addr add {OUTSIDE[1]}/24 dev eth0", "link set eth0 up", f"addr add {server}/32 dev lo")
        name = docker.make("bridge")
        stack.callback(docker.remove, name)
        pid = json.loads(request("GET", f"/containers/{name}/json"))["State"]["Pid"]
        yield _place(stack, "container", pid), world
