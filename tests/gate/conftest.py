"""One site for a module of tests."""

from collections.abc import Iterator

import pytest

from dsec.testing.gatesite import Site, site_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of(tmp_path_factory.mktemp("cache")) as made:
        yield made
