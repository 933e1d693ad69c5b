"""How commands answer: text or JSON on stdout, messages on stderr, exit statuses."""

from collections.abc import Sequence

import click
import msgspec

from dsec.model.errors import CommandNotExecutable, CommandNotFound, Conflict, DSecError, InvalidArgument, NotFound
from dsec.model.outcome import Outcome

__all__ = [
    "PLATFORM_FAILED", "answer_json", "describe", "ending", "exit_status", "fail", "pairs", "say", "shown", "table",
]  # fmt: skip

PLATFORM_FAILED = 125
_TIMED_OUT = 124
_KILLED = 9


def say(message: str) -> None:
    """A message for a person."""
    click.echo(f"dsec: {message}", err=True)


def shown(text: str) -> str:
    """Text out of a sandbox, safe on a terminal: control characters and surrogates are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def answer_json(value: object) -> None:
    """An answer as one JSON document on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on stdout, under a header; cells are made safe for a terminal."""
    cells = [list(header), *[[shown(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def describe(error: DSecError) -> dict[str, object]:
    """An error for --json: the same words as a problem document."""
    return {
        "error": type(error).__name__,
        "code": error.code,
        "detail": str(error),
        "is_infra_error": error.is_infra_error,
        "fields": error.fields,
    }


def fail(error: DSecError, as_json: bool = False, of_command: bool = False) -> int:
    """Say what failed; the exit status: 125 where the platform did, 1 where the request was wrong. For a command in a
    sandbox (`of_command`) 127 where it was not found, 126 where it cannot be executed, else 125, as docker has it."""
    # these hints are about fields, and the message speaks of the very one
    hint = "" if type(error) in (Conflict, InvalidArgument, NotFound) else error.hint
    say(f"{type(error).__name__}: {shown(str(error))}" + (f" ({hint})" if hint else ""))
    if as_json:
        answer_json(describe(error))
    if of_command:
        if isinstance(error, CommandNotFound):
            return 127
        return 126 if isinstance(error, CommandNotExecutable) else PLATFORM_FAILED
    return PLATFORM_FAILED if error.is_infra_error else 1


def exit_status(outcome: Outcome | None, exit_code: int | None, number: int | None) -> int:
    """The exit status for a command that ended: its own, 128+n for signal n, 124 for its timeout, 125 where nobody knows."""
    if outcome is None:
        return PLATFORM_FAILED
    if outcome is Outcome.TIMEOUT:
        return _TIMED_OUT
    # a limit may have made it fail by itself, with a status of its own
    return exit_code if exit_code is not None else 128 + (number or _KILLED)


def ending(outcome: Outcome | None, number: int | None) -> None:
    """Say how a command ended, where its exit status alone does not."""
    if outcome is None:
        say("the command's end is not known")
    elif outcome is not Outcome.EXITED:
        say(f"the command ended: {outcome.value}" + (f", signal {number}" if number else ""))


def pairs(values: Sequence[str], option: str) -> dict[str, str]:
    """KEY=VALUE options as a dict. Raises click.BadParameter."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", param_hint=option)
        found[name] = text
    return found
