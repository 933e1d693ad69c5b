"""`dsec project`: the tree of projects and their quota."""

from urllib.parse import quote

import click
import msgspec

from dsec.cli.ask import ask
from dsec.model.tenancy import ProjectSpec, ProjectView, Quota

__all__ = ["command"]


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


@click.group
def command() -> None:
    """Make, list and remove projects and set their quota."""


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_projects(as_json: bool) -> None:
    """Your project and those below it: used, delegated and quota of each."""
    found: list[ProjectView] = ask("GET", "/v1/projects", kind=list[ProjectView])
    if as_json:
        _print_json(found)
        return
    for project in found:
        click.echo(project.path)
        for name in ("sandboxes", "memory_mb", "cpu_milli", "disk_mb"):
            most = getattr(project.quota, name)
            used, given = getattr(project.used, name), getattr(project.delegated, name)
            click.echo(f"    {name}: {used} used, {given} delegated, of {'no bound' if most is None else most}")


@command.command
@click.argument("path")
@click.option("--sandboxes", type=int)
@click.option("--memory-mb", type=int)
@click.option("--cpu-milli", type=int, help="Thousandths of a core.")
@click.option("--disk-mb", type=int)
@click.option("--change", is_flag=True, help="Set the quota of a project that exists.")
def create(
    path: str, sandboxes: int | None, memory_mb: int | None, cpu_milli: int | None, disk_mb: int | None, change: bool
) -> None:
    """Make the project PATH, such as root/team, with a quota out of its parent's; what is not given has no bound."""
    quota = Quota(sandboxes=sandboxes, memory_mb=memory_mb, cpu_milli=cpu_milli, disk_mb=disk_mb)
    ask("PUT" if change else "POST", "/v1/projects", ProjectSpec(path=path, quota=quota))


@command.command
@click.argument("path")
def remove(path: str) -> None:
    """Remove an unused project."""
    ask("DELETE", f"/v1/projects?path={quote(path, safe='')}")
