"""dsec shell."""

import sys

import click

from dsec.cli.answers import answer_json, ending, exit_status, fail, pairs
from dsec.cli.connection import client_options, with_client
from dsec.cli.exec import Command, run_attached
from dsec.cli.terminal import is_terminal
from dsec.model.errors import DSecError
from dsec.model.views import ProcessView
from dsec.sdk._async.client import DSecClient

__all__ = ["command"]

_ANY_SHELL = ("/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -l; fi; exec /bin/sh -l")


@click.command("shell")
@client_options
@click.option("--shell", metavar="PATH", help="The shell; else /bin/bash, else /bin/sh.")
@click.option("--user", metavar="USER[:GROUP]", help="Run as this user; else the sandbox's.")
@click.option("--cwd", metavar="DIR", help="Begin in this directory; else the sandbox's.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="Lay a variable over the sandbox's environment.")
@click.argument("sandbox")
def command(
    url: str | None,
    as_json: bool,
    shell: str | None,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    sandbox: str,
) -> None:
    """Open a shell in SANDBOX on this terminal; it ends with all it started when you leave it. Exit status as in exec."""
    if not is_terminal(0) or not is_terminal(1):
        raise click.UsageError("a shell needs a terminal; `dsec exec -i SANDBOX sh` takes a pipe")
    argv = (shell, "-l") if shell else _ANY_SHELL
    order = Command(argv, interactive=True, tty=True, user=user, cwd=cwd, env=pairs(env, "--env"))

    async def work(client: DSecClient) -> ProcessView:
        return await run_attached(await client.get(sandbox), order)

    try:
        view = with_client(url, work)
    except DSecError as error:
        sys.exit(fail(error, as_json, of_command=True))
    if as_json:
        answer_json(view)
    ending(view.outcome, view.signal)
    sys.exit(exit_status(view.outcome, view.exit_code, view.signal))
