"""A pager for each test, by both ways that the kernel has to ask."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pager.place import BINARY, Made, Pager, make_layer


@pytest.fixture(params=["fanotify", "fuse"])
def pager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pager]:
    if not BINARY.exists():
        pytest.skip("dsec-pager is not built")
    with Pager(tmp_path / "s", request.param) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def contents(seed: int, size: int) -> bytes:
    """Bytes that compress to about half, the same ones for the same seed."""
    return random.Random(seed).randbytes(size).translate(bytes(n % 16 for n in range(256)))


@pytest.fixture
def made(store: Path) -> Made:
    """A layer of some sizes: an empty file, small ones, a large one, one of zeros."""
    files = {f"small{n}": contents(n, 100 + 3000 * n) for n in range(8)}
    files |= {"empty": b"", "zeros": bytes(300_000), "large": contents(99, 3_000_000), "odd": contents(98, 700_001)}
    return make_layer(store, files)
