"""The paths by which layers of stores can be read on this host, found out by trying."""

import asyncio
import os

from dsec.images.pagerprocess import PagerProcess
from dsec.model.errors import DSecError
from dsec.model.loading import Ladder, LoadPath, Way

__all__ = ["HostLadder"]

_FUSE = "/dev/fuse"


class HostLadder:
    """Asks the node's pager, which it starts where needed, what its kernel let it open; once."""

    def __init__(self, process: PagerProcess) -> None:
        self._process = process
        self._found: Ladder | None = None
        self._lock = asyncio.Lock()

    async def find(self) -> Ladder:
        """The paths, as when they were first asked for; those of the pager are asked for again after a failure."""
        async with self._lock:
            if self._found is not None:
                return self._found
            always = (Way(path=LoadPath.SHARED, ok=True), Way(path=LoadPath.WHOLE, ok=True))
            try:
                await self._process.ensure()
                mechanisms = (await self._process.client.hello()).mechanisms
            except DSecError as error:
                why = f"no pager: {error.detail}"
                lacking = (Way(path=path, ok=False, why=why) for path in (LoadPath.FANOTIFY, LoadPath.FUSE))
                return Ladder(ways=(*lacking, *always))
            self._found = Ladder(ways=(_fanotify(mechanisms), await asyncio.to_thread(_fuse), *always))
            return self._found


def _fanotify(mechanisms: tuple[str, ...]) -> Way:
    ok = LoadPath.FANOTIFY in mechanisms
    return Way(path=LoadPath.FANOTIFY, ok=ok, why="" if ok else "this kernel has no pre-content events (Linux 6.14)")


def _fuse() -> Way:
    try:
        os.close(os.open(_FUSE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Way(path=LoadPath.FUSE, ok=False, why=f"{_FUSE}: {error.strerror}")
    return Way(path=LoadPath.FUSE, ok=True)
