"""One fake internet with one node for all tests through the SDK."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from network.place import Place, make_python_root


@pytest.fixture(scope="session")
def python_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("busybox") is None:
        pytest.skip("busybox-static is not installed")
    return make_python_root(tmp_path_factory.mktemp("root") / "r")


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, python_root: Path) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("n"), python_root) as made:
        yield made


@pytest.fixture
def place(standing: Place) -> Iterator[Place]:
    """The place with a client of the test's own."""
    standing.client.open()
    try:
        yield standing
    finally:
        standing.client.close()
