"""What an edge does with images that are elsewhere: brought at a create, and what becomes of sandboxes when they cannot be read."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rig import SPEC, Rig, running, until

from dsec.model.errors import Busy, InvalidArgument, NotFound
from dsec.model.layers import ImageConfig
from dsec.model.outcome import ExecResult
from dsec.model.views import SandboxState
from dsec.testing.backend import FakeKernel
from dsec.testing.clock import VirtualClock


async def test_an_image_of_a_store_is_brought_when_it_is_asked_for(rig: Rig) -> None:
    rig.images.elsewhere["far"] = ImageConfig(env=("A=b",))
    view = await rig.create(replace(SPEC, container_image="far"))
    assert view.state is SandboxState.RUNNING and "far" in rig.images.configs
    with pytest.raises(NotFound):
        await rig.create(replace(SPEC, container_image="nowhere"))


async def test_nothing_is_brought_for_a_sandbox_that_would_be_refused(tmp_path: Path) -> None:
    async with running(tmp_path, sandboxes=1) as rig:
        rig.images.elsewhere["far"] = ImageConfig()
        await rig.create()
        with pytest.raises(Busy):
            await rig.create(replace(SPEC, container_image="far"))
        with pytest.raises(InvalidArgument):
            await rig.create(replace(SPEC, container_image="far", memory_limit_mb=1))
        assert "far" not in rig.images.configs


async def test_a_request_that_comes_twice_while_its_image_is_brought_makes_one_sandbox(rig: Rig) -> None:
    rig.images.elsewhere["far"] = ImageConfig()
    slow = asyncio.Event()
    bring = rig.images.bring

    async def slowly(names: tuple[str, ...]) -> None:
        await slow.wait()
        await bring(names)

    rig.images.bring = slowly  # type: ignore[method-assign]
    spec = replace(SPEC, container_image="far")
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(rig.create(spec, key="one")) for _ in range(2)]
        await asyncio.sleep(0)
        slow.set()
    assert both[0].result().id == both[1].result().id
    assert len(rig.node.lifecycle.residents) == 1


async def test_a_sandbox_that_read_what_is_wrong_ends_as_the_platforms_failure(rig: Rig) -> None:
    view, other = await rig.create(), await rig.create()
    rig.images.on_lost(view.id, "layer x could not be read: its pager ended")
    await until(lambda: view.id not in rig.node.lifecycle.residents)
    end = rig.node.lifecycle.view(view.id).end
    assert end is not None and (end.end, end.incident is not None) == ("image", True)
    assert rig.node.lifecycle.view(other.id).state is SandboxState.RUNNING
    lost = await rig.exec(view, "true")
    assert (lost.status, lost.json()["fields"]["infra"]) == (410, True)


async def test_a_command_that_failed_while_its_image_could_not_be_read_is_no_task_failure(rig: Rig) -> None:
    rig.images.failed_reads = 3  # before it was made, and so no concern of it
    view = await rig.create()

    async def result(command: str) -> ExecResult:
        return msgspec.json.decode((await rig.exec(view, command)).body, type=ExecResult)

    assert not (await result("false")).infra
    rig.images.failed_reads += 2
    assert not (await result("true")).infra, "it did not fail"
    assert (await result("false")).infra
    assert not (await result("false")).infra, "told once"
    story = (await rig.call(view, "GET", "/events")).json()
    seen = [each["fields"] for each in story if each["event"] == "Observed"]
    assert [(each["what"], each["count"]) for each in seen] == [("image_unreadable", 2)]


async def test_failed_reads_are_no_kills_after_a_restart(tmp_path: Path) -> None:
    clock, kernel = VirtualClock(), FakeKernel()
    async with running(tmp_path, kernel=kernel, clock=clock) as rig:
        view = await rig.create()
        rig.images.failed_reads = 5
        await rig.exec(view, "false")
    async with running(tmp_path, kernel=kernel, clock=clock) as rig:
        resident = rig.node.lifecycle.residents[view.id]
        assert resident.oom_kills == 0
        await rig.call(view, "DELETE")
