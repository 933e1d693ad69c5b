"""dsec logs."""

import base64
import os
import sys
from contextlib import aclosing

import click
import msgspec

from dsec.cli.answers import fail, say
from dsec.cli.connection import client_options, with_client
from dsec.model.errors import DSecError
from dsec.model.views import ProcessView
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.process import Process
from dsec.sdk.records import Output

__all__ = ["command"]


def _show(piece: Output, as_json: bool) -> None:
    if as_json:
        record = {
            "stream": piece.stream,
            "offset": piece.offset,
            "lost": piece.lost,
            "text": piece.data.decode("utf-8", "replace"),
            "base64": base64.b64encode(piece.data).decode(),
        }
        os.write(1, msgspec.json.encode(record) + b"\n")
        return
    if piece.lost:
        say(f"{piece.lost} bytes of {piece.stream} are not kept any more")
    view = memoryview(piece.data)
    while view:
        view = view[os.write(2 if piece.stream == "stderr" else 1, view) :]


async def _until_now(process: Process, now: ProcessView, start: int, as_json: bool) -> None:
    """Show what has come until `now`; output that comes meanwhile may be shown too."""
    left = {"stdout": max(now.stdout_bytes_total - start, 0), "stderr": now.stderr_bytes_total}
    if not any(left.values()):
        return
    async with aclosing(process.stream()) as pieces:
        async for piece in pieces:
            _show(piece, as_json)
            left[piece.stream] -= len(piece.data) + piece.lost
            if all(count <= 0 for count in left.values()):
                return


@click.command("logs")
@client_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the process ends.")
@click.option(
    "--from", "start", type=click.IntRange(min=0), default=0, metavar="BYTE", help="Begin stdout at this byte."
)
@click.argument("sandbox")
@click.argument("process")
def command(url: str | None, as_json: bool, follow: bool, start: int, sandbox: str, process: str) -> None:
    """Show the output of PROCESS, which was started in SANDBOX, as far as it is kept. `dsec ps SANDBOX` lists them.

    With --json each piece is one line: its stream, offset, bytes lost before it, text, and base64.
    """

    async def work(client: DSecClient) -> None:
        found = await (await client.get(sandbox)).attach(process, from_offset=start)
        if not follow:
            await _until_now(found, found.view, start, as_json)
            return
        async with aclosing(found.stream()) as pieces:
            async for piece in pieces:
                _show(piece, as_json)

    try:
        with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    except BrokenPipeError:
        sys.exit(141)
