"""Out-of-memory kills become events by themselves: with their own time, at the sandbox's end too, and after a restart."""

import asyncio
import time

import pytest

import dsec
from conformance.boxes import eventually
from conformance.conftest import import_images
from dsec.testing.node import Node

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

HOG = "head -c 400m /dev/zero | tail >/dev/null 2>&1; true"


def kills(found: list[dsec.SandboxEvent]) -> list[tuple[float, int]]:
    return [(each.at, int(each.fields["count"])) for each in found if each.fields.get("what") == "out_of_memory"]  # type: ignore[arg-type]


async def test_kills_are_events_by_themselves(node: Node, client: dsec.DSecClient) -> None:
    """Nobody asks and no command fails: the event is there with the time of the kill; the last ones are told by the end."""
    box = await client.run_container(dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64))
    before = time.time()
    await box.start(["/bin/sh", "-c", HOG])

    async def killed() -> bool:
        return bool(kills(await box.events()))

    await eventually(killed, 20.0)
    seen = time.time()
    await asyncio.sleep(1.5)  # a look from now on is later than the kill
    [(at, count)] = kills(await box.events())
    assert before - 1.0 < at < seen and count == 1
    await box.start(["/bin/sh", "-c", f"{HOG}; echo over >/over; sleep 60"])

    async def over() -> bool:
        return (await box.run_shell("test -e /over")).exit_code == 0

    await eventually(over, 20.0)
    await box.stop()
    assert sum(count for _, count in kills(await box.events())) == 2


async def test_a_restarted_server_is_told_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What was told before is not told again, what came while the server was away is, and so is what comes after."""
    path = tmp_path_factory.mktemp("kills")
    with Node(path / "s", DSEC_CONTAINER_POOL_BYTES=str(512 << 20)) as node:
        import_images(node, path)
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.run_container(dsec.DSecContainerRunArgs(container_image="box:1", memory_limit_mb=64))
            await box.run_shell(HOG)
            await box.start(
                [
                    "/bin/sh",
                    "-c",
                    f"while [ ! -e /go ]; do sleep 0.1; done; {HOG}; echo >/first; sleep 2; {HOG}; sleep 60",
                ]
            )

            async def told() -> bool:
                return [count for _, count in kills(await box.events())] == [1]

            await eventually(told)
            await box.files.write("/go", b"")

            async def first() -> bool:
                return (await box.run_shell("test -e /first")).exit_code == 0

            await eventually(first, 30.0)
        node.kill()
        node.start()
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            box = await client.get(box.id)

            async def all_told() -> bool:
                return sum(count for _, count in kills(await box.events())) == 3

            await eventually(all_told, 20.0)
            await asyncio.sleep(1.5)
            assert sum(count for _, count in kills(await box.events())) == 3
            await box.stop()
