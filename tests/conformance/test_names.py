"""Names: those that go away while the server does, and state directories with long ones."""

from pathlib import Path

import pytest

import dsec
from conformance.conftest import import_images
from conformance.site import OwnNode
from dsec.testing.node import Node, NodeFailed
from dsec.testing.suite import rootfs
from dsec.testing.suite.archives import file, folder, image, layout_files, tar, write_layout

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
        with pytest.raises(NodeFailed, match="Conflict"):
            node.dsec("volume", "remove", "v")
        node.dsec("image", "remove", "d:1", "box:1")
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.get(box.id)
            assert (await box.run_shell("cat /d/d; ls /v")).text == "data"
            await box.stop()


async def test_a_state_directory_with_a_path_of_two_hundred_characters(tmp_path: Path) -> None:
    """IM9: sockets and mounts below it work, for an image of 65 layers too."""
    state = tmp_path / ("x" * (199 - len(str(tmp_path))))
    assert len(str(state)) == 200
    layers = [[folder("t"), file("t/top", b"%d" % n)] for n in range(64)]
    raw = [rootfs.busybox_layer(), *(tar(layer) for layer in layers)]
    with OwnNode(state) as node:
        node.import_image("deep:1", write_layout(tmp_path / "layout", layout_files(image(raw))))
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.run_container(dsec.DSecContainerRunArgs(container_image="deep:1", memory_limit_mb=64))
            assert (await box.run_shell("cat /t/top")).text == "63"
            await box.stop()
