"""Scale: bursts of creates (row SC1)."""

import asyncio
import time
from typing import Any

import pytest

from dsec.testing.suite.boxes import Box, Boxes
from dsec.testing.suite.callers import Refused
from dsec.testing.suite.plain import OverHttp
from dsec.testing.suite.sites import Site

pytestmark = pytest.mark.asyncio

TINY: dict[str, Any] = {"memory_limit_mb": 16, "disk_limit_mb": 16, "pids_limit": 16, "shm_size_mb": 1}


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


async def burst(site: Site, boxes: Boxes, count: int, job: str) -> None:
    """All at once, each asked once: ready, or busy with a time to come back; nothing else, and nothing left over."""
    client = OverHttp(site.url, site.key)  # the SDK would ask a busy platform again by itself
    await client.open()

    async def one(number: int) -> Box | Refused:
        image = "full:1" if number % 5 == 0 else "box:1"
        try:
            return Box(client, await client.create(boxes.spec(image, job=job, **TINY)))
        except Refused as refused:
            return refused

    began = time.monotonic()
    outcomes = await asyncio.gather(*(one(number) for number in range(count)))
    made = [each for each in outcomes if isinstance(each, Box)]
    refused = [each for each in outcomes if isinstance(each, Refused)]
    seconds = time.monotonic() - began
    print(f"{count} creates in {seconds:.1f} s: {len(made)} ready, {len(refused)} busy")
    phases = sorted({name for box in made for name in box.view.phases})
    for phase in phases:
        values = [box.view.phases.get(phase, 0.0) * 1e3 for box in made]
        print(f"  {phase}: p50 {percentile(values, 0.5):.1f} ms, p99 {percentile(values, 0.99):.1f} ms")
    assert all(each.code == "busy" and float(each.fields["retry_after"] or 0) > 0 for each in refused), refused[:3]
    assert made
    assert {view.id for view in await client.listed(job=job) if view.state != "gone"} == {box.id for box in made}
    await client.stop_job(job)
    assert [view for view in await client.listed(job=job) if view.state != "gone"] == []
    recovered = time.monotonic()
    box = await boxes.make(**TINY)
    assert (await box.exec(["true"])).exit_code == 0
    assert time.monotonic() - recovered < 60
    await client.close()


@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
@pytest.mark.parametrize("count", [1, 50])
async def test_a_burst_ends_ready_or_busy(site: Site, boxes: Boxes, count: int) -> None:
    """SC1: bursts of 1 and 50."""
    await burst(site, boxes, count, f"burst-{count}")


@pytest.mark.slow
@pytest.mark.leaves("the node keeps the blocks of ids that it claimed, 256 each, until it ends")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("surface", ["sdk"], indirect=True)
@pytest.mark.parametrize("count", [500, 5000])
async def test_a_large_burst_ends_ready_or_busy(site: Site, boxes: Boxes, count: int) -> None:
    """SC1: bursts of 500 and 5,000; what a node has no room for (`lifecycle.sandboxes`, 3,200 unless set) is refused."""
    await burst(site, boxes, count, f"burst-{count}")
