"""`dsec image commit`: an image of what a sandbox is now."""

import sys

import click

from dsec.cli.answers import answer_json, fail, shown, table
from dsec.cli.connection import client_options, with_client
from dsec.cli.shelf import size_text
from dsec.model.errors import DSecError
from dsec.model.views import CommitReport
from dsec.sdk._async.client import DSecClient

__all__ = ["commit"]


def _show(report: CommitReport) -> None:
    click.echo(f"{report.name} {report.digest}")
    seconds = sum(report.phases.values())
    text = f"{report.entries} paths, {size_text(report.bytes)}, {report.whiteouts} deletions over {len(report.layers) - 1} layers"
    click.echo(f"{text} in {seconds:.2f} s", err=True)
    rows = [("kept", each.what, str(each.entries), size_text(each.bytes)) for each in report.kept]
    rows += [("scrubbed", each.what, str(each.entries), size_text(each.bytes)) for each in report.scrubbed]
    table(("", "WHAT", "PATHS", "SIZE"), rows)
    for note in report.notes:
        click.echo(f"note: {shown(note)}", err=True)


@click.command
@client_options
@click.option(
    "--scrub", multiple=True, metavar="PATTERN", help="Leave out paths like this, and all in them; may be repeated."
)
@click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Keep paths like this, whatever is left out; may be repeated."
)
@click.option("--no-defaults", is_flag=True, help="Keep caches, /tmp and /run too.")
@click.option(
    "--timeout", type=float, default=3600.0, show_default=True, metavar="SECONDS", help="Give up after this time."
)
@click.argument("sandbox")
@click.argument("name")
def commit(
    url: str | None, as_json: bool, scrub: tuple[str, ...], keep: tuple[str, ...], no_defaults: bool, timeout: float, sandbox: str,
    name: str,
) -> None:  # fmt: skip
    """Make the image NAME of SANDBOX as it is now; it runs on.

    What it changed becomes a layer over its own. PATTERN is an absolute path with `*`, `?`, `[a-z]` and `**` (any folders). Left out are what
    the platform puts there, sockets, and, without --no-defaults, caches of apt and pip, /tmp, /var/tmp and /run.
    """

    async def work(client: DSecClient) -> CommitReport:
        box = await client.get(sandbox)
        return await box.commit(name, scrub=scrub, keep=keep, defaults=not no_defaults, timeout=timeout)

    try:
        report = with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    if as_json:
        answer_json(report)
    else:
        _show(report)
