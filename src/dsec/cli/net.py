"""dsec net."""

import datetime
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import click
import msgspec

from dsec.cli.answers import answer_json, fail, say
from dsec.cli.connection import client_options, with_client
from dsec.cli.netrules import network_rules
from dsec.model.errors import DSecError
from dsec.model.network import Flow, NetworkRules, NetworkView
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.sandbox import Sandbox

__all__ = ["command"]


@click.group("net")
def command() -> None:
    """Show and set the network of a sandbox, and show what it tried."""


def _with_sandbox(
    url: str | None, as_json: bool, sandbox: str, work: Callable[[Sandbox], Coroutine[Any, Any, Any]]
) -> Any:
    async def found(client: DSecClient) -> Any:
        return await work(await client.get(sandbox))

    try:
        return with_client(url, found)
    except DSecError as error:
        sys.exit(fail(error, as_json))


def _printable(text: str) -> str:
    """A text of the sandbox's own choosing, without what would move the terminal."""
    return "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in text)


def _line(flow: Flow) -> str:
    when = datetime.datetime.fromtimestamp(flow.at, datetime.UTC).strftime("%H:%M:%S.%f")[:-3]
    where = _printable(
        f"{flow.name or flow.address}:{flow.port}" + (f" ({flow.address})" if flow.name and flow.address else "")
    )
    told = f"{when} {flow.verdict:8} {flow.protocol:4} {where}"
    if flow.bytes_out or flow.bytes_in:
        told += f" out={flow.bytes_out} in={flow.bytes_in}"
    if flow.reason:
        told += f" [{flow.reason}]"
    if flow.pid is not None:
        told += f" said by tenant: pid={flow.pid} comm={_printable(flow.comm)}"
    return told


@command.command("log")
@client_options
@click.option("--refused", "verdict", flag_value="refused", help="Refused flows alone.")
@click.option("--allowed", "verdict", flag_value="allowed", help="Allowed flows alone.")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Flows at most, the newest.")
@click.argument("sandbox")
def log(url: str | None, as_json: bool, verdict: Any, limit: int, sandbox: str) -> None:
    """Show the flows that SANDBOX began or tried, oldest first. pid and comm are what its program said of itself."""
    flows: list[Flow] = _with_sandbox(url, as_json, sandbox, lambda box: box.net_log(limit=limit, verdict=verdict))
    if as_json:
        answer_json(flows)
        return
    for flow in flows:
        click.echo(_line(flow))


def _show(view: NetworkView, as_json: bool) -> None:
    if as_json:
        answer_json(view)
        return
    if view.refused:
        say(f"everything is refused: {view.refused}")
    if view.rules is None:
        click.echo("no network but loopback")
        return
    click.echo(
        f"addresses {view.v4} {view.v6}" + (f"  phase {view.phase} of {', '.join(view.phases)}" if view.phase else "")
    )
    for name, value in view.rules.items():
        click.echo(f"rule {name} {msgspec.json.encode(value).decode()}")
    for allow in view.allows:
        click.echo(f"allowed {allow.network} {allow.protocol} {allow.low}-{allow.high} {allow.via}")


@command.command("show")
@client_options
@click.argument("sandbox")
def show(url: str | None, as_json: bool, sandbox: str) -> None:
    """Show the rules in force in SANDBOX: as they were asked for, and what the kernel's maps hold now."""
    _show(_with_sandbox(url, as_json, sandbox, lambda box: box.network()), as_json)


def _from_file(path: str) -> NetworkRules:
    with click.open_file(path) as file:
        try:
            return msgspec.json.decode(file.read(), type=NetworkRules)
        except msgspec.DecodeError as error:
            raise click.BadParameter(str(error), param_hint="--file") from error


@command.command("set")
@client_options
@click.option("--phase", help="A phase of the sandbox's network_phases, instead of rules.")
@click.option("--file", metavar="FILE", help="Rules as JSON, as network_rules of the API; - for stdin.")
@click.argument("sandbox")
@click.argument("rules", nargs=-1)
def set_(
    url: str | None, as_json: bool, phase: str | None, file: str | None, sandbox: str, rules: tuple[str, ...]
) -> None:
    """Put exactly RULES in force in SANDBOX, at once: words as of `dsec run --network`, or off."""
    if sum((phase is not None, file is not None, bool(rules))) != 1:
        raise click.UsageError("give rules, --file or --phase")
    asked = _from_file(file) if file is not None else network_rules(rules)
    if phase is None and asked is None:
        raise click.UsageError("none is for creation; off refuses everything")

    async def work(box: Sandbox) -> NetworkView:
        return await (box.set_phase(phase) if phase is not None else box.set_network_rules(asked or {}))

    _show(_with_sandbox(url, as_json, sandbox, work), as_json)
