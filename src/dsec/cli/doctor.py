"""`dsec doctor`: what this host offers for each mechanism, which way is used, and why not a better one."""

import tempfile
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from dsec.cli.trial import image_paths
from dsec.config import load
from dsec.kernel.probe import Doctor, Mechanism, examine

__all__ = ["command"]


@click.command
@click.option("--state", help="State directory whose filesystem is tried; a temporary one if it is not there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, state: str | None, as_json: bool) -> None:
    """Try what sandboxes need on this host. Ends with status 1 where no sandbox can run here."""
    config = load({"node.state": state}).config
    scratch = config.state if config.state.is_dir() else Path(tempfile.gettempdir())
    found = examine(scratch)
    if found.ok:
        found = replace(found, mechanisms=(*found.mechanisms, image_paths(config, scratch)))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _print(found)
    ctx.exit(0 if found.ok else 1)


def _print(found: Doctor) -> None:
    for mechanism in found.mechanisms:
        _print_mechanism(mechanism)
    click.echo()
    for backend, reason in found.backends.items():
        click.echo(f"{'no ' if reason else 'yes'}  backend {backend}{': ' + reason if reason else ''}")
    click.echo()
    click.echo("sandboxes can run here" if found.ok else "sandboxes cannot run here")


def _print_mechanism(mechanism: Mechanism) -> None:
    mark = "ok " if mechanism.using else ("NO " if mechanism.needed else "-  ")
    click.echo(f"{mark} {mechanism.name}: {mechanism.using or 'none'}")
    for rung in mechanism.rungs:
        used = "uses" if rung.name == mechanism.using else ("can " if rung.ok else "not ")
        click.echo(f"      {used} {rung.name}{': ' + rung.why if rung.why else ''}")
    if mechanism.advice and mechanism.using is None:
        click.echo(f"      try: {mechanism.advice}")
