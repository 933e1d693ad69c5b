"""A store for tests of loading, and what is asked of a node that loads from it."""

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsec import DSecContainerRunArgs
from dsec.kernel.services import ServiceGroup, node_name
from dsec.model.views import SandboxView
from dsec.sync import DSecClient, Sandbox
from dsec.testing.node import Node

__all__ = ["SIZE", "Library", "gauge", "layer_file", "pager_group", "pager_kill", "sandbox", "seen", "stats", "until"]

SIZE = 8 << 20


@dataclass(frozen=True)
class Library:
    """`store`: its directory; `digest` of the image `box` in it, whose /data/big has the sha256 `big`; `maker`: the state it was made in."""

    store: Path
    digest: str
    big: str
    maker: Path

    def copy(self, place: Path) -> "Library":
        """The same store in a directory that a test may spoil."""
        shutil.copytree(self.store, place)
        return replace(self, store=place)


@contextmanager
def sandbox(node: Node, image: str = "box", **more: Any) -> Iterator[Sandbox]:
    """A sandbox of the node, stopped at the end if it still runs, also by a server with another address."""
    with DSecClient(node.url, node.api_key) as client:
        box = client.run_container(DSecContainerRunArgs(container_image=image, memory_limit_mb=256, **more))
        try:
            yield box
        finally:
            if node.lives:
                with DSecClient(node.url, node.api_key) as now:
                    now.get(box.id).stop()


def seen(node: Node, box: Sandbox) -> SandboxView:
    """The sandbox as the node sees it now."""
    with DSecClient(node.url, node.api_key) as client:
        return client.get(box.id).view


def stats(node: Node) -> dict[str, Any]:
    """What `dsec images stats` says of the image's only layer."""
    (found,) = json.loads(node.dsec("images", "stats", "box", "--json"))
    return {**found["reads"], "load": found["load"], "served": found["served"], "share": found["share"]}


def gauge(node: Node, name: str) -> float:
    """A number of /metrics."""
    request = urllib.request.Request(node.url + "/metrics", headers={"authorization": f"Bearer {node.api_key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def pager_group(node: Node) -> ServiceGroup:
    return ServiceGroup(f"{node_name(node.state)}-pager")


def pager_kill(node: Node, *, all_of_it: bool = False) -> int:
    """Kills the worker of the node's pager, or every process of it at once; the pid of the worker."""
    pid = int(json.loads(node.dsec("images", "pager", "--json"))["pid"])
    if all_of_it:
        pager_group(node).kill()
    else:
        os.kill(pid, signal.SIGKILL)
    return pid


def layer_file(node: Node, library: Library, name: str) -> Path:
    return node.state / "layers" / library.digest.removeprefix("sha256:") / name


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for what nothing announces."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.02)
