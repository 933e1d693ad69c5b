"""What a request_id is answered after the server went in the middle: what was made, Interrupted, or Conflict, and never a second run."""

import asyncio

import pytest

import dsec
from dsec.model.errors import Conflict, Interrupted
from dsec.testing.chaos import until_death
from dsec.testing.failpoints import FailingNode
from recovery.conftest import with_client

pytestmark = pytest.mark.root

ARGS = dsec.DSecContainerRunArgs(container_image="box", memory_limit_mb=64)
UNRECORDED = "journal.finish.before"


async def _made(client: dsec.DSecClient) -> dsec.Sandbox:
    return await client.run_container(ARGS)


async def _begun(box: dsec.Sandbox) -> None:
    async with asyncio.timeout(10):
        while not await box.files.exists("/begun"):
            await asyncio.sleep(0.02)


def test_a_start_and_a_session_that_had_come_about_answer_what_they_made(node: FailingNode) -> None:
    """Killed when aether had made them and the journal did not know their end yet."""
    ids: list[str] = []

    async def process(box: dsec.Sandbox) -> None:
        await box.start(["/bin/sh", "-c", "echo x >> /starts; sleep 1000"], request_id="process")

    async def session(box: dsec.Sandbox) -> None:
        await box.open_session(request_id="session")

    async def first(client: dsec.DSecClient) -> None:
        ids.append((await _made(client)).id)

    async def killed(client: dsec.DSecClient) -> None:
        box = await client.get(ids[0])
        node.arm(UNRECORDED)
        assert await until_death(node, (process if len(ids) == 1 else session)(box))
        ids.append("")

    async def again(client: dsec.DSecClient) -> None:
        box = await client.get(ids[0])
        [known] = await box.processes()
        found = await box.start(["/bin/sh", "-c", "echo x >> /starts; sleep 1000"], request_id="process")
        assert (found.id, found.view.pid, found.view.running) == (known.id, known.pid, True)
        assert await box.files.read("/starts") == b"x\n"
        [open_one] = await box.sessions()
        opened = await box.open_session(request_id="session")
        assert opened.id == open_one.id and (await opened.run("echo works")).text == "works\n"
        assert len(await box.sessions()) == 1
        await box.stop()

    with_client(node, first)
    for _ in range(2):
        with_client(node, killed)
        node.restart()
    with_client(node, again)


def test_an_orderly_stop_leaves_operations_interrupted(node: FailingNode) -> None:
    """Sandboxes stay, the command under way ends with its connection, and its request_id says so for good."""
    ids: list[str] = []
    command = "echo x >> /begun; sleep 1000"

    async def under_way(client: dsec.DSecClient) -> None:
        box = await _made(client)
        ids.append(box.id)
        running = asyncio.get_running_loop().create_task(box.run_shell(command, request_id="stopped"))
        await _begun(box)
        await asyncio.to_thread(node.dsec, "down", "--keep-sandboxes", "--state", str(node.state))
        running.cancel()
        await asyncio.wait((running,))

    async def again(client: dsec.DSecClient) -> None:
        box = await client.get(ids[0])
        for _ in range(2):
            with pytest.raises(Interrupted):
                await box.run_shell(command, request_id="stopped")
        assert await box.files.read("/begun") == b"x\n"
        assert "sleep" not in (await box.run_shell("cat /proc/[0-9]*/comm")).text
        await box.stop()

    with_client(node, under_way)
    node.restart()
    with_client(node, again)


def test_a_result_that_is_gone_is_a_conflict(node: FailingNode) -> None:
    """What was too large to keep is not run again, before a kill and after it."""
    ids: list[str] = []
    command = "echo x >> /runs; cat /bin/busybox"

    async def refused(client: dsec.DSecClient) -> None:
        box = await client.get(ids[0])
        with pytest.raises(Conflict) as conflict:
            await box.run_shell(command, request_id="large")
        assert conflict.value.fields["state"] == "forgotten"
        assert await box.files.read("/runs") == b"x\n"

    async def run(client: dsec.DSecClient) -> None:
        box = await _made(client)
        ids.append(box.id)
        assert (await box.run_shell(command, request_id="large")).stdout_bytes_total > 1 << 17
        await refused(client)

    with_client(node, run)
    node.kill()
    node.start()
    with_client(node, refused)
