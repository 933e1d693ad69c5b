"""dsec cp."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dsec.cli.answers import answer_json, fail, say, shown
from dsec.cli.connection import client_options, with_client
from dsec.cli.terminal import is_terminal
from dsec.model.errors import DSecError, InvalidArgument, NotFound
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.sandbox import Sandbox
from dsec.sdk.records import Transfer

__all__ = ["command", "place", "remote"]

_REMOTE = re.compile(r"([a-z0-9]{8,50}):(.*)", re.DOTALL)


def remote(text: str) -> tuple[str, str] | None:
    """(sandbox, path) of "ID:PATH"; None for a local path. "./ID:PATH" is local."""
    found = _REMOTE.fullmatch(text)
    return (found[1], found[2] or ".") if found else None


def place(source: str, target: str, target_is_directory: bool, source_is_directory: bool) -> str:
    """Where a copy goes: into a directory that is there, under the source's name; else to the target itself. "DIR/." copies
    what DIR holds; a target ending in "/" must be a directory for a file."""
    if source_is_directory and (source.endswith("/.") or source == "."):
        return target
    if target_is_directory:
        name = os.path.basename(source.rstrip("/")) or ""
        return os.path.join(target, name) if name not in ("", ".", "..") else target
    if target.endswith("/") and not source_is_directory:
        raise InvalidArgument(f"{target}: no such directory", field="target")
    return target.rstrip("/") or "/"


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; else nothing."""
    if not is_terminal(2):
        yield lambda _size: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(shown(label)[-40:], total=None)
        yield lambda size: bar.advance(task, size)


async def _is_directory(box: Sandbox, path: str, user: str | None) -> bool:
    try:
        return (await box.files.stat(path, user=user)).kind == "dir"
    except NotFound:
        return False


async def _upload(box: Sandbox, source: str, target: str, user: str | None) -> Transfer:
    into = await _is_directory(box, target, user)
    final = place(source, target, into, await asyncio.to_thread(os.path.isdir, source))
    with _progress(source) as advance:
        return await box.files.upload(source, final, user=user, progress=advance)


async def _download(box: Sandbox, source: str, target: str, user: str | None) -> Transfer:
    from_directory = (await box.files.stat(source, user=user)).kind == "dir"
    final = place(source, target, await asyncio.to_thread(os.path.isdir, target), from_directory)
    with _progress(source) as advance:
        return await box.files.download(source, final, user=user, progress=advance)


@click.command("cp")
@client_options
@click.option("--user", metavar="USER[:GROUP]", help="Read and write in the sandbox as this user; else the sandbox's.")
@click.argument("source")
@click.argument("target")
def command(url: str | None, as_json: bool, user: str | None, source: str, target: str) -> None:
    """Copy a file or a whole tree: SOURCE or TARGET is ID:PATH in a sandbox, the other a local path.

    A tree or file goes into a TARGET that is a directory, under its own name; SOURCE/. copies what SOURCE holds. What comes
    out of a sandbox stays below TARGET: entries that would lead elsewhere are left out and named, and the exit status is 1.
    """
    there, back = remote(target), remote(source)
    if (there is None) == (back is None):
        raise click.UsageError("one of SOURCE and TARGET is ID:PATH, and the other is local")

    async def work(client: DSecClient) -> Transfer:
        if there is not None:
            return await _upload(await client.get(there[0]), source, there[1], user)
        sandbox_id, path = back or ("", "")
        return await _download(await client.get(sandbox_id), path, target, user)

    try:
        done = with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    for refusal in done.refused:
        say(f"left out {shown(refusal.path)}: {refusal.reason}")
    if as_json:
        refused = [{"path": shown(refusal.path), "reason": refusal.reason} for refusal in done.refused]
        answer_json({"entries": done.entries, "size": done.size, "refused": refused})
    sys.exit(1 if done.refused else 0)
