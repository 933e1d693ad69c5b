"""Many sandboxes linked at once, each with a policy of its own: what each costs, and how fast one of them changes."""

import os
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.figures import Figure, Report, machine, summary
from bench.footprint import Footprint
from dsec.kernel import namespaces
from dsec.kernel.uids import Slots
from dsec.model.network import Allow, NetLimits
from dsec.testing.fabric import fabric_in
from dsec.testing.internet import Internet

__all__ = ["run"]

COUNT, QUICK_COUNT = 1000, 200
CHANGES = 300
TOGETHER = 128


def policy(number: int) -> list[Allow]:
    """Ten rules that no other sandbox has."""
    high, low = divmod(number, 200)
    return [Allow(network=f"198.{18 + high}.{low}.{host}/32", low=443, high=443) for host in range(1, 11)]


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    facts, count = machine(), QUICK_COUNT if quick else COUNT
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        internet = stack.enter_context(Internet())
        fabric = stack.enter_context(fabric_in(internet, state))
        slots = Slots(str(state))
        slots.open()
        stack.callback(slots.close)
        sets = [namespaces.make_namespaces(slots.take("bench")) for _ in range(count)]
        for made in sets:
            stack.callback(made.close)
            stack.callback(slots.release, made.slot, "bench")
        before, links = Footprint.now(os.getpid()), []
        for number, made in enumerate(sets):
            begun = time.perf_counter()
            fabric.link(made.slot, made.net)
            fabric.apply(made.slot, policy(number), NetLimits(), 0)
            links.append((time.perf_counter() - begun) * 1000)
        after, dice, took = Footprint.now(os.getpid()), random.Random(3), []
        for number in range(CHANGES):
            made = dice.choice(sets)
            begun = time.perf_counter()
            fabric.apply(made.slot, policy(count + number), NetLimits(), 0)
            took.append((time.perf_counter() - begun) * 1000)
        begun = time.perf_counter()
        for made in sets:
            fabric.cut(made.slot)
        cut = time.perf_counter() - begun
        leaving = [made.slot for made in sets]
        for at in range(0, count, TOGETHER):
            fabric.unlink(*leaving[at : at + TOGETHER])
        gone = time.perf_counter() - begun
    figures = [
        Figure(name="linked", value=count, unit="sandboxes", goal=count, better="higher"),
        Figure(
            name="kib_each",
            value=max(after.used - before.used, before.available - after.available) / 1024 / count,
            unit="KiB",
        ),
        Figure(name="policy_change_p99_ms", value=summary(took)["p99"], unit="ms", goal=100),
        Figure(name="link_p50_ms", value=summary(links)["p50"], unit="ms"),
        Figure(name="cut_ms", value=cut * 1000 / count, unit="ms"),
        Figure(name="all_unlinked_s", value=gone, unit="s", goal=15),
    ]
    raw = {"policy_change_ms": summary(took), "link_ms": summary(links), "kib_each": after.by_part(before, count)}
    return Report(name="net-density", machine=facts, figures=figures, raw=raw, quick=quick), {}
