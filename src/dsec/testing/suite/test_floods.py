"""Output at the row's size, and the server that carries it (row EX6)."""

import pytest

from dsec.testing.suite.boxes import Boxes
from dsec.testing.suite.sites import Site
from dsec.testing.suite.test_commands import flooded

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
GIB = 1 << 30


@pytest.mark.timeout(400)
async def test_a_gibibyte_on_both_streams(boxes: Boxes, site: Site) -> None:
    """EX6: 1 GiB on each stream, and the server does not grow by more than a few limits of output."""
    box = await boxes.make()
    await flooded(box, 1 << 20)
    before = site.server_memory() if "memory" in site.powers else 0
    await flooded(box, GIB)
    if "memory" in site.powers:
        assert site.server_memory() - before < 64 << 20
