"""The life of a node's pager: found by its socket, started when it is needed, and ended last of all.

It outlives the server, in groups of its own, since sandboxes live on without the server and read through it.
"""

import asyncio
import logging
import os
import select
import subprocess
from pathlib import Path

from dsec.images.pager import Pager
from dsec.kernel.errors import KernelError
from dsec.kernel.services import ServiceGroup, node_name
from dsec.model.errors import DeadlineExceeded, DSecError, Unavailable, Unsupported

__all__ = ["PagerProcess"]

_log = logging.getLogger("dsec.images")
_START_SECONDS = 20.0
_STOP_SECONDS = 10.0
_SOCKET_PATH_MAX = 107
_LOG_BYTES = 16 << 20


class PagerProcess:
    """The pager of the state directory `state`; `program`: its executable. `starts`: how often this process had to start it."""

    def __init__(self, state: Path, program: Path) -> None:
        self._state = state.resolve()
        self._program = program
        self._socket = self._state / "run" / "pager.sock"
        self._group = ServiceGroup(f"{node_name(state)}-pager")
        self._lock = asyncio.Lock()
        self.client = Pager(self._socket)
        self.starts = 0
        self._first: subprocess.Popen[bytes] | None = None

    async def running(self) -> bool:
        """Whether one answers, or at least lives."""
        if self._first is not None:
            self._first.poll()  # what has ended of it is no child any more
        if not await asyncio.to_thread(self._processes):
            return False
        try:
            await self.client.hello()
        except DeadlineExceeded:
            return True
        except Unavailable:
            return False
        return True

    def _processes(self) -> list[int]:
        try:
            return self._group.processes()
        except KernelError as error:
            raise Unavailable(f"nobody can say whether the pager lives: {error}") from error

    async def ensure(self) -> bool:
        """Finds the pager, or starts one; whether it had to be started. Raises Unavailable, and Unsupported where it is not built."""
        async with self._lock:
            if await self.running():
                return False
            await asyncio.to_thread(self._start)
            return True

    def _start(self) -> None:
        if not self._program.is_file():
            raise Unsupported(f"the pager is not built: {self._program} is not there; run ./dev build", feature="pager")
        if len(str(self._socket)) > _SOCKET_PATH_MAX:
            raise Unsupported(
                f"{self._socket} is too long for a socket: use a shorter state directory", feature="pager"
            )
        run = self._socket.parent
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # One that is stuck would hold the state that the next one needs.
            self._group.kill()
            self._group.wait_empty(_STOP_SECONDS)
            self._socket.unlink(missing_ok=True)
            self._launch(run)
        except (KernelError, OSError) as error:
            raise Unavailable(f"the pager cannot be started: {error}") from error
        self.starts += 1
        _log.info("started the pager")

    def _launch(self, run: Path) -> None:
        """Starts the program and waits until it listens, which it says, or ends, which closes the pipe."""
        reader, writer = os.pipe()
        words = [str(self._program), "--socket", str(self._socket), "--state", str(self._state), "--ready", str(writer)]
        log = run / "pager.log"
        if log.exists() and log.stat().st_size > _LOG_BYTES:
            log.rename(log.with_suffix(".log.1"))
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            try:
                with log.open("ab") as output:
                    begun = output.tell()
                    process = self._group.spawn(words, log=output, keep=[writer])
            finally:
                os.close(writer)
            ready, _, _ = select.select([pipe], [], [], _START_SECONDS)
            if ready and pipe.read(1):
                # It is no child to wait for: its first process may end, and another take its place.
                self._first = process
                return
        self._group.kill()
        process.wait()
        raise Unavailable(f"the pager does not start: {_end_of(log, begun) or 'it said nothing'}")

    async def end(self) -> None:
        """Ends the pager and removes its groups; any number of times. What it serves must not be mounted any more."""
        async with self._lock:
            if await asyncio.to_thread(self._processes):
                try:
                    await self.client.stop(force=True)
                except DSecError as error:
                    _log.warning("the pager is killed, as it does not stop by itself: %s", error)
            await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        try:
            if not self._group.wait_empty(_STOP_SECONDS):
                self._group.kill()
                self._group.wait_empty(_STOP_SECONDS)
            if self._first is not None:
                self._first.wait()
            self._group.remove()
            self._socket.unlink(missing_ok=True)
        except (KernelError, OSError) as error:
            raise Unavailable(f"the pager could not be ended: {error}") from error


def _end_of(log: Path, begun: int) -> str:
    with log.open("rb") as file:
        file.seek(begun)
        return file.read(4096).decode(errors="replace").strip()
