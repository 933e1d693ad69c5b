"""What the benchmarks of loading share: a store with real images, nodes that have never seen them, and first outputs."""

import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import dsec
from bench.footprint import allocated
from bench.realimages import RealImage, root_of
from dsec.testing.node import Node

__all__ = ["JSON", "first_output", "fresh_node", "layer_bytes", "stocked"]

JSON = ["python3", "-c", "import json; print(json.dumps('ok'))"]
FIRST_SECONDS = 300.0


def stocked(images: Sequence[RealImage], cache: Path) -> Path:
    """A store, in a folder of the cache, with these images; each imported and pushed once."""
    store = cache / "store"
    store.mkdir(parents=True, exist_ok=True)
    for image in images:
        if not (store / "v2/names" / image.known_as).is_file():
            with tempfile.TemporaryDirectory(prefix="bench-", dir=cache) as folder:
                node, name = Node(Path(folder, "state")), image.known_as
                node.dsec("image", "import", name, str(root_of(image, cache)), timeout=1800)
                node.dsec("image", "push", name, "--store", f"file://{store}", timeout=1800)
    return store


@contextmanager
def fresh_node(place: Path, store: Path) -> Iterator[Node]:
    """A node with an empty state, below `place`, that knows the store in the folder `store`. Removed at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=place) as folder,
        Node(Path(folder, "state"), DSEC_IMAGES_STORE=f"file://{store}") as node,
    ):
        yield node


@asynccontextmanager
async def first_output(
    client: dsec.DSecClient, name: str, argv: Sequence[str] = JSON, memory_mb: int = 512
) -> AsyncIterator[tuple[float, dsec.Sandbox]]:
    """A new sandbox of the image `name` in which `argv` has run: seconds from the request until its output, and the sandbox.

    Raises CommandFailed where the command fails.
    """
    args = dsec.DSecContainerRunArgs(container_image=name, memory_limit_mb=memory_mb, pids_limit=256)
    begin = time.perf_counter()
    box = await client.run_container(args, timeout=FIRST_SECONDS)
    try:
        done = await box.exec(argv, timeout=FIRST_SECONDS, check=True)
        seconds = time.perf_counter() - begin
        if not done.stdout:
            raise RuntimeError(f"{name}: {argv[0]} said nothing")
        yield seconds, box
    finally:
        await box.stop()


def layer_bytes(node: Node) -> dict[str, int]:
    """Bytes of the node's layers: `size`, of all their data; `data`, what its pager wrote of that; `fetched`, what it fetched for it
    (compressed); `rest`, what all else takes on disk (metadata images, indexes, maps, records)."""
    reads = [layer["reads"] for layer in json.loads(node.dsec("images", "stats", "--json"))]
    layers = [path for path in (node.state / "layers").iterdir() if (path / "data").is_file()]
    return {
        "size": sum((path / "data").stat().st_size for path in layers),
        "data": sum(one.get("bytes_filled", 0) for one in reads),
        "fetched": sum(one.get("bytes_fetched", 0) for one in reads),
        "rest": sum(allocated(path) - (path / "data").stat().st_blocks * 512 for path in layers),
    }
