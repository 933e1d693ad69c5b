"""The Docker API, over its Unix socket, where a daemon answers."""

import asyncio
import io
import json
import os
import socket
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

__all__ = ["Docker", "request", "why_not"]

SOCKET = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
IMAGE = "dsec-bench:latest"


class UnixConnection(HTTPConnection):
    """HTTP over the daemon's socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(SOCKET)


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    """One call of the API. Raises RuntimeError for an error answer."""
    connection = UnixConnection("docker")
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"docker: {method} {path}: {answer.status} {content[:200]!r}")
        return content
    finally:
        connection.close()


def why_not() -> str | None:
    """Why the Docker API cannot be a peer here, and what to do; None where it answers."""
    try:
        request("GET", "/_ping")
    except (OSError, RuntimeError):
        return f"no daemon answers at {SOCKET} (DOCKER_HOST): apt-get install docker.io containerd, then start dockerd (CONTRIBUTING.md)"
    return None


class Docker:
    """A contender; `rootfs` becomes an image of its own, removed at the end."""

    name = "docker-api"

    def __init__(self, rootfs: Path) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(rootfs, arcname=".")
        name, tag = IMAGE.split(":")
        request("POST", f"/images/create?fromSrc=-&repo={name}&tag={tag}", packed.getvalue(), "application/x-tar")
        self._open: list[str] = []

    def make(self, network: str = "none") -> str:
        """Starts a container; answers its id."""
        spec = {
            "Image": IMAGE,
            "Cmd": ["/bin/sleep", "3600"],
            "HostConfig": {"NetworkMode": network, "Memory": 64 << 20},
        }
        name: str = json.loads(request("POST", "/containers/create", json.dumps(spec).encode()))["Id"]
        request("POST", f"/containers/{name}/start")
        return name

    def _true(self, name: str) -> None:
        spec = {"Cmd": ["/bin/true"], "AttachStdout": True, "AttachStderr": True}
        command = json.loads(request("POST", f"/containers/{name}/exec", json.dumps(spec).encode()))["Id"]
        request("POST", f"/exec/{command}/start", json.dumps({"Detach": False, "Tty": False}).encode())
        if json.loads(request("GET", f"/exec/{command}/json"))["ExitCode"] != 0:
            raise RuntimeError("docker: true failed")

    def remove(self, name: str) -> None:
        """Ends a container and removes all of it."""
        request("DELETE", f"/containers/{name}?force=true&v=true")

    def _create(self, _: Any = None) -> tuple[float, float]:
        begin = time.perf_counter()
        name = self.make()
        self._true(name)
        made = time.perf_counter()
        self.remove(name)
        return (made - begin) * 1000, (time.perf_counter() - made) * 1000

    def _exec(self, number: int = 0) -> float:
        begin = time.perf_counter()
        self._true(self._open[number % len(self._open)])
        return (time.perf_counter() - begin) * 1000

    def _many(self, action: Any, count: int, at_once: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(action, range(count)))
        return count / (time.perf_counter() - begin)

    async def create(self) -> tuple[float, float]:
        return await asyncio.to_thread(self._create)

    async def burst(self, count: int, at_once: int) -> float:
        return await asyncio.to_thread(self._many, self._create, count, at_once)

    async def open(self, sandboxes: int) -> None:
        for _ in range(sandboxes):
            self._open.append(await asyncio.to_thread(self.make))

    async def exec(self) -> float:
        return await asyncio.to_thread(self._exec)

    async def rate(self, count: int, at_once: int) -> float:
        return await asyncio.to_thread(self._many, self._exec, count, at_once)

    async def close(self) -> None:
        while self._open:
            await asyncio.to_thread(self.remove, self._open.pop())
        await asyncio.to_thread(request, "DELETE", f"/images/{IMAGE}?force=true")
