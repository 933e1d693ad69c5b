"""The command line: one file a verb, each loaded when it is asked for, so that a client needs nothing of a node."""

import importlib
from collections.abc import Sequence
from typing import Any

import click

from dsec.model.errors import DSecError

__all__ = ["EXIT_PLATFORM", "main"]

# Exit status where the platform, not the command, failed: docker's.
EXIT_PLATFORM = 125

# Each is a module dsec.cli.NAME with a click command called `command`; the text is its line in `dsec --help`.
CLIENT = {
    "run": "start a sandbox, run a command in it, stop it",
    "exec": "run a command in a sandbox",
    "shell": "work in a sandbox from this terminal",
    "cp": "copy files to or from a sandbox",
    "ps": "list sandboxes",
    "logs": "show a process's output",
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
    "image": "import, list, tag, verify and remove images",
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
        found: click.Command = importlib.import_module(f"dsec.cli.{cmd_name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in (("Sandboxes", CLIENT), ("On the node", NODE)):
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DSecError as error:
            click.echo(f"dsec: {error.code}: {error.detail or error.sentence}", err=True)
            if error.hint:
                click.echo(f"dsec: {error.hint}", err=True)
            ctx.exit(EXIT_PLATFORM if error.is_infra_error else 1)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsec", prog_name="dsec")
def _verbs() -> None:
    """Sandboxes for training and evaluating language-model agents."""


def main(argv: Sequence[str] | None = None) -> None:
    """The `dsec` command."""
    _verbs.main(args=None if argv is None else list(argv), prog_name="dsec")
