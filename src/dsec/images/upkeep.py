"""What is done about loaded layers now and then: the pager is looked after, what it counts is read, and the cache is kept bounded."""

import asyncio
import logging

from dsec.images.cache import Cache
from dsec.images.mounts import NodeImages
from dsec.images.settings import ImagesSettings
from dsec.model.errors import DSecError
from dsec.ports.clock import Clock

__all__ = ["Upkeep"]

_log = logging.getLogger("dsec.images")
_LOOK_SECONDS = 1.0


class Upkeep:
    """`run` goes on until it is cancelled. `evicted_bytes`: what came free so far;"""

    def __init__(self, images: NodeImages, cache: Cache, settings: ImagesSettings, clock: Clock) -> None:
        self._images = images
        self._cache = cache
        self._settings = settings
        self._clock = clock
        self.evicted_bytes = 0

    async def run(self) -> None:
        """A look a second; one at the cache every `cache_interval`."""
        next_trim = self._clock.monotonic() + self._settings.cache_interval
        while True:
            try:
                await self._images.look()
                if self._clock.monotonic() >= next_trim:
                    next_trim = self._clock.monotonic() + self._settings.cache_interval
                    await self.trim()
            except (DSecError, OSError) as error:
                _log.error("loaded layers could not be looked after: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def trim(self) -> None:
        """Evicts what the marks ask for."""
        done = await self._cache.trim(self._images.held())
        self.evicted_bytes += done.freed_bytes
        if done.evicted or done.forgotten:
            _log.info(
                "evicted the chunks of %d layers and forgot %d: %d bytes",
                len(done.evicted), len(done.forgotten), done.freed_bytes,
            )  # fmt: skip
