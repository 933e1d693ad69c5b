"""Ports, tunnels, watches and terminals on a real sandbox."""

import asyncio

import aiohttp
import pytest

import dsec
from conformance.boxes import eventually
from dsec.testing.node import Node

pytestmark = pytest.mark.root


@pytest.fixture
async def served(box: dsec.Sandbox) -> dsec.Sandbox:
    await box.files.write("/www/index.html", b"<p>hello", make_parents=True)
    await box.files.write("/www/big", b"x" * (8 << 20))
    await box.start(["httpd", "-f", "-p", "127.0.0.1:8080", "-h", "/www"])

    async def up() -> bool:
        return (await box.run_shell("wget -q -O - http://127.0.0.1:8080/ | grep -c hello")).exit_code == 0

    await eventually(up)
    return box


async def test_http_to_a_port(node: Node, served: dsec.Sandbox) -> None:
    base = f"{node.url}/v1/sandboxes/{served.id}/http"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {node.api_key}"}) as session:
        async with session.get(f"{base}/8080/index.html") as answer:
            assert (answer.status, await answer.read()) == (200, b"<p>hello")
        async with session.get(f"{base}/8080/big") as answer:
            assert len(await answer.read()) == 8 << 20
        async with session.get(f"{base}/8080/none") as answer:
            assert answer.status == 404 and answer.content_type != "application/problem+json"
        async with session.get(f"{base}/9/") as answer:
            problem = await answer.json(content_type=None)
            assert (answer.status, problem["code"], problem["fields"]["what"]) == (404, "not_found", "port")


async def test_a_tunnel(node: Node, served: dsec.Sandbox) -> None:
    headers = {"Authorization": f"Bearer {node.api_key}"}
    url = f"{node.url}/v1/sandboxes/{served.id}/tunnel/8080"
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(url) as socket:
        await socket.send_bytes(b"GET /index.html HTTP/1.0\r\n")
        await socket.send_bytes(b"\r\n")
        heard = b""
        async for message in socket:
            heard += message.data
        assert heard.endswith(b"<p>hello") and socket.close_code == 1000


async def test_a_stopped_sandbox_ends_its_streams(node: Node, served: dsec.Sandbox) -> None:
    headers = {"Authorization": f"Bearer {node.api_key}"}
    url = f"{node.url}/v1/sandboxes/{served.id}/tunnel/8080"
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(url) as socket:
        await served.stop()
        async with asyncio.timeout(5):
            message = await socket.receive()
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        assert socket.close_code in (1000, 4410)


async def test_a_terminal(box: dsec.Sandbox) -> None:
    process = await box.start(["sh"], pty=dsec.Pty(cols=100, rows=30))
    heard = b""
    async with asyncio.timeout(20):
        await process.write(b"stty size; echo rea''dy\n")
        resized = False
        async for piece in process.stream():
            heard += piece.data
            if b"ready" in heard and not resized:
                resized = True
                await process.resize(70, 20)
                await process.write(b"stty size; exit 5\n")
    assert b"30 100" in heard and b"20 70" in heard
    assert (await process.wait()).exit_code == 5


async def test_a_watch(box: dsec.Sandbox) -> None:
    await box.files.mkdir("/w")
    seen: list[tuple[str, str]] = []
    ready = asyncio.Event()

    async def watch() -> None:
        stream = box.files.watch("/w")
        pending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.3)
        ready.set()
        while True:
            event = await pending
            seen.append((str(event.event), event.path.rsplit("/", 1)[-1]))
            if event.event == "removed":
                await stream.aclose()
                return
            pending = asyncio.ensure_future(anext(stream))

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(watch())
        await ready.wait()
        await box.run_shell("echo x > /w/a; chmod 600 /w/a; rm /w/a")
    assert ("created", "a") in seen and ("removed", "a") in seen
