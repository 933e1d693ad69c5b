"""The command line: one file a verb, each loaded when it is asked for, so that a client needs nothing of a node.

Each is a module dsec.cli.NAME with a click command called `command`. A client-only install has all that a client can do,
and says what to install for the rest.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from dsec.cli.answers import fail
from dsec.model.errors import DSecError

__all__ = ["CLIENT", "NODE", "main"]

# the text is its line in `dsec --help`
CLIENT = {
    "run": "start a sandbox, and run a command in it",
    "exec": "run a command in a sandbox",
    "shell": "work in a sandbox from this terminal",
    "cp": "copy files and trees to or from a sandbox",
    "ps": "list sandboxes, or the processes of one",
    "logs": "show a process's output",
    "net": "show and set the network of a sandbox, and what it tried",
    "port-forward": "carry connections from this machine to a port of a sandbox",
    "preview": "make, list and revoke links to a port of a sandbox",
    "inspect": "show all about a sandbox",
    "stop": "stop sandboxes",
}
NODE = {
    "up": "start the platform on this node",
    "down": "stop it and leave nothing behind but its state directory",
    "doctor": "say what this host can do, and why not more",
    "config": "explain the configuration",
    "key": "make, list and revoke API keys",
    "project": "make, list and remove projects and set their quota",
    "image": "import, list, tag, verify, share and remove images",
    "images": "say what was read of images",
    "cache": "show and bound what layers of stores take of the disk",
    "layer": "build and list workspace, toolkit and data layers",
    "volume": "make, list and remove shared volumes",
}


class Verbs(click.Group):
    """Loads dsec.cli.NAME when NAME is called. Errors of the platform end with their class and hint, not a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*CLIENT, *NODE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in CLIENT and cmd_name not in NODE:
            return None
        try:
            found: click.Command = importlib.import_module(f"dsec.cli.{cmd_name.replace('-', '_')}").command
        except ImportError as error:
            return _absent(cmd_name, error.name or str(error))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in (("Sandboxes", CLIENT), ("On the node", NODE)):
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DSecError as error:
            ctx.exit(fail(error))


def _absent(name: str, missing: str) -> click.Command:
    """A command that says by name what it lacks."""
    if missing == f"dsec.cli.{name}":
        reason = "is not part of this version"
    elif missing == "dsec" or missing.startswith("dsec."):
        reason = (
            f"needs the native parts of a node ({missing} is missing): build them with `./dev build` in the source tree"
        )
    else:
        reason = f"needs the parts of a node ({missing} is missing): pip install 'dsec[node]'"

    @click.command(name, context_settings={"ignore_unknown_options": True}, add_help_option=False)
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    def absent(rest: tuple[str, ...]) -> None:
        click.echo(f"dsec: `dsec {name}` {reason}", err=True)
        sys.exit(1)

    return absent


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsec", prog_name="dsec")
def _verbs() -> None:
    """Sandboxes for training and evaluating language-model agents.

    The server is named by DSEC_URL and DSEC_API_KEY, or the credentials file that `dsec up` writes. Answers go to stdout,
    messages to stderr; --json makes an answer JSON.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """The `dsec` command."""
    _verbs.main(args=None if argv is None else list(argv), prog_name="dsec")
