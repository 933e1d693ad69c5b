"""Real images: each is imported, read back file by file, and its command runs in a sandbox of it."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import dsec
from bench.figures import Figure, Report, machine
from bench.realimages import RealImage, real_images, root_of
from dsec.testing.node import Node

__all__ = ["run"]

COUNT, QUICK_COUNT = 30, 5
RUN_SECONDS = 180.0


async def _try(node: Node, image: RealImage, root: Path) -> dict[str, Any]:
    """Import, verify, run; what was seen on the way."""
    begin = time.perf_counter()
    node.dsec("image", "import", image.name, str(root), timeout=1200)
    imported = time.perf_counter()
    report = json.loads(node.dsec("image", "verify", "--json", image.name, timeout=1200))[0]
    manifest = json.loads(node.dsec("image", "inspect", image.name))["manifest"]
    seen: dict[str, Any] = {
        "entries": manifest["entries"], "content_bytes": manifest["content_bytes"], "data_bytes": manifest["data"]["size"],
        "import_s": imported - begin, "verified": report["ok"],
    }  # fmt: skip
    if image.run:
        args = dsec.DSecContainerRunArgs(container_image=image.name)
        async with (
            dsec.DSecClient(url=node.url, api_key=node.api_key) as client,
            await client.run_container(args, timeout=60) as box,
        ):
            done = await box.exec(list(image.run), timeout=RUN_SECONDS)
        seen["ran"] = done.exit_code == 0 and done.stdout.rstrip().endswith(b"ok")
        if not seen["ran"]:
            seen["said"] = (done.stdout + done.stderr)[-400:].decode(errors="replace")
    return seen


async def run(quick: bool, cache: Path) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers, of which there are none."""
    facts, images, seen = machine(), real_images(), {}
    chosen = images[:QUICK_COUNT] if quick else images
    for image in chosen:
        root = root_of(image, cache)
        # A node for each, so that no more than one image lies on the disk unpacked.
        with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as folder, Node(Path(folder, "state")) as node:
            seen[image.name] = await _try(node, image, root)
    runnable = [image.name for image in chosen if image.run]
    figures = [
        Figure(name="images", value=len(seen), unit="", goal=QUICK_COUNT if quick else COUNT, better="higher"),
        Figure(name="verified", value=sum(one["verified"] for one in seen.values()), unit="", goal=len(seen), better="higher"),
        Figure(name="ran", value=sum(seen[name]["ran"] for name in runnable), unit="", goal=len(runnable), better="higher"),
        Figure(name="largest_gib", value=max(one["content_bytes"] for one in seen.values()) / 2**30, unit="GiB", better="higher"),
        Figure(name="import_s", value=sum(one["import_s"] for one in seen.values()), unit="s"),
    ]  # fmt: skip
    return Report(name="images", machine=facts, figures=figures, raw={"images": seen}, quick=quick), {}
