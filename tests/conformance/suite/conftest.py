"""The suite's fixtures, with the node of these tests as its site."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.conftest import import_images
from conformance.site import OwnNode
from dsec.testing.suite.fixtures import *  # noqa: F403

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def site(node: OwnNode) -> OwnNode:
    return node


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[OwnNode]:
    """A node that a test may kill: its own."""
    with OwnNode(tmp_path / "s") as found:
        import_images(found, tmp_path)
        yield found


def pytest_itemcollected(item: pytest.Item) -> None:
    """All of it needs root here, which a stranger's platform would not ask of the suite."""
    if HERE in item.path.parents:
        item.add_marker(pytest.mark.root)
