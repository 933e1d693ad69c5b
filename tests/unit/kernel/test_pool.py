"""The pool of writable layers, on a real btrfs in a file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import _native
from dsec.kernel.errors import KernelError, from_kernel
from dsec.kernel.mounts import mount, umount
from dsec.kernel.pool import Pool

pytestmark = pytest.mark.root


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path, size=256 << 20)
    pool.open()
    yield pool
    for name in pool.names():
        pool.delete(name)
    assert pool.close()


def test_a_layer_is_made_limited_and_removed(pool: Pool) -> None:
    path = pool.create("one", 4 << 20)
    assert sorted(os.listdir(path)) == ["upper", "work"]
    with pytest.raises(OSError, match="quota"), open(path / "upper/x", "wb", buffering=0) as file:
        for _ in range(16):
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    used = pool.used("one")
    assert used is not None
    assert 1 << 20 < used[0] <= used[1] == 4 << 20
    pool.delete("one")
    pool.delete("one")
    assert not pool.exists("one")
    assert pool.used("one") is None


def test_a_name_is_used_once(pool: Pool) -> None:
    pool.create("one", 4 << 20)
    with pytest.raises(KernelError, match="File exists"):
        pool.create("one", 4 << 20)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 256, "nul\0"])
def test_a_name_that_is_no_name_is_refused(pool: Pool, name: str) -> None:
    with pytest.raises(KernelError):
        pool.create(name, 4 << 20)


def test_a_snapshot_has_the_same_files_and_its_own_writes(pool: Pool) -> None:
    source = pool.create("one", 4 << 20)
    (source / "upper/x").write_text("before")
    copy = pool.snapshot(source, pool.cells, "two")
    (copy / "upper/x").write_text("after")
    assert (source / "upper/x").read_text() == "before"


def test_the_pool_is_found_again_and_kept_while_it_is_used(pool: Pool, tmp_path: Path) -> None:
    volume = pool.create_volume("v")
    (volume / "x").write_text("kept")
    again = Pool(tmp_path)
    again.open()
    with open(volume / "x") as file:
        assert not pool.close()
        assert file.read() == "kept"
    assert pool.close()
    again.open()
    assert (again.volumes / "v/x").read_text() == "kept"
    again.delete_volume("v")


def _loops(image: Path) -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        if device.read_text().strip() == str(image):
            found.append(device.parents[1].name)
    return found


def test_a_file_system_that_lives_on_is_mounted_again_and_not_a_second_time(pool: Pool, tmp_path: Path) -> None:
    """A mount in a namespace that is about to end keeps it alive; two devices over one file would overwrite each other."""
    pool.create("one", 4 << 20)
    kept = tmp_path / "kept"
    kept.mkdir()
    mount(str(pool.root), str(kept), "", 0x1000, "")
    try:
        assert pool.close()
        (kept / "cells/one/upper/x").write_text("written meanwhile")
        pool.open()
        assert (pool.cells / "one/upper/x").read_text() == "written meanwhile"
        assert len(_loops(tmp_path / "pool.img")) == 1
        with pytest.raises(KernelError, match="busy"):
            from_kernel(_native.loop_attach)(str(tmp_path / "pool.img"), True)
    finally:
        umount(str(kept))
