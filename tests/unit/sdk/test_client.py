"""The client against a server that works, and one that fails."""

import asyncio
from contextlib import aclosing

import pytest

import dsec
import dsec.sdk._async.transport as transport
from apifake import KEY, Server

ARGS = dsec.DSecContainerRunArgs(container_image="python-3.11", labels={"a": "b"}, job="j")


def acts(server: Server, path: str) -> list[str | None]:
    return [request_id for _, seen, request_id in server.seen if seen.split("?")[0].endswith(path)]


async def test_published_listing_works(server: Server) -> None:
    client = dsec.DSecClient(server.url, KEY)
    await client.open()
    args = dsec.DSecContainerRunArgs(
        container_image="python-3.11",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": False},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    await sandbox.stop()
    await client.close()
    assert result.text == "hello world\n"
    spec = sandbox.view.spec
    assert (spec.memory_limit_mb, spec.cpu_cores_limit, spec.init_user) == (4096, 4, "root")
    assert spec.network_rules == {"npm": False, "pypi": False}
    assert sandbox.view.state is dsec.SandboxState.GONE
    assert sandbox.phases == {"launch": 0.002}


def test_arguments_have_the_fields_and_defaults_of_the_spec() -> None:
    spec = dsec.DSecContainerRunArgs(container_image="x").spec()
    assert spec == type(spec)(container_image="x")
    mine = set(dsec.DSecContainerRunArgs.__struct_fields__)
    assert mine == set(type(spec).__struct_fields__) - {"backend"}


@pytest.mark.parametrize("wrong", [{"toolkits": "search@1"}, {"memory_limit_mb": "much"}, {"env": {"A": 1}}])
def test_arguments_of_a_wrong_type_are_refused_here(wrong: dict[str, object]) -> None:
    with pytest.raises(dsec.InvalidArgument):
        dsec.DSecContainerRunArgs(container_image="x", **wrong).spec()


async def test_calls_before_open_and_after_close_are_refused(server: Server) -> None:
    client = dsec.DSecClient(server.url, KEY)
    with pytest.raises(dsec.InvalidArgument, match="not open"):
        await client.me()
    await client.open()
    assert (await client.me()).principal == "root"
    await client.close()
    await client.close()
    with pytest.raises(dsec.InvalidArgument, match="not open"):
        await client.me()


async def test_a_wrong_key_is_unauthenticated(server: Server) -> None:
    async with dsec.DSecClient(server.url, "other") as client:
        with pytest.raises(dsec.Unauthenticated):
            await client.me()


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_cut_connection_repeats_with_the_same_id_and_runs_once(
    server: Server, box: dsec.Sandbox, fault: str
) -> None:
    setattr(server.faults, fault, 2)
    result = await box.exec(["echo", "x"])
    assert result.stdout == b"x\n"
    ids = acts(server, "/exec")
    assert len(ids) == 3 and len(set(ids)) == 1
    assert len(server.executed) == 1


async def test_repeats_are_bounded(server: Server, box: dsec.Sandbox) -> None:
    server.faults.before = 100
    with pytest.raises(dsec.Unavailable):
        await box.exec(["true"])
    assert len(acts(server, "/exec")) == len(transport.REPEATS) + 1
    assert server.executed == []


async def test_nothing_listening_is_unavailable(server: Server) -> None:
    async with dsec.DSecClient("http://127.0.0.1:1", KEY) as client:
        with pytest.raises(dsec.Unavailable):
            await client.me()


async def test_a_request_id_of_the_callers_is_sent_and_checked(server: Server, box: dsec.Sandbox) -> None:
    first = await box.run_shell("echo $$", request_id="step-1")
    again = await box.run_shell("echo $$", request_id="step-1")
    assert first == again and len(server.executed) == 1
    assert first.request_id == "step-1"
    for wrong in ["a b", "é", "x" * 129, "a\r\nX: y"]:
        with pytest.raises(dsec.InvalidArgument):
            await box.exec(["true"], request_id=wrong)


async def test_no_answer_is_deadline_exceeded(
    server: Server, box: dsec.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.sdk._async.sandbox.MARGIN", 0.05)
    server.faults.hang = True
    with pytest.raises(dsec.DeadlineExceeded):
        await box.exec(["true"], timeout=0.05)


async def test_busy_is_asked_again_until_the_time_is_over(server: Server, client: dsec.DSecClient) -> None:
    server.faults.busy = 2
    assert (await client.run_container(ARGS, timeout=5)).id
    server.faults.busy = 100
    with pytest.raises(dsec.Busy) as caught:
        await client.run_container(ARGS, timeout=0.2)
    assert caught.value.is_infra_error and caught.value.retry_after == 0.05


async def test_batch_yields_each_and_names_failures(server: Server, client: dsec.DSecClient) -> None:
    server.faults.refuse_batch = {3}
    made, failed = [], []
    async for item in client.run_containers(ARGS, 8):
        (failed if isinstance(item, dsec.SandboxFailed) else made).append(item)
    assert len({box.id for box in made}) == 7
    assert [(item.index, type(item.error)) for item in failed] == [(3, dsec.ImageUnavailable)]


async def test_a_cut_batch_is_taken_up_again_and_makes_nothing_twice(server: Server, client: dsec.DSecClient) -> None:
    server.faults.cut_batch_after = 3
    boxes = [item async for item in client.run_containers(ARGS, 6)]
    assert len({box.id for box in boxes if isinstance(box, dsec.Sandbox)}) == 6
    assert len(server.sandboxes) == 6
    assert len(acts(server, "/batch")) == 2


async def test_what_a_server_undid_is_made_anew(server: Server, client: dsec.DSecClient) -> None:
    server.faults.cut_batch_after, server.faults.undo_when_cut = 3, 2
    boxes = [item async for item in client.run_containers(ARGS, 6)]
    assert len({box.id for box in boxes if box.view.state is dsec.SandboxState.RUNNING}) == 6
    assert len(server.sandboxes) == 8


async def test_a_batch_that_never_answers_ends_in_unavailable(server: Server, client: dsec.DSecClient) -> None:
    server.faults.before = 100
    with pytest.raises(dsec.Unavailable):
        async with aclosing(client.run_containers(ARGS, 2)) as items:
            async for _ in items:
                raise AssertionError("there is nothing to yield")


async def test_list_get_and_stop_many(server: Server, client: dsec.DSecClient) -> None:
    for _ in range(5):
        await client.run_container(ARGS)
    other = await client.run_container(dsec.DSecContainerRunArgs(container_image="x"))
    found = await client.sandboxes(job="j", labels={"a": "b"}, state=dsec.SandboxState.RUNNING)
    assert len(found) == 5, "pages are put together"
    assert "label=a%3Db" in server.seen[-1][1]
    assert (await client.get(other.id)).id == other.id
    assert len(await client.stop_many(job="j")) == 5
    assert [box.id for box in await client.sandboxes()] == [other.id]
    with pytest.raises(dsec.NotFound):
        await client.get("s404")
    assert [image.name for image in await client.images()] == ["python-3.11"]


async def test_published_names_without_a_backend_are_unsupported(client: dsec.DSecClient, box: dsec.Sandbox) -> None:
    for name in ["pause", "resume", "snapshot", "fork"]:
        with pytest.raises(dsec.Unsupported):
            await getattr(box, name)()
    for name in ["run_microvm", "run_fullvm", "fncall"]:
        with pytest.raises(dsec.Unsupported):
            await getattr(client, name)(ARGS)
    assert not hasattr(box, "no_such_name")


async def test_cancelling_a_create_in_flight_leaves_the_client_usable(server: Server, client: dsec.DSecClient) -> None:
    server.faults.hang = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.run_container(ARGS)
    server.faults.hang = False
    assert (await client.run_container(ARGS)).id


async def test_a_cancelled_create_is_given_up_by_its_key(server: Server, client: dsec.DSecClient) -> None:
    """The key that the client made itself, which nobody else can come back with; a key of the caller's stays his."""
    for request_id in (None, "mine"):
        server.faults.hang = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.run_container(ARGS, request_id=request_id)
        server.faults.hang = False
    told = [seen[1] for seen in server.seen if seen[1].startswith("/v1/sandboxes/cancel")]
    assert len(told) == 1 and "mine" not in told[0]
