"""dsec preview."""

import sys

import click

from dsec.cli.answers import answer_json, fail
from dsec.cli.connection import client_options, with_client
from dsec.model.errors import DSecError
from dsec.model.views import PreviewView
from dsec.sdk._async.client import DSecClient

__all__ = ["command"]


@click.command("preview")
@client_options
@click.option(
    "--for",
    "seconds",
    type=float,
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the link lasts.",
)
@click.option("--revoke", metavar="ID", help="End this link of the sandbox, at once.")
@click.argument("sandbox")
@click.argument("port", type=int, required=False)
def command(url: str | None, as_json: bool, seconds: float, revoke: str | None, sandbox: str, port: int | None) -> None:
    """Make a link to PORT in SANDBOX, for whoever has it; without PORT list the links that there are."""
    if revoke is not None and port is not None:
        raise click.UsageError("--revoke takes no PORT")

    async def work(client: DSecClient) -> list[PreviewView]:
        box = await client.get(sandbox)
        if revoke is not None:
            await box.revoke_preview(revoke)
            return []
        return [await box.preview(port, seconds=seconds)] if port is not None else await box.previews()

    try:
        found = with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    if as_json:
        answer_json(found)
        return
    for each in found:
        click.echo(f"{each.url} port={each.port} id={each.id}")
