"""A Docker daemon of a benchmark's own with a registry beside it: in network, mount and process namespaces that end with it,
all its files below one folder. Debian's docker.io and docker-registry. The machine's own daemon, if any, is not touched."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

from bench.footprint import allocated
from bench.peers.groups import equal_share
from dsec.testing.netns import Netns

__all__ = ["REGISTRY", "Dockerd", "dockerd", "missing_programs"]

REGISTRY = "127.0.0.1:5000"
START_SECONDS, STOP_SECONDS, CALL_SECONDS = 60.0, 30.0, 900.0
PROGRAMS = {"dockerd": "docker.io", "containerd": "containerd", "docker-registry": "docker-registry"}
_SCRIPT = """
umount /sys/fs/cgroup/unified 2>/dev/null
docker-registry serve {folder}/registry.yml >{folder}/registry.log 2>&1 &
exec dockerd --data-root {folder}/data --exec-root {folder}/exec --pidfile {folder}/dockerd.pid -H unix://{folder}/docker.sock \
  --iptables=false --ip6tables=false --bridge=none --storage-driver overlay2 --cgroup-parent /{group} >{folder}/dockerd.log 2>&1
"""
_REGISTRY_CONFIG = """version: 0.1
storage:
  filesystem: {{rootdirectory: {storage}}}
http: {{addr: "{address}"}}
log: {{level: error}}
"""


def missing_programs() -> str | None:
    """What has to be installed before a daemon can be started; None where all is there."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return f"apt-get install {' '.join(missing)}" if missing else None


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("docker", timeout=CALL_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CALL_SECONDS)
        self.sock.connect(self._path)


class Dockerd:
    """A running daemon. `network`: where its registry answers at REGISTRY; `data`: all that it keeps of images and containers."""

    def __init__(self, folder: Path, network: Netns) -> None:
        self.folder, self.network, self.data = folder, network, folder / "data"

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """One call of the API, its whole answer. Raises RuntimeError for an error answer."""
        connection = _UnixConnection(self.folder / "docker.sock")
        try:
            return self._answer(connection, method, path, body).read()
        finally:
            connection.close()

    def _answer(self, connection: HTTPConnection, method: str, path: str, body: object) -> HTTPResponse:
        raw = b"" if body is None else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status >= 400:
            raise RuntimeError(f"docker: {method} {path}: {answer.status} {answer.read()[:200]!r}")
        return answer

    def pull(self, reference: str) -> None:
        """Returns once the image is there. Raises RuntimeError where the daemon says that it cannot be had."""
        said = self.call("POST", f"/images/create?fromImage={reference}")
        for line in said.splitlines():
            if "error" in json.loads(line):
                raise RuntimeError(f"docker pull {reference}: {json.loads(line)['error']}")

    def take(self, name: str, tag: str, packed: bytes) -> None:
        """Makes an image of a root file system's tar."""
        connection = _UnixConnection(self.folder / "docker.sock")
        try:
            path = f"/images/create?fromSrc=-&repo={name}&tag={tag}"
            connection.request("POST", path, packed, {"Content-Type": "application/x-tar"})
            answer = connection.getresponse()
            said = answer.read()
            if answer.status >= 400 or b'"error"' in said:
                raise RuntimeError(f"docker import {name}:{tag}: {answer.status} {said[:200]!r}")
        finally:
            connection.close()

    def start(self, reference: str, argv: list[str]) -> str:
        """A container without network that runs `argv`; its id."""
        spec = {"Image": reference, "Cmd": argv, "HostConfig": {"NetworkMode": "none"}}
        name: str = json.loads(self.call("POST", "/containers/create", spec))["Id"]
        self.call("POST", f"/containers/{name}/start")
        return name

    def first_output(self, name: str) -> bytes:
        """The first bytes that a container's process wrote to its standard output; returns when they come."""
        connection = _UnixConnection(self.folder / "docker.sock")
        try:
            answer = self._answer(connection, "GET", f"/containers/{name}/logs?stdout=1&follow=1", None)
            frame = answer.read(8)  # a frame's head: stream, three zeros, length
            return answer.read(int.from_bytes(frame[4:8], "big"))
        finally:
            connection.close()

    def exec(self, name: str, argv: list[str]) -> bytes:
        """Runs `argv` in a container; its standard output. Raises RuntimeError where it fails."""
        spec = {"Cmd": argv, "AttachStdout": True, "AttachStderr": False}
        command = json.loads(self.call("POST", f"/containers/{name}/exec", spec))["Id"]
        raw, said, at = self.call("POST", f"/exec/{command}/start", {"Detach": False, "Tty": False}), b"", 0
        while at < len(raw):
            size = int.from_bytes(raw[at + 4 : at + 8], "big")
            said, at = said + raw[at + 8 : at + 8 + size], at + 8 + size
        if (code := json.loads(self.call("GET", f"/exec/{command}/json"))["ExitCode"]) != 0:
            raise RuntimeError(f"docker: {argv[0]}: exit {code}")
        return said

    def remove(self, name: str) -> None:
        """Ends a container and removes all of it."""
        self.call("DELETE", f"/containers/{name}?force=true&v=true")

    def forget(self, reference: str) -> None:
        """Removes an image with its layers."""
        self.call("DELETE", f"/images/{reference}?force=true")

    def bytes_on_disk(self) -> int:
        """What the daemon holds on disk now."""
        return allocated(self.data)


def _wait(folder: Path, process: "subprocess.Popen[bytes]", daemon: Dockerd) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            daemon.call("GET", "/_ping")
            break
        except (OSError, RuntimeError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "dockerd.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"dockerd does not answer: {log}") from error
            time.sleep(0.1)  # the daemon announces its readiness to nobody


@contextmanager
def dockerd(folder: Path) -> Iterator[Dockerd]:
    """A daemon with its registry, on `folder` (made, and removed at the end). Raises RuntimeError where it does not start."""
    folder.mkdir(parents=True)
    group = f"dsec-bench-docker-{os.getpid()}"
    (folder / "registry.yml").write_text(_REGISTRY_CONFIG.format(storage=folder / "registry", address=REGISTRY))
    script = _SCRIPT.format(folder=folder, group=group)
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    with Netns("docker") as network, equal_share(group):
        with network.inside():
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            daemon = Dockerd(folder, network)
            _wait(folder, process, daemon)
            yield daemon
        finally:
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)  # the first of its process namespace: all others end with it
            process.wait(timeout=STOP_SECONDS)
            shutil.rmtree(folder)
