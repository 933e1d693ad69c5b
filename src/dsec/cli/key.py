"""`dsec key`: keys, and the principals that they are for."""

import click
import msgspec

from dsec.cli.ask import ask
from dsec.model.tenancy import KeyCreated, KeySpec, KeyView, PrincipalSpec, PrincipalView

__all__ = ["command"]

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


@click.group
def command() -> None:
    """Make, list and revoke API keys."""


@command.command
@click.option("--principal", help="For whom; yourself if not given.")
@click.option(
    "--permission", "permissions", multiple=True, help="Only this, repeatable; all of the principal's if not given."
)
@click.option("--ttl", type=float, help="Seconds until it ends by itself.")
@click.option("--note", default="", help="What it is for.")
@_json
def create(principal: str | None, permissions: tuple[str, ...], ttl: float | None, note: str, as_json: bool) -> None:
    """Make a key and print its text, this once."""
    spec = KeySpec(principal=principal, permissions=permissions or None, ttl=ttl, note=note)
    made: KeyCreated = ask("POST", "/v1/keys", spec, KeyCreated)
    if as_json:
        _print_json(made)
    else:
        click.echo(made.text)


@command.command(name="list")
@_json
def list_keys(as_json: bool) -> None:
    """List keys, without their secrets."""
    found: list[KeyView] = ask("GET", "/v1/keys", kind=list[KeyView])
    if as_json:
        _print_json(found)
        return
    for key in found:
        limits = "all" if key.permissions is None else ",".join(key.permissions)
        click.echo(f"{key.id}  {key.principal}  {limits}  {key.note}".rstrip())


@command.command
@click.argument("key_id")
def revoke(key_id: str) -> None:
    """End a key, at once."""
    ask("DELETE", f"/v1/keys/{key_id}")


@command.command
@click.argument("name")
@click.option("--project", required=True, help="Its project, such as root/team.")
@click.option("--permission", "permissions", multiple=True, required=True, help="What it may do; repeatable.")
@_json
def principal(name: str, project: str, permissions: tuple[str, ...], as_json: bool) -> None:
    """Make a principal NAME: a person, service or agent."""
    spec = PrincipalSpec(name=name, project=project, permissions=permissions)
    made: PrincipalView = ask("POST", "/v1/principals", spec, PrincipalView)
    if as_json:
        _print_json(made)


@command.command(name="remove-principal")
@click.argument("name")
def remove_principal(name: str) -> None:
    """Remove a principal and all its keys, at once."""
    ask("DELETE", f"/v1/principals/{name}")
