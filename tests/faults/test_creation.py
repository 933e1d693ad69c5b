"""Creations cut at any moment, deletes at any moment, renewals at the edge, and one request from two clients at once."""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

import dsec
from conformance.boxes import Boxes, eventually
from dsec.testing.node import Node, NodeFailed
from faults.cells import groups

pytestmark = pytest.mark.root

SEED = random.Random(20)


def args(**more: object) -> dsec.DSecContainerRunArgs:
    given = {"container_image": "box:1", "memory_limit_mb": 64, "disk_limit_mb": 64, **more}
    return dsec.DSecContainerRunArgs(**given)  # type: ignore[arg-type]


async def living(client: dsec.DSecClient, job: str) -> list[str]:
    return [box.id for box in await client.sandboxes(job=job) if box.view.state != "gone"]


def count(node: Node) -> int:
    return int(json.loads(node.dsec("project", "list", "--json"))[0]["used"]["sandboxes"])


async def cut_create(node: Node, job: str, key: str | None, after: float) -> None:
    """A create over a connection of its own that is closed after that many seconds."""
    address = urlsplit(node.url)
    wanted = {"container_image": "box:1", "memory_limit_mb": 64, "disk_limit_mb": 64, "job": job}
    body = json.dumps(wanted).encode()
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    named = f"Idempotency-Key: {key}\r\n" if key else ""
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {node.api_key}\r\n{named}"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(after)
    writer.close()


async def test_over_http_without_a_key_the_end_of_the_connection_undoes_it(node: Node, client: dsec.DSecClient) -> None:
    """All but those that the server had answered already, whose answer was on its way when the client left."""
    before = await asyncio.to_thread(count, node)
    for _ in range(30):
        await cut_create(node, "cut-http", None, SEED.uniform(0, 0.003))

    async def settled() -> bool:
        states = {box.view.state for box in await client.sandboxes(job="cut-http")}
        return "starting" not in states and "stopping" not in states

    await eventually(settled, 3.0)
    await client.stop_many(job="cut-http")
    assert await asyncio.to_thread(count, node) == before


async def test_over_http_with_a_key_it_waits_for_the_grace_time(node: Node, client: dsec.DSecClient) -> None:
    key = f"grace-{SEED.getrandbits(64)}"
    await cut_create(node, "cut-key", key, 0.001)
    await asyncio.sleep(0.5)
    box = await client.run_container(args(job="cut-key"), request_id=key)
    assert await living(client, "cut-key") == [box.id]
    await box.stop()


async def test_a_cancelled_task_leaves_nothing_at_once(node: Node, client: dsec.DSecClient) -> None:
    before = await asyncio.to_thread(count, node)
    kept = []
    for _ in range(40):
        task = asyncio.create_task(client.run_container(args(job="cut-sdk")))
        await asyncio.sleep(SEED.uniform(0, 0.03))
        task.cancel()
        (found,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(found, dsec.Sandbox):
            kept.append(found)
    ids = {box.id for box in kept}

    async def only_kept() -> bool:
        return set(await living(client, "cut-sdk")) == ids

    began = time.monotonic()
    await eventually(only_kept, 3.0)
    assert time.monotonic() - began < 3.0
    await asyncio.gather(*(box.stop() for box in kept))
    assert await asyncio.to_thread(count, node) == before


async def test_many_cancelled_at_once(node: Node, client: dsec.DSecClient) -> None:
    tasks = [asyncio.create_task(client.run_container(args(job="cut-many"))) for _ in range(40)]
    await asyncio.sleep(0.08)
    for task in tasks:
        task.cancel()
    kept = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, dsec.Sandbox)]

    async def only_kept() -> bool:
        return set(await living(client, "cut-many")) == {box.id for box in kept}

    await eventually(only_kept, 4.0)
    await asyncio.gather(*(box.stop() for box in kept))


async def test_delete_at_any_moment_twice_with_calls_under_way(node: Node, client: dsec.DSecClient) -> None:
    """Every delete is accepted and answers gone; every other call ends with a result or a lost sandbox; it never comes back."""
    for _ in range(12):
        box = await client.run_container(args(job="delete"))
        calls = [asyncio.create_task(box.exec(["sleep", "5"])) for _ in range(2)]
        calls += [asyncio.create_task(box.exec(["true"])) for _ in range(3)]
        calls += [asyncio.create_task(box.renew(60)), asyncio.create_task(box.files.write("/tmp/f", bytes(1 << 20)))]
        await asyncio.sleep(SEED.uniform(0, 0.02))
        views = await asyncio.gather(box.stop(), box.stop())
        calls += [asyncio.create_task(box.renew(60)), asyncio.create_task(box.exec(["true"]))]
        found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert [view.state for view in views] == ["gone", "gone"]
        for each in found:
            assert not isinstance(each, BaseException) or isinstance(each, dsec.SandboxLost), repr(each)
            if isinstance(each, dsec.SandboxLost):
                assert each.end == "stopped"
        assert all(isinstance(each, dsec.SandboxLost) for each in found[-2:])
        assert (await box.stop()).state == "gone" and (await box.info()).state == "gone"
        assert groups(node, box.id) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_renewals_at_the_edge_of_the_end(client: dsec.DSecClient) -> None:
    """200 renewals within milliseconds of the end: each sandbox either lives, with an end to come, or is gone; never both."""
    ttl, outcomes = 1.0, {"alive": 0, "gone": 0}

    async def one(box: dsec.Sandbox) -> None:
        for _ in range(10):
            idle = box.view.idle_deadline
            assert idle is not None
            await asyncio.sleep(idle - time.time() + SEED.uniform(-0.006, 0.004))
            try:
                box._view = await box.renew(ttl)
            except dsec.SandboxLost as lost:
                assert lost.end == "idle"
                assert (await box.info()).state in ("stopping", "gone")
                outcomes["gone"] += 1
                return
            now = time.time()
            assert box.view.state == "running" and box.view.idle_deadline > now - 0.05
            assert (await box.renew(ttl)).state == "running"
            outcomes["alive"] += 1

    waves = 0
    while sum(outcomes.values()) < 200:
        boxes = [box async for box in client.run_containers(args(ttl_running_stop=ttl, job="edge"), count=20)]
        found = [box for box in boxes if isinstance(box, dsec.Sandbox)]
        fresh = await asyncio.gather(*(box.renew(ttl) for box in found), return_exceptions=True)
        for box, view in zip(found, fresh, strict=True):
            if not isinstance(view, BaseException):
                box._view = view
        await asyncio.gather(
            *(one(box) for box, view in zip(found, fresh, strict=True) if not isinstance(view, BaseException))
        )
        waves += 1
        assert waves < 20
    assert outcomes["alive"] and outcomes["gone"], outcomes
    await client.stop_many(job="edge")


@pytest.fixture
async def pair(node: Node) -> AsyncIterator[tuple[dsec.DSecClient, dsec.DSecClient]]:
    async with (
        dsec.DSecClient(url=node.url, api_key=node.api_key) as one,
        dsec.DSecClient(url=node.url, api_key=node.api_key) as two,
    ):
        yield one, two


SCRIPT = """
import asyncio, sys, dsec
async def main():
    async with dsec.DSecClient(url=sys.argv[1], api_key=sys.argv[2]) as client:
        args = dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64, job="pair")
        box = await client.run_container(args, request_id=sys.argv[3])
        found = await box.run_shell("echo $$ >> /tmp/runs; sleep 0.3; echo $$", request_id="run")
        print(box.id, found.text.strip())
asyncio.run(main())
"""


async def test_two_processes_with_one_request_get_one_sandbox_and_one_run(node: Node, client: dsec.DSecClient) -> None:
    key = f"pair-{SEED.getrandbits(64)}"
    both = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, node.url, node.api_key, key, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [(await each.communicate())[0].decode() for each in both]
    assert said[0] == said[1] != ""
    box = await client.get(said[0].split()[0])
    assert (await box.files.read("/tmp/runs")).decode().split() == said[0].split()[1:]
    with pytest.raises(dsec.Conflict):
        await client.run_container(args(memory_limit_mb=96, job="pair"), request_id=key)
    assert await living(client, "pair") == [box.id]
    await box.stop()


async def test_one_request_id_twice_at_once_for_every_kind(
    pair: tuple[dsec.DSecClient, dsec.DSecClient], boxes: Boxes
) -> None:
    made = await boxes.make()
    one, two = [await client.get(made.id) for client in pair]
    told = await asyncio.gather(*(box.files.write("/tmp/f", b"same", request_id="w") for box in (one, two)))
    assert told[0] == told[1]
    started = await asyncio.gather(*(box.start(["sleep", "60"], request_id="p") for box in (one, two)))
    assert started[0].id == started[1].id and len(await one.processes()) == 1
    sessions = await asyncio.gather(*(box.open_session(request_id="s") for box in (one, two)))
    assert sessions[0].id == sessions[1].id and len(await one.sessions()) == 1
    runs = await asyncio.gather(*(each.run("echo x >> /tmp/s; cat /tmp/s", request_id="r") for each in sessions))
    assert runs[0].text == runs[1].text == "x\n"
    renewed = await asyncio.gather(*(box.renew(60, request_id="n") for box in (one, two)))
    assert renewed[0].idle_deadline == renewed[1].idle_deadline
    for wrong in (
        one.files.write("/tmp/f", b"other", request_id="w"),
        one.files.write("/tmp/g", b"same", request_id="w"),
        one.start(["sleep", "61"], request_id="p"),
        one.open_session(cwd="/tmp", request_id="s"),
        sessions[0].run("echo y", request_id="r"),
        one.exec(["true"], request_id="r"),
        one.renew(61, request_id="n"),
    ):
        with pytest.raises(dsec.Conflict):
            await wrong
    assert (await one.files.read("/tmp/f")) == b"same"


async def test_a_user_that_the_image_does_not_know(node: Node, client: dsec.DSecClient) -> None:
    """A fault of the caller's, told at the create; numbers need no account, and nothing is left."""
    for user in ("nobody-here", "1000:no-such-group", "root:nope"):
        with pytest.raises(dsec.InvalidArgument) as caught:
            await client.run_container(dsec.DSecContainerRunArgs(container_image="box:1", init_user=user))
        assert caught.value.fields["field"] == "init_user"
    for user, number in (("root", "0"), ("12345", "12345")):
        box = await client.run_container(dsec.DSecContainerRunArgs(container_image="box:1", init_user=user))
        assert (await box.exec(["id", "-u"])).text.strip() == number
        await box.stop()


async def test_a_volume_in_use_stays(node: Node, client: dsec.DSecClient) -> None:
    node.dsec("volume", "create", "held")
    mount = dsec.MountSpec(target="/held", volume="held")
    boxes = [
        await client.run_container(dsec.DSecContainerRunArgs(container_image="box:1", mounts=[mount])) for _ in range(2)
    ]
    await boxes[0].files.write("/held/f", b"kept")
    with pytest.raises(NodeFailed, match="2 sandboxes use"):
        node.dsec("volume", "remove", "held")
    assert await boxes[1].files.read("/held/f") == b"kept"
    for box in boxes:
        await box.stop()
    node.dsec("volume", "remove", "held")
    assert "held" not in node.dsec("volume", "list").split()
