"""Names of images and volumes that go away while the server does."""

from pathlib import Path

import pytest

import dsec
from conformance.conftest import import_images
from dsec.testing.node import Node

pytestmark = pytest.mark.root


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
