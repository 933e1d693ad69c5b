"""Lifecycle: crashes, ends by time, creations cut midway, deletes, tenants beside each other (rows LC)."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import pytest

from dsec.testing.suite.backends import BackendUnderTest
from dsec.testing.suite.boxes import Box, Boxes, eventually
from dsec.testing.suite.callers import Caller, Refused
from dsec.testing.suite.fixtures import SURFACES
from dsec.testing.suite.sites import Site, needs

pytestmark = pytest.mark.asyncio

COUNTER = "i=0; while :; do i=$((i+1)); echo $i; usleep 50000; done"
SMALL: dict[str, Any] = {"memory_limit_mb": 64, "disk_limit_mb": 64}


@asynccontextmanager
async def connected(site: Site, surface: str) -> AsyncIterator[Caller]:
    """A caller of a site as it is now: a start may have moved it."""
    caller: Caller = SURFACES[surface](site.url, site.key)
    await caller.open()
    try:
        yield caller
    finally:
        await caller.close()


async def living(caller: Caller, job: str | None = None) -> set[str]:
    return {view.id for view in await caller.listed(job=job) if view.state != "gone"}


@pytest.mark.costly
@pytest.mark.timeout(180)
async def test_a_killed_server_takes_over_what_lives(mortal: Site, surface: str, backend: BackendUnderTest) -> None:
    """LC1: jobs of 20 sandboxes go on under the same ids, what was half made is gone, what was interrupted says so."""
    async with connected(mortal, surface) as caller:
        boxes = Boxes(caller, backend.name)
        made = [await boxes.make(ttl_running_stop=None, **SMALL) for _ in range(20)]
        jobs = [await box.start(COUNTER) for box in made]
        pending: list[asyncio.Future[object]] = [
            asyncio.ensure_future(box.shell("echo > /lost; sleep 30", "lost")) for box in made[:2]
        ]
        for box in made[:2]:
            await eventually(lambda box=box: has(box, "lost"))  # type: ignore[misc]
        pending += [asyncio.ensure_future(caller.create(boxes.spec(**SMALL))) for _ in range(6)]
        pending += [asyncio.ensure_future(made[19].stop())]
        await asyncio.sleep(random.uniform(0.0, 0.02))
        mortal.kill()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    mortal.start()
    async with connected(mortal, surface) as caller:
        found, ids = await living(caller), [box.id for box in made[:19]]
        assert set(ids) <= found
        for sandbox_id in found - set(ids):  # ready just when its caller went, or its end was not begun
            await caller.stop(sandbox_id)
        for box_id, job in zip(ids, jobs, strict=False):
            box = Box(caller, await caller.look(box_id))
            assert await box.said("echo back") == "back\n"
            view = await caller.process(box_id, job.id)
            assert view.running
            await eventually(lambda box=box, view=view: grown(box, view.id, view.stdout_bytes_total))  # type: ignore[misc]
        with pytest.raises(Refused) as refused:
            await Box(caller, await caller.look(ids[0])).shell("echo > /lost; sleep 30", "lost")
        assert refused.value.kind == "infra"
        await asyncio.gather(*(caller.stop(each) for each in ids))
        assert await living(caller) == set()


async def has(box: Box, name: str) -> bool:
    return name in await box.names("/")


async def grown(box: Box, process: str, before: int) -> bool:
    return (await box.caller.process(box.id, process)).stdout_bytes_total > before


async def renewed(caller: Caller, boxes: Boxes, count: int) -> None:
    """Each is renewed once, as near its end as can be: it lives on with an end ahead, or it is gone."""
    ttl = 5.0

    async def one() -> bool:
        box = await boxes.make(ttl_running_stop=ttl, **SMALL)
        deadline = (await caller.renew(box.id, ttl)).idle_deadline
        assert deadline is not None
        await asyncio.sleep(max(deadline - time.time() + random.uniform(-0.05, 0.05), 0))
        try:
            view = await caller.renew(box.id, ttl)
        except Refused as refused:
            assert (refused.code, refused.fields["end"]) == ("sandbox_lost", "idle")
            assert (await caller.look(box.id)).state in ("stopping", "gone")
            return False
        assert view.state == "running" and view.idle_deadline is not None
        assert view.idle_deadline >= deadline + ttl - 0.5
        assert (await box.exec(["true"])).exit_code == 0
        await box.stop()
        return True

    outcomes = await asyncio.gather(*(one() for _ in range(count)))
    assert len(outcomes) == count


@pytest.mark.costly
async def test_a_renewal_at_the_last_moment_wins_or_loses(caller: Caller, boxes: Boxes) -> None:
    """LC2: one enforcer: alive with an end ahead, or gone, and nothing between."""
    await renewed(caller, boxes, 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_five_hundred_renewals_at_the_last_moment(caller: Caller, boxes: Boxes) -> None:
    """LC2, at the row's size."""
    for _ in range(10):
        await renewed(caller, boxes, 50)


async def expired_while_away(site: Site, surface: str, backend: str, ttl: float, away: float) -> None:
    async with connected(site, surface) as caller:
        boxes = Boxes(caller, backend)
        made = [await boxes.make(ttl_running_stop=None, ttl_absolute=ttl, **SMALL) for _ in range(5)]
        made += [await boxes.make(ttl_running_stop=ttl, **SMALL) for _ in range(5)]
        kept = await boxes.make(ttl_running_stop=None, **SMALL)
    site.kill()
    await asyncio.sleep(away)
    site.start()
    async with connected(site, surface) as caller:
        await eventually(lambda: only(caller, kept.id), ttl + 2)
        ends = [(await caller.look(box.id)).end for box in made]
        assert [end.end for end in ends if end is not None] == ["expired"] * 5 + ["idle"] * 5
        await caller.stop(kept.id)


async def only(caller: Caller, kept: str) -> bool:
    return await living(caller) == {kept}


@pytest.mark.costly
async def test_ends_by_time_are_carried_out_after_an_absence(
    mortal: Site, surface: str, backend: BackendUnderTest
) -> None:
    """LC2: while the server is away ends are kept (docs/operations.md), and carried out when it is back; none is lost."""
    await expired_while_away(mortal, surface, backend.name, 2, 3)


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_ends_by_time_after_a_minute_away(mortal: Site, surface: str, backend: BackendUnderTest) -> None:
    """LC2: the server is away for 60 s."""
    await expired_while_away(mortal, surface, backend.name, 5, 60)


async def cut_create(site: Site, boxes: Boxes, key: str, after: float) -> None:
    """Sends a create and cuts the connection after a while."""
    address = urlsplit(site.url)
    body = msgspec.json.encode(boxes.spec(job=key, **SMALL))
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.key}\r\nIdempotency-Key: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()
    await asyncio.sleep(after)
    writer.close()


@pytest.mark.parametrize("step", range(8))
async def test_a_create_cut_midway_is_one_sandbox(site: Site, caller: Caller, boxes: Boxes, step: int) -> None:
    """LC3: cut after 0, 10, ... ms (and between: a create takes less), a retry with the same key finds or makes the one."""
    for after in (step * 0.001, step * 0.01):
        key = f"lc3-{uuid4().hex}"
        await cut_create(site, boxes, key, after)
        view = await caller.create(boxes.spec(job=key, **SMALL), key)
        box = boxes.keep(Box(caller, view))
        assert (await box.exec(["true"])).exit_code == 0
        assert await living(caller, key) == {box.id}


@pytest.mark.slow
async def test_a_create_nobody_asks_for_again_is_undone(site: Site, caller: Caller, boxes: Boxes) -> None:
    """LC3: without a retry nothing is left after the grace time."""
    key = f"lc3-{uuid4().hex}"
    await cut_create(site, boxes, key, 0.001)
    await asyncio.sleep(11)
    await eventually(lambda: nothing(caller, key))


async def nothing(caller: Caller, job: str) -> bool:
    return not await living(caller, job)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004, 0.008, 0.03])
async def test_delete_is_accepted_in_every_state(caller: Caller, boxes: Boxes, delay: float) -> None:
    """LC4: while it is made, while it starts, while it runs and after; twice each; it ends gone and stays gone."""
    job = f"lc4-{uuid4().hex}"
    spec = boxes.spec(job=job, **SMALL)
    creating = [asyncio.ensure_future(caller.create(spec)) for _ in range(3)]
    await asyncio.sleep(delay)
    await asyncio.gather(caller.stop_job(job), caller.stop_job(job))
    for made in await asyncio.gather(*creating, return_exceptions=True):
        if isinstance(made, Refused):
            assert made.code == "sandbox_lost", made
            continue
        assert not isinstance(made, BaseException)
        views = await asyncio.gather(caller.stop(made.id), caller.stop(made.id))
        assert [view.state for view in views] == ["gone", "gone"]
        assert (await caller.stop(made.id)).state == "gone"
    assert await living(caller, job) == set()


async def test_delete_while_commands_run_ends_them(boxes: Boxes) -> None:
    """LC4: a command under way learns that its sandbox is gone, and how it went."""
    box = await boxes.make()
    task = asyncio.ensure_future(box.shell("echo > /begun; sleep 100"))
    await eventually(lambda: has(box, "begun"))
    assert [view.state for view in await asyncio.gather(box.stop(), box.stop())] == ["gone", "gone"]
    with pytest.raises(Refused) as refused:
        await task
    assert (refused.value.code, refused.value.fields["end"]) == ("sandbox_lost", "stopped")


async def churned(boxes: Boxes, turns: int) -> None:
    """One box keeps its process, its uptime and its file while others of the same image come and go, two cleaners at work."""
    kept = await boxes.make(**SMALL)
    job = await kept.start("echo mine > /file; exec sleep 600")
    await eventually(lambda: has(kept, "file"))
    uptime = float((await kept.said("cat /proc/uptime")).split()[0])
    name = f"lc7-{uuid4().hex}"

    async def others() -> None:
        for _ in range(turns):
            try:
                made = Box(boxes.caller, await boxes.caller.create(boxes.spec(job=name, **SMALL)))
                await made.shell("kill -9 -1; echo theirs > /file; echo 1 > /proc/1/oom_score_adj; rm -rf /tmp")
                await made.stop()
            except Refused as refused:  # a cleaner was faster
                assert refused.code in ("sandbox_lost", "busy"), refused

    async def cleaner() -> None:
        for _ in range(turns):
            await boxes.caller.stop_job(name)
            await asyncio.sleep(0.02)

    await asyncio.gather(others(), others(), cleaner(), cleaner())
    await boxes.caller.stop_job(name)
    view = await boxes.caller.process(kept.id, job.id)
    assert view.running and view.pid == job.pid
    assert await kept.read("/file") == b"mine\n"
    assert float((await kept.said("cat /proc/uptime")).split()[0]) >= uptime


@pytest.mark.costly
async def test_a_neighbour_s_life_has_no_effect(boxes: Boxes) -> None:
    """LC7, without pause: creates, deletes and two cleaners of another job beside a sandbox that goes on."""
    await churned(boxes, 10)


@pytest.mark.costly
async def test_two_tenants_have_no_effect_on_each_other(site: Site, surface: str, boxes: Boxes) -> None:
    """LC7, without pause: two tenants of one image, each with a sandbox that goes on while both make and end others."""
    needs(site, "tenants")
    caller: Caller = SURFACES[surface](site.url, await asyncio.to_thread(site.another_key))
    await caller.open()
    other = Boxes(caller, boxes.backend)
    try:
        await asyncio.gather(churned(boxes, 10), churned(other, 10))
        theirs = await boxes.make(**SMALL)
        for call in (caller.look(theirs.id), caller.stop(theirs.id), caller.read(theirs.id, "/etc/passwd").__anext__()):
            with pytest.raises(Refused) as refused:
                await call
            assert refused.value.code == "not_found"
        assert theirs.id not in await living(caller)
    finally:
        await other.close()
        await caller.close()


async def test_the_end_is_told(boxes: Boxes) -> None:
    """LC2: an idle end is named, to those who look and to those who call."""
    box = await boxes.make(ttl_running_stop=1.0)
    await eventually(lambda: gone(box))
    view = await boxes.caller.look(box.id)
    assert view.end is not None and view.end.end == "idle"
    with pytest.raises(Refused) as refused:
        await box.exec(["true"])
    assert refused.value.fields["end"] == "idle"


async def gone(box: Box) -> bool:
    """By a list, for a look at the box itself would keep it alive."""
    return any(view.id == box.id for view in await box.caller.listed(state="gone"))
