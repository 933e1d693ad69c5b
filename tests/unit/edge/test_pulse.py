"""An aether that lives and does not answer."""

import asyncio
from pathlib import Path

import pytest
from rig import Rig, running, until

from dsec.edge.agent import UnixAgent
from dsec.edge.pulse import PulseSettings, answers
from dsec.model import aether as wire
from dsec.model.errors import InvalidArgument
from dsec.testing.agent import Fault


async def hanging(rig: Rig) -> tuple[str, asyncio.Task[object]]:
    view = await rig.create()
    task = asyncio.ensure_future(rig.exec(view, "hang"))
    await until(lambda: bool(rig.agent(view).processes))
    return view.id, task


async def test_a_sandbox_in_use_that_misses_twice_is_ended_and_its_caller_told(rig: Rig) -> None:
    sandbox_id, task = await hanging(rig)
    agent = rig.kernel.cells[sandbox_id].agent
    for misses in (1, 2):
        agent.faults[wire.HelloRequest] = Fault.BREAK_BEFORE
        await rig.node.pulse.round()
        assert task.done() is False or misses == 2
    await until(rig.clean)
    answer = await task
    assert (answer.status, answer.json()["code"], answer.json()["fields"]["end"]) == (410, "sandbox_lost", "runtime")
    assert "does not answer" in answer.json()["detail"]


async def test_one_miss_is_forgiven(rig: Rig) -> None:
    sandbox_id, task = await hanging(rig)
    agent = rig.kernel.cells[sandbox_id].agent
    for _ in range(3):
        agent.faults[wire.HelloRequest] = Fault.BREAK_BEFORE
        await rig.node.pulse.round()
        await rig.node.pulse.round()
    assert sandbox_id in rig.kernel.cells
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_that_nobody_uses_is_not_asked(rig: Rig) -> None:
    view = await rig.create()
    await rig.node.pulse.round()
    assert rig.agent(view).requests == []


@pytest.mark.parametrize("said", [b"", b"\xff" * 64, b"\x05\0\0\0", None])
async def test_what_is_no_answer(tmp_path: Path, said: bytes | None) -> None:
    """Nothing, garbage, half a frame, and silence: each within the patience."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if said is None:
            await reader.read()
        else:
            writer.write(said)
        writer.close()

    (tmp_path / "n").mkdir()
    async with running(tmp_path / "n") as rig:
        resident = rig.node.lifecycle.residents[(await rig.create()).id]
        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        resident.agent = UnixAgent(str(tmp_path / "s"))
        assert not await answers(resident, 0.2)
        server.close()


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="interval"):
        PulseSettings(interval=0.0)
