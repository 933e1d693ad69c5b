"""Import: a large OCI image into the store, its layers plain and gzipped, with umoci and mkfs.erofs on the same input in turns; and what related images take in a shared store."""

import gzip
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from msgspec import Struct

from bench.figures import Figure, Report, machine
from bench.related import measure_store

__all__ = ["run"]

FOLDERS = (
    ("usr/bin", "usr/share"),
    ("usr/lib/python3", "usr/lib/python3.11", "usr/lib/gcc"),
    ("usr/lib/x86_64-linux-gnu",),
)
LAYER_BYTES = 350 << 20
ROUNDS, QUICK_ROUNDS = 5, 3
GOAL_MB_S = 150
GOAL_STORE = 1.2
REF = "bench"
_TAR = "application/vnd.oci.image.layer.v1.tar"


class Ran(Struct, frozen=True):
    """One run of a command: seconds by the clock, and of processor time of it and its children."""

    seconds: float
    cpu: float


def _timed(argv: list[str]) -> tuple[Ran, str]:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()[-400:]}")
    return Ran(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), done.stdout


def _layer(target: Path, folders: tuple[str, ...], most: int) -> None:
    """An uncompressed layer of what this machine has in `folders`, up to `most` bytes of files."""
    total = 0
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for folder in folders:
            for place, below, names in os.walk(Path("/") / folder):
                below.sort()
                for name in sorted(names):
                    path = Path(place, name)
                    if total < most and (path.is_symlink() or path.is_file()):
                        total += path.lstat().st_size
                        tar.add(path, str(path).lstrip("/"), recursive=False)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _document(blobs: Path, value: object) -> dict[str, object]:
    raw = json.dumps(value).encode()
    name = hashlib.sha256(raw).hexdigest()
    (blobs / name).write_bytes(raw)
    return {"digest": f"sha256:{name}", "size": len(raw)}


def _layout(root: Path, tars: list[Path], *, packed: bool) -> Path:
    """An OCI layout of these layers, packed as `docker push` does or plain."""
    blobs, layers = root / "blobs/sha256", []
    blobs.mkdir(parents=True)
    for tar in tars:
        made = root / "layer"
        if packed:
            with tar.open("rb") as plain, gzip.open(made, "wb", compresslevel=6) as out:
                shutil.copyfileobj(plain, out, 1 << 20)
        else:
            shutil.copyfile(tar, made)
        name = _digest(made)
        layers.append({"mediaType": _TAR + "+gzip" * packed, "digest": f"sha256:{name}", "size": made.stat().st_size})
        made.rename(blobs / name)
    diff_ids = [f"sha256:{_digest(tar)}" for tar in tars]
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": layers,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **_document(blobs, config)},
    }  # fmt: skip
    named = {"annotations": {"org.opencontainers.image.ref.name": REF}, "mediaType": manifest["mediaType"]}
    (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (root / "index.json").write_text(
        json.dumps({"schemaVersion": 2, "manifests": [named | _document(blobs, manifest)]})
    )
    return root


def _ours(layout: Path, folder: Path) -> tuple[Ran, str]:
    """The command as a user gives it, into a new store; and the digest that it made."""
    state = folder / "state"
    words = [sys.executable, "-m", "dsec", "image", "import", "--json", "--state", str(state), "bench", str(layout)]
    ran, said = _timed(words)
    shutil.rmtree(state)
    return ran, json.loads(said)["digest"]


def _umoci(layout: Path, target: Path) -> Ran:
    """The image's files unpacked into a new folder."""
    return _timed(["umoci", "raw", "unpack", "--image", f"{layout}:{REF}", str(target)])[0]


def _mkfs(tree: Path, folder: Path) -> Ran:
    """An uncompressed EROFS image of the unpacked tree."""
    ran, _ = _timed(["mkfs.erofs", "--quiet", str(folder / "image.erofs"), str(tree)])
    (folder / "image.erofs").unlink()
    return ran


def _measure(folder: Path, quick: bool) -> tuple[int, dict[str, list[Ran]]]:
    """Bytes of the input, unpacked, and the runs of each way; all ways take their turn in each round.

    A quick run leaves gzipped layers out, and unpacks with umoci once: its tree is what mkfs.erofs takes.
    """
    tars = [folder / f"layer{number}.tar" for number in range(len(FOLDERS))]
    for tar, folders in zip(tars, FOLDERS, strict=True):
        _layer(tar, folders, LAYER_BYTES)
    names = ("plain",) if quick else ("plain", "packed")
    layouts = {name: _layout(folder / name, tars, packed=name == "packed") for name in names}
    size = sum(tar.stat().st_size for tar in tars)
    has_umoci = shutil.which("umoci") is not None
    runs: dict[str, list[Ran]] = {}
    if has_umoci:
        runs["umoci plain"] = [_umoci(layouts["plain"], folder / "tree")]
    digests: set[str] = set()
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for name, layout in layouts.items():
            ran, digest = _ours(layout, folder)
            digests.add(digest)
            runs.setdefault(name, []).append(ran)
            if has_umoci and not quick:
                runs.setdefault(f"umoci {name}", []).append(_umoci(layout, folder / "unpacked"))
                shutil.rmtree(folder / "unpacked")
        if has_umoci and shutil.which("mkfs.erofs"):
            runs.setdefault("mkfs.erofs", []).append(_mkfs(folder / "tree", folder))
    if len(digests) != 1:
        raise RuntimeError(f"one input gave several digests: {sorted(digests)}")
    return size, runs


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as made:
        size, runs = _measure(Path(made), quick)
        store = measure_store(Path(made), quick)
    speed = {name: size / 1e6 / statistics.median(one.seconds for one in ran) for name, ran in runs.items()}
    figures = []
    for name, figure, goal in (("plain", "import_mb_s", GOAL_MB_S), ("packed", "import_gzip_mb_s", None)):
        if name not in speed:
            continue
        there = {key.partition(" ")[0]: speed[key] for key in (f"umoci {name}", "mkfs.erofs") if key in speed}
        figures.append(
            Figure(
                name=figure, value=speed[name], unit="MB/s", goal=goal, better="higher",
                peer="umoci" if "umoci" in there else None, peer_value=there.get("umoci"), peers=there,
            )
        )  # fmt: skip
    cpu = min(one.cpu for one in runs["plain"]) / (size / 1e9)
    figures.append(Figure(name="import_cpu_s_per_gb", value=cpu, unit="s"))
    figures.append(
        Figure(name="store_over_compressed", value=store["store_over_compressed"], unit="x", goal=GOAL_STORE)
    )
    raw = {
        "bytes": size, "runs": runs, "store": store, "load_after": os.getloadavg()[0],
        "note": "ours has all on disk at its end; the peers' output may be in memory only",
    }  # fmt: skip
    missing = {name: "not installed" for name in ("umoci", "mkfs.erofs") if not shutil.which(name)}
    return Report(name="import", machine=facts, figures=figures, raw=raw, quick=quick), missing
