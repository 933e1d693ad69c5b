"""Layers: one toolkit upgraded under many workspaces, and one workspace given to many sandboxes as a layer or as a tar.gz."""

import asyncio
import os
import tarfile
import tempfile
import time
from pathlib import Path

from msgspec import Struct

import dsec
from bench.arena import IMAGE, arena
from bench.figures import Figure, Report, machine
from bench.rootfs import make_source
from dsec.cli.shelf import Shelf, open_shelf
from dsec.images.importing import BuildArgs, Quiet
from dsec.model.layers import LayerKind
from dsec.model.spec import MountSpec
from dsec.testing.node import Node

__all__ = ["run"]

WORKSPACES, QUICK_WORKSPACES = 100, 20
AT_ONCE, QUICK_AT_ONCE = 32, 8
FILES, QUICK_FILES = 3000, 800
TOOLKIT, WORKSPACE, PACKED = "bench-tools", "bench-workspace", "bench-packed"
BUSYBOX = "/bin/busybox"


class Given(Struct, frozen=True):
    """What it took to have all sandboxes at work: seconds from the first create to the last answer, bytes that the
    sandboxes' writable layers hold then."""

    seconds: float
    written: int


def make_toolkit(root: Path, version: int) -> Path:
    """A toolkit whose every file says its version."""
    for number in range(200):
        folder = root / f"opt/tools/lib/t{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"l{number}").write_bytes(b"%d %d\n" % (version, number) * 500)
    (root / "opt/tools/version").write_text(f"{version}\n")
    return root


def build(shelf: Shelf, kind: LayerKind, name: str, source: Path) -> float:
    """Seconds that building a layer takes."""
    begin = time.perf_counter()
    shelf.importer.layer(BuildArgs(kind, name, source), Quiet())
    return time.perf_counter() - begin


async def upgrade(node: Node, client: dsec.DSecClient, folder: Path, count: int) -> dict[str, float]:
    """A toolkit is built anew under `count` workspaces; then each environment is started and asked which it has."""
    shelf = open_shelf(str(node.state))
    names = [f"bench-w{number}" for number in range(count)]
    for name in names:
        place = folder / name / "work"
        place.mkdir(parents=True)
        (place / "task").write_text(f"{name}\n" * 100)
        build(shelf, LayerKind.WORKSPACE, name, folder / name)
    build(shelf, LayerKind.TOOLKIT, TOOLKIT, make_toolkit(folder / "tools-1", 1))
    said = await asyncio.gather(*(_version(client, name) for name in names[:1]))
    before, begin = set(shelf.layers.digests()), time.perf_counter()
    built = build(shelf, LayerKind.TOOLKIT, TOOLKIT, make_toolkit(folder / "tools-2", 2))
    window = asyncio.Semaphore(16)

    async def ask(name: str) -> str:
        async with window:
            return await _version(client, name)

    said += await asyncio.gather(*(ask(name) for name in names))
    seconds = time.perf_counter() - begin
    if said[0] != "1":
        raise RuntimeError(f"the first toolkit says {said[0]}")
    made = len(set(shelf.layers.digests()) - before)
    return {"built": made, "current": said[1:].count("2"), "seconds": seconds, "build_s": built}


async def _version(client: dsec.DSecClient, workspace: str) -> str:
    args = dsec.DSecContainerRunArgs(container_image=IMAGE, workspace=workspace, toolkits=(TOOLKIT,))
    box = await client.run_container(args)
    try:
        return (await box.exec(["cat", "/opt/tools/version"], check=True)).stdout.decode().strip()
    finally:
        await box.stop()


async def _give(client: dsec.DSecClient, args: dsec.DSecContainerRunArgs, count: int, setup: str, files: int) -> Given:
    """`count` sandboxes at once; in each `setup` runs, and then every file of /src is read."""
    script = f"{setup} {BUSYBOX} find /src -type f | {BUSYBOX} xargs {BUSYBOX} cat | {BUSYBOX} wc -l && {BUSYBOX} find /src -type f | {BUSYBOX} wc -l"
    begin = time.perf_counter()

    async def one() -> dsec.Sandbox:
        box = await client.run_container(args)
        said = await box.run_shell(script, timeout=120, check=True)
        if said.stdout.split()[-1] != b"%d" % files:
            raise RuntimeError(f"{said.stdout!r}: {files} files expected")
        return box

    boxes = await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - begin
    os.sync()  # what is still on its way to the disk counts too
    usage = await asyncio.gather(*(box.metrics() for box in boxes))
    await asyncio.gather(*(box.stop() for box in boxes))
    return Given(seconds, sum(used.disk_bytes or 0 for used in usage))


async def share(node: Node, client: dsec.DSecClient, folder: Path, count: int, files: int) -> dict[str, Given | float]:
    """The same workspace in `count` sandboxes at once, each way twice in turns; the better time of each."""
    shelf = open_shelf(str(node.state))
    size = make_source(folder / "source", files)
    layer_s = build(shelf, LayerKind.WORKSPACE, WORKSPACE, folder / "source")
    (folder / "packed").mkdir()
    begin = time.perf_counter()
    with tarfile.open(folder / "packed/source.tar.gz", "w:gz", compresslevel=6) as tar:
        tar.add(folder / "source", arcname=".")
    pack_s = time.perf_counter() - begin
    build(shelf, LayerKind.DATA, PACKED, folder / "packed")
    as_layer = dsec.DSecContainerRunArgs(container_image=IMAGE, workspace=WORKSPACE)
    as_tar = dsec.DSecContainerRunArgs(container_image=IMAGE, mounts=(MountSpec(target="/data", data=PACKED),))
    unpack = f"{BUSYBOX} tar -xzf /data/source.tar.gz -C / &&"
    layers, tars = [], []
    for _ in range(2):
        layers.append(await _give(client, as_layer, count, "", files))
        tars.append(await _give(client, as_tar, count, unpack, files))
    best = {"layer": min(layers, key=lambda one: one.seconds), "tar": min(tars, key=lambda one: one.seconds)}
    return {**best, "bytes": size, "layer_build_s": layer_s, "tar_pack_s": pack_s}


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    spaces, at_once, files = (QUICK_WORKSPACES, QUICK_AT_ONCE, QUICK_FILES) if quick else (WORKSPACES, AT_ONCE, FILES)
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as made:
        folder = Path(made)
        async with arena(quick) as ring, dsec.DSecClient(url=ring.node.url, api_key=ring.node.api_key) as client:
            upgraded = await upgrade(ring.node, client, folder, spaces)
            shared = await share(ring.node, client, folder, at_once, files)
    layer, tar = shared["layer"], shared["tar"]
    if not isinstance(layer, Given) or not isinstance(tar, Given):
        raise TypeError("share answers both ways")
    figures = [
        Figure(name="layers_built", value=upgraded["built"], unit="layers", goal=1),
        Figure(name="environments_current", value=upgraded["current"], unit="", goal=spaces, better="higher"),
        Figure(name="seconds", value=upgraded["seconds"], unit="s"),
        Figure(name="time_over_tar", value=layer.seconds / tar.seconds, unit="x", goal=1),
        Figure(name="bytes_written_over_tar", value=layer.written / max(tar.written, 1), unit="x", goal=1),
        Figure(name="share_s", value=layer.seconds, unit="s", peer="tar.gz", peer_value=tar.seconds, peers={"tar.gz": tar.seconds}),
        Figure(
            name="share_written_mib", value=layer.written / 2**20, unit="MiB",
            peer="tar.gz", peer_value=tar.written / 2**20, peers={"tar.gz": tar.written / 2**20},
        ),
    ]  # fmt: skip
    raw = {"upgrade": upgraded, "share": shared, "workspaces": spaces, "at_once": at_once}
    return Report(name="layers", machine=facts, figures=figures, raw=raw, quick=quick), {}
