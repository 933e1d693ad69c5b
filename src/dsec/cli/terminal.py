"""A process of a sandbox on the local terminal or pipes."""

import asyncio
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

from dsec.cli.answers import say
from dsec.model.errors import DSecError
from dsec.model.views import ProcessView, PtySize
from dsec.sdk._async.process import Process

__all__ = ["carry", "is_terminal", "raw", "terminal_size"]

_PIECE = 1 << 16


def is_terminal(descriptor: int) -> bool:
    """Whether the descriptor is open and a terminal."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def terminal_size() -> PtySize:
    """The local terminal's size; 80 by 24 where there is none."""
    for descriptor in (1, 0, 2):
        try:
            columns, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if columns and rows:
            return PtySize(min(columns, 1000), min(rows, 1000))
    return PtySize()


@contextmanager
def raw(descriptor: int) -> Iterator[None]:
    """The terminal in raw mode, put back at the end whatever happens."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _put(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


async def carry(process: Process, *, stdin: bool, pty: bool) -> ProcessView:
    """Copy the process's output here, and our stdin and the terminal's size there, until it ends. Answers how it ended.

    Cancelled: leaves the process as it is. Raises the errors of the stream, and BrokenPipeError where our stdout is closed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(_send_input(process))] if stdin else []
            if pty:
                helpers.append(group.create_task(_send_sizes(process)))
            try:
                await _show_output(process)
            finally:
                for helper in helpers:
                    helper.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return process.view


async def _show_output(process: Process) -> None:
    async with aclosing(process.stream()) as pieces:
        async for piece in pieces:
            if piece.lost:
                say(f"{piece.lost} bytes of {piece.stream} are not kept any more")
            _put(2 if piece.stream == "stderr" else 1, piece.data)


async def _send_input(process: Process) -> None:
    """Send our stdin until its end. A thread reads it, one piece ahead: files and terminals cannot be polled alike, and
    being a daemon it does not keep this program alive in a read that never ends."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(1)

    def read() -> None:
        while True:
            try:
                data = os.read(0, _PIECE)
            except OSError:
                data = b""
            try:
                asyncio.run_coroutine_threadsafe(pieces.put(data), loop).result()
            except (RuntimeError, asyncio.CancelledError):
                return  # the loop has ended
            if not data:
                return

    threading.Thread(target=read, name="dsec-stdin", daemon=True).start()
    try:
        while data := await pieces.get():
            await process.write(data)
        await process.close_stdin()
    except DSecError as error:
        # the reader of the stream says what became of the process
        print(f"dsec: input stopped: {error}", file=sys.stderr)


async def _send_sizes(process: Process) -> None:
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while True:
            await changed.wait()
            changed.clear()
            size = terminal_size()
            await process.resize(size.cols, size.rows)
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
