"""Bytes from one socket to another without passing through this process's memory: splice through a pipe that is held while it carries."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Pipes", "readable", "shut", "splice", "writable"]

_PIPE_BYTES = 256 * 1024
_STEPS = 16


class Pipes:
    """Empty pipes to be used again; at most `spare` are kept."""

    def __init__(self, spare: int = 64) -> None:
        self._spare = spare
        self._kept: list[tuple[int, int]] = []

    def take(self) -> tuple[int, int]:
        if self._kept:
            return self._kept.pop()
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the host's limit on pipes is reached: 64 KiB as it comes
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return ends

    def give(self, ends: tuple[int, int], empty: bool) -> None:
        if empty and len(self._kept) < self._spare:
            self._kept.append(ends)
            return
        os.close(ends[0])
        os.close(ends[1])

    def close(self) -> None:
        while self._kept:
            for end in self._kept.pop():
                os.close(end)


async def readable(sock: socket.socket) -> None:
    """Returns when the socket has something to read, or its end."""
    loop, waiter = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop.add_reader(sock.fileno(), _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_reader(sock.fileno())


async def writable(sock: socket.socket) -> None:
    """Returns when the socket takes more."""
    loop, waiter = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop.add_writer(sock.fileno(), _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_writer(sock.fileno())


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def shut(sock: socket.socket) -> None:
    """Tells the peer that no more comes."""
    with suppress(OSError):  # it has gone already
        sock.shutdown(socket.SHUT_WR)


async def splice(source: socket.socket, sink: socket.socket, pipes: Pipes, moved: Callable[[int], None]) -> None:
    """Moves bytes until `source` ends, then passes that end on. `moved` is told of each step. Raises OSError when either side breaks."""
    steps = 0
    while True:
        ends = pipes.take()
        inside = 0
        try:
            while True:
                try:
                    inside = os.splice(
                        source.fileno(), ends[1], _PIPE_BYTES, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
                    )
                except BlockingIOError:
                    break
                if not inside:
                    shut(sink)
                    return
                while inside:
                    try:
                        gone = os.splice(ends[0], sink.fileno(), inside, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE)
                    except BlockingIOError:
                        await writable(sink)
                        continue
                    inside -= gone
                    moved(gone)
                steps += 1
                if steps % _STEPS == 0:
                    await asyncio.sleep(0)  # a fast pair leaves the others their turn
        finally:
            pipes.give(ends, not inside)
        await readable(source)
