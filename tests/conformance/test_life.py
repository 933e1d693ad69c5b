"""Lifecycle: rows LC, with the server killed and connections cut."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import dsec
from conformance.boxes import Boxes, eventually
from conformance.conftest import import_images
from dsec.testing.node import Node

pytestmark = pytest.mark.root


async def living(client: dsec.DSecClient, **query: Any) -> list[str]:
    return [box.id for box in await client.sandboxes(**query) if box.view.state != "gone"]


@pytest.mark.timeout(180)
async def asleep(box: dsec.Sandbox) -> bool:
    return (await box.run_shell("cat /proc/[0-9]*/comm | grep -qx sleep")).exit_code == 0


async def test_lc1_the_server_is_killed(tmp_path: Path) -> None:
    """Living sandboxes are taken over with their jobs, half-made ones are gone, a process can be attached from its offset."""
    with Node(tmp_path / "s") as node:
        import_images(node, tmp_path)
        args = dsec.DSecContainerRunArgs(
            container_image="box:1", memory_limit_mb=64, disk_limit_mb=64, ttl_running_stop=None
        )
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            boxes = [item async for item in client.run_containers(args, count=10)]
            assert all(isinstance(box, dsec.Sandbox) for box in boxes)
            counter = "i=0; while :; do i=$((i+1)); echo $i; usleep 50000; done"
            jobs = [await box.start(["sh", "-c", counter]) for box in boxes]
            pending: list[asyncio.Task[object]] = [
                asyncio.create_task(box.run_shell("sleep 30", request_id="lost")) for box in boxes[:2]
            ]
            await eventually(lambda: asleep(boxes[0]))
            pending += [asyncio.create_task(client.run_container(args)) for _ in range(6)]
            await asyncio.sleep(random.uniform(0.0, 0.02))
            node.kill()
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            found = set(await living(client))
            ids = {box.id for box in boxes}
            assert ids <= found
            for sandbox_id in found - ids:  # one that had just become ready when its caller went
                await (await client.get(sandbox_id)).stop()
            for before, job in zip(boxes, jobs, strict=True):
                box = await client.get(before.id)
                assert (await box.exec(["echo", "back"])).text == "back\n"
                view = await (await box.attach(job.id)).info()
                assert view.running
                total = view.stdout_bytes_total

                async def grown(box: dsec.Sandbox = box, job: dsec.Process = job, total: int = total) -> bool:
                    return (await (await box.attach(job.id)).info()).stdout_bytes_total > total

                await eventually(grown)
            with pytest.raises(dsec.RuntimeFailure):
                await (await client.get(boxes[0].id)).run_shell("sleep 30", request_id="lost")
            for sandbox_id in ids:
                await (await client.get(sandbox_id)).stop()


async def _cut_create(node: Node, key: str, after: float) -> None:
    address = urlsplit(node.url)
    body = json.dumps({"container_image": "box:1", "memory_limit_mb": 64, "labels": {"lc3": key}}).encode()
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {node.api_key}\r\nIdempotency-Key: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()
    await asyncio.sleep(after)
    writer.close()


async def test_lc3_a_create_cut_midway(node: Node, client: dsec.DSecClient) -> None:
    args = {"container_image": "box:1", "memory_limit_mb": 64}
    for step in range(12):
        key = f"lc3-{step}-{random.getrandbits(32)}"
        await _cut_create(node, key, step * 0.001)
        box = await client.run_container(dsec.DSecContainerRunArgs(**args, labels={"lc3": key}), request_id=key)
        assert (await box.exec(["true"])).exit_code == 0
        assert await living(client, labels={"lc3": key}) == [box.id]
        await box.stop()


@pytest.mark.slow
async def test_lc3_nobody_comes_back(node: Node, client: dsec.DSecClient) -> None:
    key = f"lc3-alone-{random.getrandbits(32)}"
    await _cut_create(node, key, 0.001)

    async def none() -> bool:
        return not await living(client, labels={"lc3": key})

    await asyncio.sleep(11)
    await eventually(none)


async def test_lc4_delete_in_every_state(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64, job="lc4")
    for delay in (0.0, 0.001, 0.002, 0.004, 0.008):
        creating = [asyncio.create_task(client.run_container(args)) for _ in range(3)]
        await asyncio.sleep(delay)
        await asyncio.gather(client.stop_many(job="lc4"), client.stop_many(job="lc4"))
        results = await asyncio.gather(*creating, return_exceptions=True)
        for made in results:
            if isinstance(made, dsec.Sandbox):
                views = await asyncio.gather(made.stop(), made.stop())
                assert [view.state for view in views] == ["gone", "gone"]
                assert (await made.stop()).state == "gone"
            else:
                assert isinstance(made, dsec.SandboxLost), made
    assert not await living(client, job="lc4")


async def test_names_removed_while_the_server_is_away_end_no_sandbox(tmp_path: Path) -> None:
    with Node(tmp_path / "s") as node:
        import_images(node, tmp_path)
        (tmp_path / "data").mkdir()
        (tmp_path / "data/d").write_text("data")
        node.dsec("layer", "build", "--kind", "data", "d:1", str(tmp_path / "data"))
        node.dsec("volume", "create", "v")
        mounts = [dsec.MountSpec(target="/v", volume="v"), dsec.MountSpec(target="/d", data="d:1")]
        args = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64, disk_limit_mb=64, mounts=mounts)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.run_container(args)
        node.kill()
        node.dsec("volume", "remove", "v")
        node.dsec("image", "remove", "d:1", "box:1")
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.get(box.id)
            assert (await box.run_shell("cat /d/d; ls /v")).text == "data"
            await box.stop()


async def test_the_end_is_told(boxes: Boxes) -> None:
    box = await boxes.make(ttl_running_stop=1.0)

    async def gone() -> bool:
        """By a list, for a look at the box itself would keep it alive."""
        return any(each.id == box.id for each in await boxes.client.sandboxes(state="gone"))

    await eventually(gone)
    view = await box.info()
    assert view.end is not None and view.end.end == "idle"
    with pytest.raises(dsec.SandboxLost) as lost:
        await box.exec(["true"])
    assert lost.value.fields["end"] == "idle"
