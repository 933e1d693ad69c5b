"""Network namespaces of a test's own: each with a thread in it that runs an event loop, so that sockets made there are its.

Nothing is named: a namespace lives as long as its descriptor and what was started in it. Needs root.
"""

import asyncio
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["Netns", "NetnsFailed", "entered"]

_T = TypeVar("_T")
_CLONE_NEWNET = 0x40000000
_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


class NetnsFailed(Exception):
    """The kernel or `ip` refused something; says what it printed."""


def _check(result: int, what: str) -> None:
    if result != 0:
        raise NetnsFailed(f"{what}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def entered(fd: int) -> Iterator[None]:
    """The calling thread is in the network namespace `fd` meanwhile: sockets it makes and processes it starts are there."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, _CLONE_NEWNET), "setns")
        try:
            yield
        finally:
            _check(_libc.setns(before, _CLONE_NEWNET), "setns back")
    finally:
        os.close(before)


class Netns:
    """A new network namespace with loopback up; a context manager. `name` is for messages and its thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fd = -1
        self.loop = asyncio.new_event_loop()
        self._ready: Future[int] = Future()
        self._thread = threading.Thread(target=self._live, name=f"netns-{name}", daemon=True)

    def __enter__(self) -> "Netns":
        self._thread.start()
        self.fd = self._ready.result(timeout=_SECONDS)
        self.ip("link set lo up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_SECONDS)
        os.close(self.fd)
        self.fd = -1

    @property
    def path(self) -> str:
        """A path by which other programs may open the namespace."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def inside(self) -> AbstractContextManager[None]:
        """The calling thread is in this namespace within the context; so are the processes it starts."""
        return entered(self.fd)

    def ip(self, *commands: str) -> None:
        """Runs `ip` commands (without the word itself) in this namespace. Raises NetnsFailed."""
        with self.inside():
            done = subprocess.run(
                ["ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, check=False, timeout=_SECONDS
            )  # fmt: skip
        if done.returncode != 0:
            raise NetnsFailed(f"{self.name}: ip {'; '.join(commands)}: {done.stderr.strip()}")

    def sysctl(self, name: str, value: str) -> None:
        """Sets `net.NAME` of this namespace, such as ipv4.ip_forward."""
        with self.inside(), open(f"/proc/sys/net/{name.replace('.', '/')}", "w") as file:
            file.write(value)

    def call(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in this namespace, in a thread of its own. For what blocks."""
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                with self.inside():
                    answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                answer.set_exception(error)

        thread = threading.Thread(target=run, name=f"in-{self.name}", daemon=True)
        thread.start()
        try:
            return answer.result(timeout=_SECONDS)
        finally:
            thread.join(timeout=_SECONDS)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine on this namespace's loop and answers what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=_SECONDS)

    def _live(self) -> None:
        try:
            # A thread's own namespace: the thread ends with it, so nothing goes back.
            _check(_libc.unshare(_CLONE_NEWNET), "unshare")
            self._ready.set_result(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except (NetnsFailed, OSError) as error:
            self._ready.set_exception(error)
            return
        try:
            self.loop.run_forever()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
