"""Files: one large file each way, through the SDK and the HTTP API, and what the server's memory grows by meanwhile."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import dsec
from bench.arena import IMAGE, arena
from bench.figures import Figure, Report, machine
from bench.footprint import peak_resident, reset_peak

__all__ = ["run"]

MB = 1_000_000
SIZE, QUICK_SIZE = 1 << 30, 1 << 28
ROUNDS = 2
BLOCK = 1 << 20
TREE_FILES = 2000


def make_file(path: Path, size: int) -> str:
    """Fill `path` with bytes that do not compress; their SHA-256."""
    digest, block = hashlib.sha256(), os.urandom(BLOCK)
    with path.open("wb") as file:
        for number in range(size // BLOCK):
            piece = number.to_bytes(8, "little") + block[8:]
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_tree(root: Path) -> int:
    """Many small files, as a source tree has; their bytes together."""
    size = 0
    for number in range(TREE_FILES):
        folder = root / f"d{number % 50}"
        folder.mkdir(parents=True, exist_ok=True)
        data = os.urandom(512) * (1 + number % 32)
        (folder / f"f{number}").write_bytes(data)
        size += len(data)
    return size


async def _rounds(box: dsec.Sandbox, source: Path, target: Path) -> tuple[list[float], list[float]]:
    """Seconds of each upload and each download."""
    up, down = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        await box.files.upload(source, "/root/large")
        up.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        await box.files.download("/root/large", target)
        down.append(time.perf_counter() - begin)
    return up, down


async def _tree(box: dsec.Sandbox, folder: Path) -> dict[str, float]:
    """Seconds that a tree of small files takes each way."""
    size = make_tree(folder / "tree")
    begin = time.perf_counter()
    await box.files.upload(folder / "tree", "/root/tree")
    sent = time.perf_counter()
    await box.files.download("/root/tree", folder / "back")
    return {"upload_s": sent - begin, "download_s": time.perf_counter() - sent, "bytes": size, "files": TREE_FILES}


def _docker_copy(source: Path, target: Path) -> dict[str, float] | str:
    """Seconds that `docker cp` takes each way into a container of its own; or why it does not take part."""
    if shutil.which("docker") is None:
        return "no docker command: apt-get install docker.io, then start dockerd"
    image, name = "dsec-bench-files:latest", "dsec-bench-files"

    def docker(*words: str) -> float:
        begin = time.perf_counter()
        subprocess.run(["docker", *words], check=True, capture_output=True, timeout=300)
        return time.perf_counter() - begin

    try:
        subprocess.run(["docker", "version"], check=True, capture_output=True, timeout=10)
    except (subprocess.SubprocessError, OSError):
        return "no daemon answers: start dockerd"
    empty = subprocess.run(["tar", "-cf-", "-T/dev/null"], check=True, capture_output=True).stdout
    subprocess.run(["docker", "import", "-", image], input=empty, check=True, capture_output=True, timeout=60)
    try:
        docker("create", "--name", name, image, "/none")
        try:
            return {"upload_s": docker("cp", str(source), f"{name}:/large"), "download_s": docker("cp", f"{name}:/large", str(target))}  # fmt: skip
        finally:
            docker("rm", "-f", name)
    finally:
        docker("rmi", image)


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    size = QUICK_SIZE if quick else SIZE
    facts, peers, missing = machine(), {}, {}
    args = dsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=2048, disk_limit_mb=4096)
    with tempfile.TemporaryDirectory(prefix="bench-") as made:
        folder = Path(made)
        source, target = folder / "large", folder / "back-large"
        wanted = make_file(source, size)
        async with arena(quick) as ring, dsec.DSecClient(url=ring.node.url, api_key=ring.node.api_key) as client:
            box = await client.run_container(args)
            await box.files.write("/root/first", b"warm")
            resting = reset_peak(ring.node.pid)
            up, down = await _rounds(box, source, target)
            growth = (peak_resident(ring.node.pid) - resting) / 2**20
            if digest_of(target) != wanted:
                raise RuntimeError("what came back is not what was sent")
            tree = await _tree(box, folder)
            await box.stop()
        copied = _docker_copy(source, folder / "docker-large")
        if isinstance(copied, str):
            missing["docker cp"] = copied
        else:
            peers = copied
    rates = {way: size / MB / min(seconds) for way, seconds in (("upload", up), ("download", down))}
    figures = [
        Figure(
            name=f"{way}_mb_s", value=rate, unit="MB/s", goal=300, aim=500, better="higher",
            peer="docker cp" if peers else None, peer_value=size / MB / peers[f"{way}_s"] if peers else None,
            peers={"docker cp": size / MB / peers[f"{way}_s"]} if peers else {},
        )
        for way, rate in rates.items()
    ]  # fmt: skip
    figures.append(Figure(name="server_rss_growth_mib", value=growth, unit="MiB", goal=64))
    figures += [
        Figure(name=f"tree_{way}_files_s", value=TREE_FILES / tree[f"{way}_s"], unit="files/s", better="higher")
        for way in ("upload", "download")
    ]
    raw = {"upload_s": up, "download_s": down, "bytes": size, "tree": tree, "missing": missing}
    return Report(name="files", machine=facts, figures=figures, raw=raw, quick=quick), missing
