"""dsec exec."""

import base64
import sys

import click

from dsec.cli.answers import answer_json, ending, exit_status, fail, pairs, say
from dsec.cli.connection import client_options, with_client
from dsec.cli.terminal import carry, is_terminal, raw, terminal_size
from dsec.model.errors import DSecError
from dsec.model.outcome import ExecResult
from dsec.model.views import ProcessView
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.sandbox import Sandbox

__all__ = ["Command", "command", "result_record", "run_attached"]


class Command:
    """What to run and how, from the command line."""

    def __init__(
        self,
        argv: tuple[str, ...],
        *,
        interactive: bool = False,
        tty: bool = False,
        timeout: float | None = None,
        user: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.argv = argv
        self.interactive = interactive
        self.tty = tty
        self.timeout = timeout
        self.user = user
        self.cwd = cwd
        self.env = env or {}


def result_record(result: ExecResult) -> dict[str, object]:
    """A result for --json: stdout and stderr as text, and in base64 too where they are not UTF-8."""
    record: dict[str, object] = {
        "outcome": result.outcome.value,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "truncated": result.truncated,
        "stdout_bytes_total": result.stdout_bytes_total,
        "stderr_bytes_total": result.stderr_bytes_total,
        "duration": result.duration,
        "limit": result.limit,
        "request_id": result.request_id,
    }
    for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
        text = data.decode("utf-8", "replace")
        record[name] = text
        if text.encode() != data:
            record[f"{name}_base64"] = base64.b64encode(data).decode()
    return record


async def run_attached(box: Sandbox, order: Command) -> ProcessView:
    """Run it with our stdin, stdout and terminal. Its whole tree ends with this call, whatever ends it."""
    process = await box.start(
        order.argv,
        pty=terminal_size() if order.tty else None,
        keep_stdin=order.interactive,
        env=order.env,
        cwd=order.cwd,
        user=order.user,
        timeout=order.timeout,
    )
    try:
        if order.tty and order.interactive:
            with raw(0):
                return await carry(process, stdin=True, pty=True)
        return await carry(process, stdin=order.interactive, pty=order.tty)
    finally:
        try:
            await process.stop()
        except DSecError as error:
            say(f"the command may be running still: {error}")


async def _collected(box: Sandbox, order: Command) -> int:
    result = await box.exec(
        order.argv,
        stdin=sys.stdin.buffer.read() if order.interactive else b"",
        env=order.env,
        cwd=order.cwd,
        user=order.user,
        timeout=order.timeout,
    )
    answer_json(result_record(result))
    ending(result.outcome, result.signal)
    return exit_status(result.outcome, result.exit_code, result.signal)


async def perform(box: Sandbox, order: Command, as_json: bool) -> int:
    """Run it, in JSON or attached; the exit status. Errors are said here."""
    try:
        if as_json:
            return await _collected(box, order)
        view = await run_attached(box, order)
    except DSecError as error:
        return fail(error, as_json, of_command=True)
    ending(view.outcome, view.signal)
    return exit_status(view.outcome, view.exit_code, view.signal)


async def _detached(box: Sandbox, order: Command, as_json: bool) -> int:
    """Start it and leave it running; its id is the answer."""
    process = await box.start(
        order.argv,
        pty=terminal_size() if order.tty else None,
        env=order.env,
        cwd=order.cwd,
        user=order.user,
        timeout=order.timeout,
    )
    if as_json:
        answer_json(process.view)
    else:
        click.echo(process.id)
    return 0


@click.command("exec", context_settings={"allow_interspersed_args": False})
@client_options
@click.option("-i", "--interactive", is_flag=True, help="Send stdin to the command.")
@click.option("-t", "--tty", is_flag=True, help="Run it on a terminal of its own.")
@click.option("-d", "--detach", is_flag=True, help="Leave it running and print its id, for dsec logs and dsec ps.")
@click.option("--timeout", type=float, metavar="SECONDS", help="End its whole process tree after this time.")
@click.option("--user", metavar="USER[:GROUP]", help="Run as this user; else the sandbox's.")
@click.option("--cwd", metavar="DIR", help="Run in this directory; else the sandbox's.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="Lay a variable over the sandbox's environment.")
@click.argument("sandbox")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    url: str | None,
    as_json: bool,
    interactive: bool,
    tty: bool,
    detach: bool,
    timeout: float | None,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    sandbox: str,
    argv: tuple[str, ...],
) -> None:
    """Run ARGV in SANDBOX and exit with its status. A `--` before ARGV is left out.

    Exit status: the command's own; 128 and the signal's number when a signal ended it; 124 after its --timeout; 127 when
    it was not found, 126 when it cannot be executed; 125 when the platform failed. With --json its output is collected.
    """
    if argv[0] == "--":
        argv = argv[1:]
    if not argv:
        raise click.UsageError("there is no command to run")
    if detach and interactive:
        raise click.UsageError("-d leaves the command alone, and -i would feed it; give one of them")
    if tty and interactive and not is_terminal(0):
        raise click.UsageError("-i with -t needs a terminal on stdin; leave out -t to send a pipe")
    order = Command(
        argv, interactive=interactive, tty=tty, timeout=timeout, user=user, cwd=cwd, env=pairs(env, "--env")
    )

    async def work(client: DSecClient) -> int:
        box = await client.get(sandbox)
        return await (_detached(box, order, as_json) if detach else perform(box, order, as_json))

    try:
        sys.exit(with_client(url, work))
    except DSecError as error:
        sys.exit(fail(error, as_json, of_command=True))
    except BrokenPipeError:
        say("stdout was closed")
        sys.exit(141)
