"""A command's client: which server, for how long."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

from dsec.sdk._async.client import DSecClient

__all__ = ["client_options", "with_client"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def client_options(command: F) -> F:
    """The options of every client command."""
    command = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")(command)
    return click.option("--url", metavar="URL", help="The server; else DSEC_URL or the credentials file.")(command)


def with_client(url: str | None, work: Callable[[DSecClient], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with an open client. SIGINT, SIGTERM and SIGHUP cancel it; then exits with 128 and the signal's number."""
    caught: list[int] = []

    async def guarded() -> T:
        task = asyncio.current_task()

        def cancel(number: int) -> None:
            caught.append(number)
            if task is not None:
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, cancel, number)
        async with DSecClient(url) as client:
            return await work(client)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        sys.exit(128 + (caught[0] if caught else signal.SIGINT))
