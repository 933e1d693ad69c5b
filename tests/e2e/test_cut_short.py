"""What is cut short leaves nothing: creates cancelled midway, a server killed in the middle of a burst."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest

import dsec
from dsec.model.errors import DSecError
from e2e.site_of_one import Site

pytestmark = pytest.mark.root

ARGS = dsec.DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, job="burst")


def client_of(site: Site) -> dsec.DSecClient:
    kept = json.loads((site.state / "credentials.json").read_text())
    return dsec.DSecClient(kept["url"], kept["api_key"])


def used(site: Site) -> Any:
    return json.loads(site.dsec("project", "list", "--json").stdout)[0]["used"]["sandboxes"]


async def test_create_cut_at_every_moment_is_one_sandbox_a_key(site: Site) -> None:
    site.up()
    async with client_of(site) as client:
        for step in range(12):
            key = f"cut-{step}"
            try:
                async with asyncio.timeout(step * 0.001):
                    await client.run_container(ARGS, request_id=key)
            except TimeoutError:
                pass
            box = await client.run_container(ARGS, request_id=key)
            assert (await box.exec(["/bin/true"])).exit_code == 0
        living = await client.sandboxes(job="burst", state="running")
        assert len(living) == 12
        assert await asyncio.to_thread(used, site) == 12
        assert len(await client.stop_many(job="burst")) == 12
        assert await asyncio.to_thread(used, site) == 0


async def test_create_cut_without_a_key_leaves_nothing(site: Site) -> None:
    site.up()
    async with client_of(site) as client:
        for step in range(1, 12):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(step * 0.0005):
                    await client.run_container(ARGS)
                    raise TimeoutError
        left = await client.sandboxes(job="burst", state="running")
        for box in left:
            await box.stop()
        async with asyncio.timeout(10):
            while await asyncio.to_thread(used, site):
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("moment", [0.05, 0.2, 0.4])
async def test_a_server_killed_in_a_burst_comes_back_with_what_lives(site: Site, moment: float) -> None:
    site.up()
    made: list[str] = []
    async with client_of(site) as client:

        async def burst() -> None:
            async for item in client.run_containers(ARGS, count=1000, window=8):
                if isinstance(item, dsec.Sandbox):
                    made.append(item.id)

        task = asyncio.get_running_loop().create_task(burst())
        await asyncio.sleep(moment)
        os.kill(site.pid(), signal.SIGKILL)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, DSecError)):
            await task
    await asyncio.to_thread(site.up)
    async with client_of(site) as client:
        living = {box.id: box for box in await client.sandboxes(job="burst", state="running")}
        assert set(made) <= set(living)
        for name in list(living)[:5]:
            assert (await living[name].exec(["/bin/true"])).exit_code == 0
        assert await asyncio.to_thread(used, site) == len(living)
    assert f"stopped {len(living)} sandbox" in await asyncio.to_thread(site.down)
    assert site.left() == []
