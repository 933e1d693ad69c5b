"""Kills at random moments under load, errors at each kernel action, and ends by time that pass while no server is there."""

import asyncio

import pytest
from msgspec.structs import replace

import dsec
from dsec.kernel.clock import SystemClock
from dsec.model.errors import DSecError
from dsec.testing.chaos import kill_often
from dsec.testing.failpoints import FailingNode
from dsec.testing.node import Node
from dsec.testing.witness import Witness
from recovery.conftest import with_client

pytestmark = pytest.mark.root

KILLS = 50
KERNEL = ("native.", "os.")


@pytest.mark.timeout(600)
def test_fifty_kills_under_load(node: FailingNode, witness: Witness) -> None:
    node.kill()
    plain = Node(node.state)
    plain.start()
    try:
        asyncio.run(kill_often(plain, witness, KILLS, lambda number: print(f"kill {number}")))
    finally:
        plain.stop()


async def _life(client: dsec.DSecClient) -> DSecError | None:
    """A sandbox from its creation to its end; how its creation failed."""
    args = dsec.DSecContainerRunArgs(container_image="other", memory_limit_mb=64)
    try:
        box = await client.run_container(args, timeout=20.0)
    except DSecError as error:
        return error
    await box.stop()
    return None


@pytest.mark.timeout(300)
def test_an_error_at_any_kernel_action_is_told_by_name_and_leaves_nothing(node: FailingNode, witness: Witness) -> None:
    told: dict[str, str] = {}

    async def all_of_them(client: dsec.DSecClient) -> None:
        before = node.reached()
        assert await _life(client) is None
        places = [name for name, count in node.reached().items() if count > before.get(name, 0)]
        for place in sorted(name for name in places if name.startswith(KERNEL)):
            node.arm(f"{place}:1:EIO")
            error = await _life(client)
            node.arm("")
            if error is not None:
                told[place] = type(error).__name__
                assert "incident" not in error.fields, f"{place}: {error!r}"
            await witness.settled(client)
        assert await _life(client) is None

    with_client(node, all_of_them)
    assert "native.launch.before" in told and "native.subvolume_create.before" in told


def test_time_passes_while_no_server_is_there(node: FailingNode, witness: Witness) -> None:
    """Ends by time that came meanwhile are carried out at once; who was attached until the end has his idle time anew."""
    clock = SystemClock()

    async def made(client: dsec.DSecClient) -> tuple[str, ...]:
        args = dsec.DSecContainerRunArgs(container_image="box", memory_limit_mb=64)
        absolute = await client.run_container(replace(args, ttl_absolute=1.0))
        idle = await client.run_container(replace(args, ttl_running_stop=0.5))
        used = await client.run_container(replace(args, ttl_running_stop=2.0))
        reading = asyncio.get_running_loop().create_task(used.exec(["/bin/sleep", "1000"]))
        await asyncio.sleep(1.3)  # activity is written down once a second
        node.kill()
        reading.cancel()
        await asyncio.wait((reading,))
        return absolute.id, idle.id, used.id

    async def begin() -> tuple[str, ...]:
        async with dsec.DSecClient(node.url, node.api_key) as client:
            return await made(client)

    async def look() -> None:
        async with dsec.DSecClient(node.url, node.api_key) as client:
            views = [(await client.get(name)).view for name in ids]
            assert [view.end and str(view.end.end) for view in views] == ["expired", "idle", None]
            assert views[2].state == "running"
            await (await client.get(ids[2])).stop()
            await witness.settled(client)

    ids = asyncio.run(begin())
    gone_since = clock.now()
    asyncio.run(asyncio.sleep(2.0))
    node.start()
    assert clock.now() > gone_since + 2.0
    asyncio.run(look())
