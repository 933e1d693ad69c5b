"""`dsec down`: end the server and, unless told otherwise, every sandbox; only the state directory stays."""

import asyncio
import os
import select
import signal

import click
import uvloop

from dsec.cluster.state import StateDirectory
from dsec.config import Config, load
from dsec.kernel.clock import SystemClock
from dsec.model.errors import DeadlineExceeded, PermissionDenied
from dsec.wiring import clear

__all__ = ["command"]

_MARGIN = 30.0


@click.command
@click.option("--state", help="State directory; /var/lib/dsec if not configured.")
@click.option(
    "--keep-sandboxes", is_flag=True, help="End the server only; the next `dsec up` takes the sandboxes over."
)
def command(state: str | None, keep_sandboxes: bool) -> None:
    """End the platform on this node, running or crashed. Nothing is left but the state directory: images, volumes, keys."""
    config = load({"node.state": state}).config
    if os.geteuid() != 0:
        raise PermissionDenied("what root made only root can end: run dsec down as root")
    directory = StateDirectory(config.state)
    if not config.state.exists():
        click.echo(f"nothing at {config.state}", err=True)
        return
    _end_server(directory, config)
    if keep_sandboxes:
        return
    with directory.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        count = runner.run(clear(config, SystemClock()))
    click.echo(f"stopped {count} sandbox{'' if count == 1 else 'es'}", err=True)


def _end_server(directory: StateDirectory, config: Config) -> None:
    pid = directory.holder()
    if pid is None:
        return
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if directory.holder() != pid:
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        patience = config.server.stop_patience + _MARGIN
        ended, _, _ = select.select([process], [], [], patience)
        if not ended:
            raise DeadlineExceeded(f"the server, process {pid}, has not ended after {patience:.0f} s", pid=pid)
        click.echo("server stopped", err=True)
    finally:
        os.close(process)
