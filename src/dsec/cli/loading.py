"""What the commands about loaded layers share: a node's parts, its live layers, and work that may need its pager."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from dsec.config import Config, load
from dsec.edge.journal import layer_users
from dsec.images.mounts import mounted_below
from dsec.kernel.clock import SystemClock
from dsec.wiring import Loading, loading

__all__ = ["live_layers", "with_loading"]

_T = TypeVar("_T")


def live_layers(state: Path) -> frozenset[str]:
    """Digests of layers that a sandbox has by the node's journal, or that are mounted as data somewhere in it."""
    return frozenset(layer_users(state / "journal.db"))


def with_loading(state: str | None, work: Callable[[Loading, Config], Coroutine[Any, Any, _T]]) -> _T:
    """Runs `work` with the parts of a node's state directory. A pager that it had to start ends with it, if nothing is mounted."""
    config = load({"node.state": state}).config

    async def run() -> _T:
        parts = loading(config, SystemClock())
        try:
            return await work(parts, config)
        finally:
            if parts.process.starts and not mounted_below(config.state.resolve() / "mnt"):
                await parts.process.end()

    return asyncio.run(run())
