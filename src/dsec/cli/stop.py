"""dsec stop."""

import asyncio
import sys

import click

from dsec.cli.answers import answer_json, describe, fail, pairs, say
from dsec.cli.connection import client_options, with_client
from dsec.model.errors import DSecError
from dsec.model.views import SandboxState
from dsec.sdk._async.client import DSecClient

__all__ = ["command"]

_AT_ONCE = 16


async def _stop_each(client: DSecClient, ids: list[str]) -> tuple[list[str], dict[str, DSecError]]:
    stopped: list[str] = []
    failed: dict[str, DSecError] = {}
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(sandbox_id: str) -> None:
        async with turn:
            try:
                await (await client.get(sandbox_id)).stop()
                stopped.append(sandbox_id)
            except DSecError as error:
                failed[sandbox_id] = error

    async with asyncio.TaskGroup() as group:
        for sandbox_id in ids:
            group.create_task(one(sandbox_id))
    return stopped, failed


@click.command("stop")
@client_options
@click.option("--job", help="Stop all sandboxes of this job.")
@click.option(
    "--label", multiple=True, metavar="NAME=VALUE", help="Stop all with this label; repeated: with all of them."
)
@click.option("--all", "every", is_flag=True, help="Stop all sandboxes of the key's project.")
@click.argument("sandbox", nargs=-1)
def command(
    url: str | None, as_json: bool, job: str | None, label: tuple[str, ...], every: bool, sandbox: tuple[str, ...]
) -> None:
    """Stop sandboxes and all they hold: each SANDBOX, or those of --job or --label, or --all. One that has ended already
    is well. Prints the ids of those stopped; exit status 1 where one could not be stopped."""
    labels = pairs(label, "--label")
    if sum([bool(sandbox), bool(job or labels), every]) != 1:
        raise click.UsageError("give ids, or --job and --label, or --all")

    async def work(client: DSecClient) -> tuple[list[str], dict[str, DSecError]]:
        if job or labels:
            return await client.stop_many(job=job, labels=labels), {}
        ids = list(sandbox)
        if every:
            ids = [box.id for box in await client.sandboxes() if box.view.state is not SandboxState.GONE]
        return await _stop_each(client, ids)

    try:
        stopped, failed = with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    for sandbox_id, reason in failed.items():
        say(f"{sandbox_id}: {type(reason).__name__}: {reason}")
    if as_json:
        answer_json({"stopped": stopped, "failed": {name: describe(reason) for name, reason in failed.items()}})
    else:
        for sandbox_id in stopped:
            click.echo(sandbox_id)
    sys.exit(1 if failed else 0)
