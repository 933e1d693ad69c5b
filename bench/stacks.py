"""Stacks: five language stacks as images that a node has never seen; how much of each a real test run reads, and how long it takes."""

import asyncio
from pathlib import Path
from typing import Any

import dsec
from bench.figures import Figure, Report, machine
from bench.lazy import first_output, fresh_node, layer_bytes, stocked
from bench.realimages import named
from bench.teststacks import STACKS, Stack

__all__ = ["run"]

FIRST = ["sh", "-c", "echo ok"]


async def _measure(cache: Path, store: Path, stack: Stack) -> dict[str, Any]:
    """One node: a first output of a shell, the test run, and the same test run again."""
    name = named(stack.image).known_as
    with fresh_node(cache, store) as node:
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            await client.open()
            async with first_output(client, name, FIRST, stack.memory_mb) as (first, _):
                pass
            async with first_output(client, name, stack.command, stack.memory_mb) as (cold, _):
                held = layer_bytes(node)
            async with first_output(client, name, stack.command, stack.memory_mb) as (warm, _):
                pass
    return {"first_s": first, "cold_s": cold, "warm_s": warm, **held}


async def run(quick: bool, cache: Path) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers, of which there are none."""
    facts, seen = machine(), {}
    for name in list(STACKS)[: 1 if quick else None]:
        store = await asyncio.to_thread(stocked, [named(STACKS[name].image)], cache)
        seen[name] = await _measure(cache, store, STACKS[name])
    figures = [
        figure
        for name, one in seen.items()
        for figure in (
            Figure(name=f"{name}_image_mb", value=one["size"] / 1e6, unit="MB"),
            Figure(name=f"{name}_share_read", value=one["data"] / one["size"], unit=""),
            Figure(name=f"{name}_first_output_s", value=one["first_s"], unit="s"),
            Figure(name=f"{name}_test_run_s", value=one["cold_s"], unit="s", peers={"cached": one["warm_s"]}),
        )
    ]
    return Report(name="stacks", machine=facts, figures=figures, raw={"stacks": seen}, quick=quick), {}
