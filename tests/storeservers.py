"""An S3 server and a registry on loopback, as processes of their own: peers for tests of stores."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["BUCKET", "registry_server", "s3_server"]

BUCKET = "layers"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _serving(argv: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{argv[0]} does not serve: {log.read_text()[-2000:]}") from None
                    time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """An S3 server with the bucket BUCKET; gives its endpoint."""
    port = _free_port()
    argv = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    with _serving(argv, port, folder / "s3.log"):
        endpoint = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=30).close()
        yield endpoint


@contextmanager
def registry_server(folder: Path) -> Iterator[str]:
    """A registry whose blobs lie in `folder`; gives its host and port."""
    port = _free_port()
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/registry}}, delete: {{enabled: true}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}', secret: test}}\n"
    )
    with _serving(["docker-registry", "serve", str(config)], port, folder / "registry.log"):
        yield f"127.0.0.1:{port}"
