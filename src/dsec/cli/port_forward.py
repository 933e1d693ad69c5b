"""dsec port-forward."""

import asyncio
import sys
from contextlib import suppress

import click

from dsec.cli.answers import fail, say
from dsec.cli.connection import client_options, with_client
from dsec.model.errors import DSecError
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.sandbox import Sandbox
from dsec.sdk._async.tunnel import Tunnel

__all__ = ["command"]

_PIECE = 1 << 16
_LINGER_SECONDS = 2.0
_CONNECTIONS = 64


def _ports(text: str) -> tuple[int, int]:
    local, sign, port = text.rpartition(":")
    numbers = [port, local if sign else port]
    if not all(part.isascii() and part.isdecimal() and 0 <= int(part) < 65536 for part in numbers) or int(port) == 0:
        raise click.BadParameter(f"{text!r} is not PORT or LOCAL:PORT", param_hint="PORT")
    return int(numbers[1]), int(port)


async def _outward(tunnel: Tunnel, writer: asyncio.StreamWriter) -> None:
    while data := await tunnel.read():
        writer.write(data)
        await writer.drain()


async def _inward(reader: asyncio.StreamReader, tunnel: Tunnel) -> None:
    while data := await reader.read(_PIECE):
        await tunnel.write(data)


async def _carry(box: Sandbox, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with await box.tunnel(port) as tunnel, asyncio.TaskGroup() as group:
            tasks = [group.create_task(_outward(tunnel, writer)), group.create_task(_inward(reader, tunnel))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Who has said all may still wait for the answer; a tunnel cannot say that no more comes.
            if not tasks[0].done():
                await asyncio.wait(tasks[:1], timeout=_LINGER_SECONDS)
            for task in tasks:
                task.cancel()
    except* (DSecError, OSError) as errors:
        say(f"port {port}: {errors.exceptions[0]}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@click.command("port-forward")
@client_options
@click.argument("sandbox")
@click.argument("port", metavar="[LOCAL:]PORT")
def command(url: str | None, as_json: bool, sandbox: str, port: str) -> None:
    """Listen on this machine's loopback at LOCAL (0: a free port) and carry every connection to PORT in SANDBOX, until interrupted.

    Nothing listens on the node for it: connections go through the API, with this client's key. At most 64 at once.
    """
    local, inside = _ports(port)
    turns = asyncio.Semaphore(_CONNECTIONS)

    async def work(client: DSecClient) -> None:
        box = await client.get(sandbox)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with turns:
                await _carry(box, inside, reader, writer)

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # In a group of ours: an interrupt then ends connections without a word from the server's own tasks.
            group.create_task(carry(reader, writer))

        async with asyncio.TaskGroup() as group, await asyncio.start_server(connected, "127.0.0.1", local) as server:
            number = server.sockets[0].getsockname()[1]
            click.echo(f"127.0.0.1:{number} -> {sandbox}:{inside}")
            await server.serve_forever()

    try:
        with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    except OSError as error:
        say(f"cannot listen on 127.0.0.1:{local}: {error.strerror or error}")
        sys.exit(1)
