"""Imports that were cut off: nothing half is published, and what was whole is neither fetched nor unpacked again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from dsec.images.collect import collect
from dsec.images.importing import Quiet
from dsec.images.inputs import ImportConfig
from dsec.images.kept import Kept
from dsec.images.making import INDEX, MANIFEST
from dsec.images.manifests import decode_manifest
from dsec.images.oci import Platform, load
from dsec.images.registry import pull
from dsec.images.registryclient import parse_reference
from dsec.images.spool import Digest
from dsec.images.verify import check_chunks
from dsec.model.errors import DSecError, InvalidArgument
from imagekit import Shelf, file, folder, image, layout_files, sha, tar, write_layout
from registrypeer import Registry, serving

AMD64 = Platform("linux", "amd64")
DICE = random.Random(11)
GOOD = [tar([folder("d"), file(f"d/{n}", DICE.randbytes(300_000))]) for n in range(3)]
BAD = [*GOOD[:2], tar([file("../escape", b"1")])]


async def fetch(shelf: Shelf, registry: Registry, tag: str) -> str:
    with shelf.layers.scratch() as scratch:
        work = shelf.importer.workshop(scratch, Quiet())
        parts, top = await pull(parse_reference(f"{registry.host}/team/app:{tag}"), None, AMD64, work)
        return shelf.importer.image("x", load(parts, top, "x", AMD64, work), work).digest


def fetched(registry: Registry) -> list[str]:
    found = [path.rpartition("/")[2] for path, _ in registry.requests if "/blobs/" in path]
    registry.requests.clear()
    return found


def spool(shelf: Shelf) -> list[str]:
    return sorted(path.name for path in shelf.layers.spool.iterdir()) if shelf.layers.spool.is_dir() else []


@pytest.mark.parametrize("packing", ["", "+gzip"])
async def test_what_is_there_whole_is_not_fetched_again(tmp_path: Path, packing: str) -> None:
    shelf, made = Shelf(tmp_path / "state"), image(GOOD, packing)
    async with serving(Registry()) as registry:
        registry.add("1", made)
        broken = image(BAD, packing)
        registry.add("bad", broken)
        with pytest.raises(InvalidArgument, match="escape"):
            await fetch(shelf, registry, "bad")
        first = fetched(registry)
        assert spool(shelf) and shelf.names.all() == [] and shelf.layers.digests() == []
        # The config and the layer that is another one; the two below are there.
        digest = await fetch(shelf, registry, "1")
        again = fetched(registry)
        assert len(first) == 4 and len(again) == 2 and not set(again) & set(first), (first, again)
        fresh = Shelf(tmp_path / "fresh")
        assert await fetch(fresh, registry, "1") == digest
        assert not [name for name in spool(shelf) if sha(GOOD[0]).removeprefix("sha256:") in name]


async def test_what_was_damaged_meanwhile_is_fetched_again(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "state")
    async with serving(Registry()) as registry:
        registry.add("bad", image(BAD, "+gzip"))
        registry.add("1", image(GOOD, "+gzip"))
        with pytest.raises(DSecError):
            await fetch(shelf, registry, "bad")
        for path in shelf.layers.spool.iterdir():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        fetched(registry)
        assert await fetch(shelf, registry, "1")
        assert len(fetched(registry)) == 4
        assert spool(shelf) == [] or all("tar-" in name for name in spool(shelf))


def test_the_spool_is_bounded_and_collected(tmp_path: Path) -> None:
    raws = [bytes([n]) * 1000 for n in range(5)]
    kept = Kept(tmp_path / "spool", 2500)

    def put(number: int) -> Path:
        path = tmp_path / f"new{number}"
        path.write_bytes(raws[number])
        os.utime(path, (number, number))
        with path.open("rb") as opened:
            return kept.keep("tar", Digest(sha(raws[number])), path, opened)

    for number in range(4):
        assert put(number).parent == tmp_path / "spool"
    assert sorted(path.read_bytes() for path in (tmp_path / "spool").iterdir()) == raws[2:4]
    # What somebody reads stays, and a new one finds no room.
    one, two = (kept.open("tar", Digest(sha(raws[number]))) for number in (2, 3))
    assert one is not None and two is not None
    with one, two:
        assert put(4) == tmp_path / "new4"
        assert Kept(tmp_path / "spool", 0).clear() == 0
        assert one.read() == raws[2]
    shelf = Shelf(tmp_path)
    assert collect(tmp_path, shelf.layers, shelf.names, dry_run=True).freed_bytes == 2000
    assert collect(tmp_path, shelf.layers, shelf.names).freed_bytes == 2000
    assert list((tmp_path / "spool").iterdir()) == []


IMPORT = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from imagekit import Shelf
from dsec.images.inputs import ImportConfig
print("began", flush=True)
Shelf(Path(sys.argv[1]), ImportConfig(merge_bytes=8 << 20)).import_image("x", Path(sys.argv[2]))
"""
ROOT = Path(__file__).parents[3]


def whole(shelf: Shelf) -> None:
    """Every layer that is published is all there, and so is every layer that a name stands for."""
    for digest in shelf.layers.digests():
        place = shelf.layers.directory(digest)
        manifest = decode_manifest((place / MANIFEST).read_bytes(), digest)
        assert check_chunks(place, manifest, Quiet()) == [] and (place / INDEX).stat().st_size == manifest.index.size
        for below in manifest.below:
            assert shelf.layers.exists(below)
    for record in shelf.names.all():
        assert shelf.layers.exists(record.digest)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(7)
    layers = [tar([file(f"l{n}", dice.randbytes(6 << 20)), file(f"zeros{n}", bytes(3 << 20))]) for n in range(3)]
    write_layout(tmp_path / "layout", layout_files(image(layers)))
    wanted = (
        Shelf(tmp_path / "reference", ImportConfig(merge_bytes=8 << 20)).import_image("x", tmp_path / "layout").digest
    )
    shelf, killed = Shelf(tmp_path / "state"), 0
    for _ in range(4):
        command = [sys.executable, "-c", IMPORT, str(shelf.state), str(tmp_path / "layout")]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
            time.sleep(dice.uniform(0, 0.5))
        child.kill()
        killed += child.wait() == -signal.SIGKILL
        whole(shelf)
    assert killed >= 1
    assert Shelf(shelf.state, ImportConfig(merge_bytes=8 << 20)).import_image("x", tmp_path / "layout").digest == wanted
    whole(shelf)
    assert not list((shelf.state / "tmp").glob("import-*"))


def failing(state: Path, layout: Path, point: str, trace: Path | None = None) -> int:
    words = ["image", "import", "--state", str(state), "--merge-mb", "1", "x", str(layout)]
    env = {**os.environ, "DSEC_FAILPOINT": point} | ({"DSEC_FAILPOINT_TRACE": str(trace)} if trace else {})
    command = [sys.executable, "-m", "dsec.testing.failpoints", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False, timeout=60).returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ["kill", "EIO"])
def test_ended_at_each_change_that_it_makes(tmp_path: Path, action: str) -> None:
    layers = [tar([file(f"l{n}", DICE.randbytes(1 << 20))]) for n in range(2)]
    write_layout(tmp_path / "layout", layout_files(image(layers)))
    trace = tmp_path / "trace"
    assert failing(tmp_path / "traced", tmp_path / "layout", "none", trace) == 0
    reached: dict[str, int] = msgspec.json.decode(trace.read_bytes())
    points = [point for point in reached if ".images." in point or point.startswith("native.")]
    assert len(points) > 8
    for number, point in enumerate(points):
        shelf = Shelf(tmp_path / f"s{number}")
        assert failing(shelf.state, tmp_path / "layout", f"{point}:1:{action}") != 0, point
        whole(shelf)
        assert failing(shelf.state, tmp_path / "layout", "none") == 0, point
        whole(shelf)
        assert len(shelf.names.all()) == 1 and not list((shelf.state / "tmp").glob("import-*"))
