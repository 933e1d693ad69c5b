"""A root's tar as a Docker image of one layer in a registry: gzip, as the daemon of Debian's release wants it."""

import hashlib
import json
import subprocess
from http.client import HTTPConnection
from pathlib import Path

from msgspec import Struct
from msgspec import json as packed

from bench.peers.dockerd import REGISTRY, Dockerd

__all__ = ["Gzipped", "gzipped", "push"]

PIECE = 1 << 20
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
CONFIG = "application/vnd.docker.container.image.v1+json"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Gzipped(Struct, frozen=True):
    """A layer. `inside`: the digest of the tar itself; `digest`: of the compressed file; `size`: its bytes."""

    path: str
    inside: str
    digest: str
    size: int


def gzipped(root: Path, folder: Path) -> Gzipped:
    """The layer of a root's tar (zstd), kept in `folder` with what is known of it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / root.name.replace(".zst", ".gz")
    known = target.with_suffix(".json")
    if not known.is_file():
        inside, digest = hashlib.sha256(), hashlib.sha256()
        with target.open("wb") as out:
            plain = subprocess.Popen(["zstd", "-dcq", str(root)], stdout=subprocess.PIPE)
            zipped = subprocess.Popen(["gzip", "-1n"], stdin=subprocess.PIPE, stdout=out)
            if plain.stdout is None or zipped.stdin is None:
                raise RuntimeError("no pipe")
            while piece := plain.stdout.read(PIECE):
                inside.update(piece)
                zipped.stdin.write(piece)
            zipped.stdin.close()
            if plain.wait() or zipped.wait():
                raise RuntimeError(f"{root} cannot be packed anew")
        with target.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
        made = Gzipped(
            str(target), f"sha256:{inside.hexdigest()}", f"sha256:{digest.hexdigest()}", target.stat().st_size
        )
        known.write_bytes(packed.encode(made))
    return packed.decode(known.read_bytes(), type=Gzipped)


def push(daemon: Dockerd, name: str, layer: Gzipped) -> str:
    """Puts an image of that one layer into the daemon's registry; its reference."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer.inside]},
    }
    raw = json.dumps(config).encode()
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST, "config": {"mediaType": CONFIG, "size": len(raw), "digest": digest},
        "layers": [{"mediaType": LAYER, "size": layer.size, "digest": layer.digest}],
    }  # fmt: skip
    with daemon.network.inside():
        _put_blob(name, digest, raw)
        with Path(layer.path).open("rb") as file:
            _put_blob(name, layer.digest, file, layer.size)
        _ask("PUT", f"/v2/{name}/manifests/1", json.dumps(manifest).encode(), {"Content-Type": MANIFEST})
    return f"{REGISTRY}/{name}:1"


def _put_blob(name: str, digest: str, body: object, size: int | None = None) -> None:
    where = _ask("POST", f"/v2/{name}/blobs/uploads/", b"", {})
    heads = {"Content-Type": "application/octet-stream"} | ({} if size is None else {"Content-Length": str(size)})
    _ask("PUT", f"{where}&digest={digest}" if "?" in where else f"{where}?digest={digest}", body, heads)


def _ask(method: str, path: str, body: object, heads: dict[str, str]) -> str:
    """One request to the registry; the place that its answer names."""
    connection = HTTPConnection(REGISTRY, timeout=300)
    try:
        connection.request(method, path.removeprefix(f"http://{REGISTRY}"), body, heads)  # type: ignore[arg-type]
        answer = connection.getresponse()
        said = answer.read(400)
        if answer.status >= 300:
            raise RuntimeError(f"registry: {method} {path}: {answer.status} {said!r}")
        return answer.headers.get("Location", "")
    finally:
        connection.close()
