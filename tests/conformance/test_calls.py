"""What a call of the SDK does beyond its request: cancelling it ends the work, repeating it under one id acts once."""

import asyncio

import pytest

import dsec
from dsec.testing.suite.boxes import eventually

pytestmark = pytest.mark.root


async def test_cancelling_an_exec_ends_its_tree(box: dsec.Sandbox) -> None:
    task = asyncio.create_task(box.run_shell("sleep 601 & sleep 601"))

    async def running(count: int) -> bool:
        return (await box.run_shell("ps | grep -c '[s]leep 601'; true")).text.strip() == str(count)

    await eventually(lambda: running(2))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: running(0), 0.5)


async def test_a_session_after_a_cancelled_command(box: dsec.Sandbox) -> None:
    session = await box.open_session()
    await session.run("x=kept")
    task = asyncio.create_task(session.run("sleep 602"))
    await asyncio.sleep(0.1)
    task.cancel()
    assert (await session.run("echo $x")).text == "kept\n"
    assert (await session.run("exit 3")).exit_code == 3
    await session.close()


async def test_file_calls_under_one_id_act_once(box: dsec.Sandbox) -> None:
    for _ in range(2):
        await box.files.write("/log", b"x", append=True, request_id="append")
        await box.files.mkdir("/made", parents=False, request_id="make")
        await box.files.move("/log", "/moved", replace=False, request_id="move")
        await box.files.remove("/made", request_id="remove")
        await box.renew(1000, request_id="renew")
    assert await box.files.read("/moved") == b"x"
