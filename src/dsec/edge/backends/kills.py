"""Out-of-memory kills as the kernel tells of them: one descriptor a sandbox, all behind one that the event loop watches."""

import asyncio
import os
import select
from contextlib import suppress

from dsec.kernel.cgroup import Cgroups
from dsec.kernel.errors import KernelError, kernel_op
from dsec.ports.backend import TellKills
from dsec.ports.clock import Clock

__all__ = ["Kills"]

_SETTLE = 0.05
"""v1 tells that it is about to kill; no event follows the kill."""
_PACE = 1.0
"""A sandbox that meets its limit again and again is told of this often."""


class _Watched:
    __slots__ = ("fd", "looked", "name", "since", "tell")

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.tell: TellKills | None = None
        self.since: float | None = None
        self.looked = float("-inf")


class Kills:
    """`groups` counts. `watch` and `forget` may be called in any thread, all else in the event loop."""

    def __init__(self, groups: Cgroups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        self._epoll: select.epoll | None = None
        self._by_fd: dict[int, _Watched] = {}
        self._by_name: dict[str, _Watched] = {}

    def open(self) -> None:
        """Begins to listen, in the loop that runs. Raises KernelError."""
        with kernel_op("epoll_create"):
            self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._ready)

    def close(self) -> None:
        """Lets go of all of them; the kernel counts on."""
        if self._epoll is None:
            return
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        for name in tuple(self._by_name):
            self.forget(name)
        self._epoll.close()
        self._epoll = None

    def watch(self, name: str) -> None:
        """From now on kills in the sandbox are told of. Raises KernelError."""
        if self._epoll is None or name in self._by_name:
            return
        fd, events = self._groups.kill_watch(name)
        self._by_name[name] = self._by_fd[fd] = _Watched(name, fd)
        try:
            with kernel_op("epoll_ctl", name):
                self._epoll.register(fd, events)
        except KernelError:
            self.forget(name)
            raise

    def forget(self, name: str) -> None:
        """Nothing is told of it any more; done where it is not watched."""
        watched = self._by_name.pop(name, None)
        if watched is not None:
            del self._by_fd[watched.fd]
            watched.tell = None
            os.close(watched.fd)

    def tell(self, name: str, tell: TellKills) -> None:
        """`tell` is called in the loop with the kills there were in all, and when the last of them came (monotonic seconds)."""
        watched = self._by_name.get(name)
        if watched is not None:
            watched.tell = tell

    def last(self, name: str) -> None:
        """Tells what there is before its groups go, and forgets it."""
        watched = self._by_name.get(name)
        if watched is not None:
            self._look(watched)
        self.forget(name)

    def _ready(self) -> None:
        if self._epoll is None:
            return
        now, loop = self._clock.monotonic(), asyncio.get_running_loop()
        for fd, _ in self._epoll.poll(0):
            watched = self._by_fd.get(fd)
            if watched is None:
                continue
            if watched.since is None:
                watched.since = now
                loop.call_later(_SETTLE if now - watched.looked > _PACE else _PACE, self._look, watched)

    def _look(self, watched: _Watched) -> None:
        at, watched.since = watched.since, None
        tell = watched.tell
        if tell is None:
            return
        watched.looked = self._clock.monotonic()
        with suppress(KernelError):  # its groups went meanwhile, with what they counted
            tell(self._groups.oom_kills(watched.name), watched.looked if at is None else at)
