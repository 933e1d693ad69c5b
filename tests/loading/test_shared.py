"""Layers read in place from a shared filesystem, and the paths that `dsec doctor` finds."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.testing.node import Node
from loading.library import Library, layer_file, sandbox, stats

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
BINDFS = shutil.which("bindfs")


@pytest.fixture
def mounted(library: Library, tmp_path: Path) -> Iterator[Path]:
    """The store on a FUSE filesystem, as a shared one is."""
    if BINDFS is None:
        pytest.skip("bindfs is not installed")
    place = tmp_path / "shared"
    place.mkdir()
    with subprocess.Popen([BINDFS, "-f", str(library.store), str(place)]) as process:
        for _ in range(500):
            if place.is_mount():
                break
            process.poll()
            assert process.returncode is None, "bindfs ended"
            subprocess.run(["sleep", "0.02"], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
            process.terminate()


def test_data_is_read_where_it_is(mounted: Path, start: Callable[..., Node], library: Library) -> None:
    node = start(load="shared", store=f"file://{mounted}")
    with sandbox(node) as box:
        assert box.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big
        assert stats(node)["load"] == "shared" and not stats(node)["served"]
        assert not layer_file(node, library, "data").exists()
        assert layer_file(node, library, "meta.erofs").exists()
    assert node.dsec("cache", "fsck").endswith(": sound\n")


def test_the_doctor_reads_by_each_path(tmp_path: Path, start: Callable[..., Node]) -> None:
    node = start()
    found = json.loads(node.dsec("doctor", "--json"))
    (paths,) = [each for each in found["mechanisms"] if each["name"] == "image-paths"]
    assert [(rung["name"], rung["ok"]) for rung in paths["rungs"]] == [
        ("fanotify", True), ("fuse", True), ("shared", True), ("whole", True),
    ]  # fmt: skip
    assert list(node.state.glob("doctor-*")) == []
