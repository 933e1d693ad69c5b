"""dsec inspect."""

import sys

import click

from dsec.cli.answers import answer_json, fail
from dsec.cli.connection import client_options, with_client
from dsec.model.errors import DSecError
from dsec.model.views import SandboxState
from dsec.sdk._async.client import DSecClient

__all__ = ["command"]


@click.command("inspect")
@client_options
@click.option("--events", is_flag=True, help="Its story too: transitions and operations.")
@click.argument("sandbox", nargs=-1, required=True)
def command(url: str | None, as_json: bool, events: bool, sandbox: tuple[str, ...]) -> None:
    """Show all that is known of each SANDBOX, as a JSON list: what was asked for, its state, phases, deadlines and end, and
    what it uses while it runs."""

    async def work(client: DSecClient) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for sandbox_id in sandbox:
            box = await client.get(sandbox_id)
            running = box.view.state is SandboxState.RUNNING
            record: dict[str, object] = {"sandbox": box.view, "usage": await box.metrics() if running else None}
            record["processes"] = await box.processes() if running else []
            if events:
                record["events"] = await box.events()
            found.append(record)
        return found

    try:
        answer_json(with_client(url, work))
    except DSecError as error:
        sys.exit(fail(error, as_json))
