"""`dsec config`: what is set, by whom, and what it means."""

import json
from dataclasses import asdict

import click

from dsec.config import load, reference

__all__ = ["command"]


@click.group
def command() -> None:
    """Explain the configuration."""


@command.command
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("names", nargs=-1)
def explain(as_json: bool, names: tuple[str, ...]) -> None:
    """Value, origin, default and meaning of each setting; of those whose name begins with one of NAMES."""
    rows = [row for row in load().explain() if not names or row.name.startswith(names)]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        click.echo(f"{row.name} = {json.dumps(row.value)}")
        changed = f" (default {json.dumps(row.default)})" if row.value != row.default else ""
        click.echo(f"    from {row.origin}{changed}; variable {row.variable}\n    {row.meaning}")


@command.command(name="reference")
def print_reference() -> None:
    """Print docs/configuration.md."""
    click.echo(reference(), nl=False)
