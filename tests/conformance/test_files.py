"""Files: rows FI, through the SDK and with connections cut by hand."""

import asyncio
import hashlib
from urllib.parse import urlsplit

import pytest

import dsec
from conformance.boxes import Boxes
from dsec.testing.node import Node

pytestmark = pytest.mark.root


@pytest.mark.parametrize("size", [0, 1, 18_000, 1 << 20, (64 << 20) + 1])
async def test_fi1_what_was_written_is_there(box: dsec.Sandbox, size: int) -> None:
    data = (hashlib.sha256(b"seed").digest() * (size // 32 + 1))[:size]
    view = await box.files.write("/d/f", data, make_parents=True)
    assert (view.size, view.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert await box.files.read("/d/f") == data
    assert (await box.exec(["sha256sum", "/d/f"])).text.split()[0] == view.sha256


@pytest.mark.parametrize("chunked", [False, True])
async def test_fi1_a_cut_upload_leaves_the_old_file(node: Node, box: dsec.Sandbox, chunked: bool) -> None:
    await box.files.write("/f", b"old")
    address = urlsplit(node.url)
    for path, before in (("/f", ["f"]), ("/g", [])):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        kind = "Transfer-Encoding: chunked" if chunked else "Content-Length: 200000"
        writer.write(
            f"PUT /v1/sandboxes/{box.id}/files?path={path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {node.api_key}\r\n"
            f"{kind}\r\n\r\n".encode()
        )
        half = b"x" * 100_000
        writer.write(b"%x\r\n%s\r\n" % (len(half), half) if chunked else half)
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
        await asyncio.sleep(0.3)
        found = [entry.path.rsplit("/", 1)[-1] for entry in await box.files.list("/")]
        assert [name for name in found if name in ("f", "g")] == (before or ["f"])
        assert not [name for name in found if name.startswith(".") and name != "."]
    assert await box.files.read("/f") == b"old"


async def test_fi3_links_do_not_lead_out(box: dsec.Sandbox) -> None:
    await box.run_shell(
        "mkdir -p /d/real; echo in > /d/real/f; ln -s /d/real /d/link; ln -s ../../../../etc/passwd /d/up; mkfifo /d/p"
    )
    assert await box.files.read_text("/d/link/f") == "in\n"
    kinds = {entry.path.rsplit("/", 1)[-1]: entry.kind for entry in await box.files.list("/d")}
    assert kinds == {"real": "dir", "link": "symlink", "up": "symlink", "p": "fifo"}
    assert await box.files.read("/d/up") == await box.files.read("/etc/passwd")
    with pytest.raises(dsec.DSecError):
        async with asyncio.timeout(5):
            await box.files.read("/d/p")


async def test_fi3_a_swap_during_a_recursive_remove_stays_inside(box: dsec.Sandbox) -> None:
    await box.run_shell("mkdir /keep; for i in $(seq 50); do echo x > /keep/$i; done")
    swap = "while :; do mkdir -p /v/a/b; rm -rf /v/a/b; ln -s /keep /v/a/b; rm -f /v/a/b; done"
    process = await box.start(["sh", "-c", swap])
    for _ in range(30):
        try:
            await box.files.remove("/v", recursive=True)
        except dsec.DSecError as error:
            assert isinstance(error, dsec.NotFound | dsec.RequestError | dsec.InfraError)
    await process.stop()
    assert (await box.run_shell("ls /keep | wc -l")).text.strip() == "50"


async def test_permissions_are_the_kernel_s(boxes: Boxes) -> None:
    box = await boxes.make()
    await box.run_shell("echo secret > /s; chmod 600 /s; mkdir /o; chmod 777 /o")
    with pytest.raises(dsec.PermissionDenied):
        await box.files.read("/s", user="1000:1000")
    with pytest.raises(dsec.PermissionDenied):
        await box.files.write("/x", b"", user="1000:1000")
    await box.files.write("/o/x", b"mine", user="1000:1000")
    assert (await box.files.stat("/o/x")).uid == 1000
