"""The server has no descriptor left: each call gets a typed answer, nothing is left behind, and it goes on once there are some."""

import asyncio
import os
import resource
from itertools import islice
from pathlib import Path

import pytest

import dsec
from conformance.boxes import eventually
from conformance.conftest import import_images
from dsec.testing.node import Node

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

ARGS = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64, disk_limit_mb=256)


def squeeze(pid: int, spare: int) -> tuple[int, int]:
    """Lets the process open `spare` more descriptors; its limits before."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = (number for number in range(1 << 20) if number not in used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(islice(free, spare, None)), before[1]))
    return before


async def _life(client: dsec.DSecClient) -> dsec.DSecError | None:
    """A creation, a command, an end; how the first or second failed."""
    try:
        box = await client.run_container(ARGS, timeout=3.0)
    except dsec.DSecError as error:
        return error
    try:
        return None if (await box.exec(["echo", "x"])).text == "x\n" else AssertionError()  # type: ignore[return-value]
    except dsec.DSecError as error:
        return error
    finally:
        await box.stop()


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    with Node(tmp_path / "s") as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            kept = await client.run_container(ARGS)
            assert await _life(client) is None
            for spare in (0, 3, 12):
                before = squeeze(node.pid, spare)
                try:
                    found = await asyncio.gather(*(_life(client) for _ in range(12)))
                finally:
                    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, before)
                errors = [error for error in found if error is not None]
                assert errors, "there were enough"
                assert all("incident" not in error.fields for error in errors), errors
                assert (await kept.exec(["echo", "still"])).text == "still\n"
                assert await _life(client) is None, f"with {spare} spare descriptors, after: {errors}"
            await kept.stop()

            async def empty() -> bool:
                return all(box.view.end is not None for box in await client.sandboxes())

            await eventually(empty, 30.0)  # what nobody waited for any more is ended
    assert "Traceback" not in node.log
