"""The node that end-to-end tests of the command line work on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.site_of_one import BUSYBOX, Site, make_rootfs


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    site = Site(tmp_path)
    site.dsec("image", "import", "--state", str(site.state), "busybox", str(make_rootfs(tmp_path / "rootfs")))
    yield site
    site.down()
    assert site.left() == []
