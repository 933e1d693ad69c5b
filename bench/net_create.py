"""What network rules add to a create and to a stop, through the SDK and the HTTP API, on a whole node whose host is a fake one."""

import asyncio
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.arena import IMAGE
from bench.ours import Ours
from bench.rootfs import make_rootfs
from dsec.model.network import NetworkRule, NetworkRules
from dsec.testing.internet import NAMESERVERS, Internet
from dsec.testing.node import Node

__all__ = ["Added", "added_by_rules", "median_added"]

SAMPLES, QUICK_SAMPLES = 150, 40
WARM = 5
RULES: NetworkRules = {"servers": NetworkRule(cidrs=("203.0.113.0/24",), ports=(443,))}

Added = dict[str, list[float]]
"""Milliseconds of each create and stop: `create_with`, `create_without`, `stop_with`, `stop_without`."""


async def _turns(node: Node, count: int) -> Added:
    """Both by turns, each as often first as the other."""
    contenders = {"with": Ours(node, IMAGE, RULES), "without": Ours(node, IMAGE)}
    took: Added = {f"{what}_{name}": [] for what in ("create", "stop") for name in contenders}
    try:
        for ours in contenders.values():
            await ours.open(0)
        for turn in range(-WARM, count):
            for name in sorted(contenders, reverse=turn % 2 == 0):
                created, stopped = await contenders[name].create()
                if turn >= 0:
                    took[f"create_{name}"].append(created)
                    took[f"stop_{name}"].append(stopped)
    finally:
        for ours in contenders.values():
            await ours.close()
    return took


def added_by_rules(quick: bool) -> Added:
    """Makes a node, blocks, and leaves nothing."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        rootfs = make_rootfs(folder / "rootfs")
        internet = stack.enter_context(Internet())
        config = folder / "config.toml"
        config.write_text(f"[gate]\nnameservers = {json.dumps(list(NAMESERVERS))}\n")
        stack.enter_context(internet.host.inside())
        node = stack.enter_context(Node(folder / "state", DSEC_CONFIG=str(config), DSEC_NETWORK_ENABLED="true"))
        node.dsec("image", "import", IMAGE, str(rootfs))
        return asyncio.run(_turns(node, QUICK_SAMPLES if quick else SAMPLES))


def median_added(took: Added, what: str) -> float:
    """Milliseconds that rules add: the median of the differences within each turn."""
    return statistics.median(a - b for a, b in zip(took[f"{what}_with"], took[f"{what}_without"], strict=True))
