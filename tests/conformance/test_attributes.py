"""IM6: what busybox cannot show of a file, read through the sandbox's own mounts (`/proc/PID/root` of its aether)."""

import os
import struct
from pathlib import Path

import pytest

import dsec
from conformance.site import OwnNode
from dsec.testing.suite.archives import file, folder, image, layout_files, tar, write_layout
from dsec.testing.suite.rootfs import busybox_layer

pytestmark = pytest.mark.root

NET_RAW = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


async def test_attributes_and_nanoseconds_inside(node: OwnNode, client: dsec.DSecClient, tmp_path: Path) -> None:
    """As the tar has them, below the sandbox's writable layer, and still after a file was copied up into it."""
    headers = {
        "SCHILY.xattr.user.plain": "value", "SCHILY.xattr.user.empty": "", "SCHILY.xattr.user.long": "v" * 3000,
        "SCHILY.xattr.security.capability": NET_RAW.decode("utf-8", "surrogateescape"), "mtime": "-2177452800.999999999",
    }  # fmt: skip
    layers = [busybox_layer(), tar([folder("t"), *(file(f"t/{name}", b"x", pax_headers=headers) for name in "ab")])]
    node.import_image("attributes:1", write_layout(tmp_path / "layout", layout_files(image(layers))))
    box = await client.run_container(dsec.DSecContainerRunArgs(container_image="attributes:1", memory_limit_mb=64))
    root = Path(f"/proc/{node.agent_pid(box.id)}/root/t")
    assert (root / "a").stat().st_mtime_ns == -2_177_452_800_999_999_999
    assert (await box.run_shell("chmod 700 /t/b")).exit_code == 0
    for name in "ab":
        found = {key: os.getxattr(root / name, key) for key in os.listxattr(root / name) if key.startswith("user.")}
        assert found == {"user.plain": b"value", "user.empty": b"", "user.long": b"v" * 3000}, name
        assert os.getxattr(root / name, "security.capability")[4:8] == NET_RAW[4:8]
    await box.stop()
    node.remove_image("attributes:1")
