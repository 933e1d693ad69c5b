"""Gives back the quota of sandboxes that ended by themselves: what IAM holds, less what the edges say lives."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dsec.model.errors import DSecError
from dsec.model.ids import decode_sandbox_id
from dsec.ports.cluster import Edge, Iam

__all__ = ["Settlement"]

_log = logging.getLogger("dsec.apiserver")


class Settlement:
    """Compares IAM's reservations with the edges' sandboxes. An edge that does not answer keeps its reservations."""

    def __init__(self, iam: Iam, edges: Mapping[int, Edge], id_key: bytes) -> None:
        self._iam = iam
        self._edges = edges
        self._id_key = id_key
        self._creating: set[str] = set()

    @contextmanager
    def creating(self, sandbox_id: str) -> Iterator[None]:
        """While the context lasts, the id's reservation stays although no edge may know it yet."""
        self._creating.add(sandbox_id)
        try:
            yield
        finally:
            self._creating.discard(sandbox_id)

    async def settle(self) -> int:
        """Release what nobody uses any more; how many that were."""
        # Taken before the edges are asked: what is created meanwhile is not in it, so it cannot be released by mistake.
        held = self._iam.held() - self._creating
        live: set[str] = set()
        silent: set[int] = set()
        for number, edge in self._edges.items():
            try:
                live |= await edge.live()
            except (DSecError, OSError) as error:
                _log.warning("edge %d does not say what lives: %s", number, error)
                silent.add(number)
        ended = [name for name in held - live if decode_sandbox_id(name, self._id_key).edge not in silent]
        for name in ended:
            await self._iam.release(name)
        return len(ended)

    async def run(self, interval: float) -> None:
        """Settle for ever, every `interval` seconds."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.settle()
            except Exception:  # noqa: BLE001 - one round's failure must not end the service
                _log.exception("quota could not be settled; it is tried again in %g s", interval)
