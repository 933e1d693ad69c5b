"""Work for one key at a time."""

import asyncio

import pytest

from dsec.images.turns import Turns


async def test_one_at_a_time_for_a_key_and_nothing_kept() -> None:
    turns, inside, most = Turns(), {"a": 0, "b": 0}, {"a": 0, "b": 0}

    async def work(key: str) -> None:
        async with turns.of(key):
            inside[key] += 1
            most[key] = max(most[key], inside[key])
            await asyncio.sleep(0)
            inside[key] -= 1

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(work("ab"[number % 2]))
    assert most == {"a": 1, "b": 1} and len(turns) == 0


async def test_one_that_is_cancelled_while_it_waits_lets_the_next_in() -> None:
    turns, order = Turns(), []

    async def work(name: str) -> None:
        async with turns.of("a"):
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(work(name)) for name in "xyz"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(tasks[0], tasks[2])
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert order == ["x", "z"] and len(turns) == 0
