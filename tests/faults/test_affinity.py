"""Sandboxes tied to as many CPUs as their limit: what programs see, and that it stays across a restart."""

import os
from pathlib import Path

import pytest

import dsec
from conformance.conftest import import_images
from dsec.testing.node import Node

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a host with one CPU has nothing to choose"),
]


async def test_programs_see_their_limit(tmp_path: Path) -> None:
    hosts = len(os.sched_getaffinity(0))
    settings = {"DSEC_CONTAINER_POOL_BYTES": str(512 << 20), "DSEC_CONTAINER_CPU_AFFINITY": "limit"}
    with Node(tmp_path / "s", **settings) as node:
        import_images(node, tmp_path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            boxes = []
            for cores, seen in ((0.5, 1), (1, 1), (hosts, hosts)):
                args = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64, cpu_cores_limit=cores)
                box = await client.run_container(args)
                assert (await box.exec(["nproc"])).text == f"{seen}\n"
                boxes.append(box)
            assert len(os.sched_getaffinity(node.pid)) == hosts, "the server itself goes on everywhere"
        node.kill()
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            assert (await (await client.get(boxes[0].id)).exec(["nproc"])).text == "1\n"
            for box in boxes:
                await (await client.get(box.id)).stop()
