"""`dsec up`: the platform on this node, in the foreground or detached."""

import asyncio
import gc
import logging
import os
import platform
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import uvloop

from dsec.cli.answers import PLATFORM_FAILED, say
from dsec.cluster.serve import Listener, open_listener, serve
from dsec.cluster.state import Credentials, StateDirectory
from dsec.config import Config, load
from dsec.kernel.clock import SystemClock
from dsec.kernel.probe import too_old
from dsec.model.errors import PermissionDenied, Unsupported
from dsec.wiring import node

__all__ = ["command"]

_LOG_BYTES = 16 << 20
_READY_DEADLINE = 120.0


@click.command
@click.option("--state", help="State directory; /var/lib/dsec if not configured.")
@click.option(
    "--listen", metavar="HOST:PORT", help="Address; 127.0.0.1:7380 if not configured. Beyond loopback: with TLS."
)
@click.option("--tls-cert", metavar="FILE", help="Certificate chain (PEM) instead of a self-signed one.")
@click.option("--tls-key", metavar="FILE", help="Its key (PEM).")
@click.option("--detach", "-d", is_flag=True, help="Go to the background once it is ready; log to STATE/server.log.")
@click.option("--ready-fd", type=int, hidden=True)
def command(
    state: str | None, listen: str | None, tls_cert: str | None, tls_key: str | None, detach: bool, ready_fd: int | None
) -> None:
    """Start the platform on this node.

    SIGTERM or Ctrl-C ends the server and leaves the sandboxes running: the next `dsec up` takes them over. `dsec down` ends
    them too.
    """
    given = {"node.state": state, "server.listen": listen, "server.tls_cert": tls_cert, "server.tls_key": tls_key}
    config = load(given).config
    if os.geteuid() != 0:
        raise PermissionDenied("sandboxes are made by root: run dsec up as root")
    if why := too_old(platform.release()):
        raise Unsupported(why, feature="kernel")
    if detach:
        _detach(config, {f"--{name}": value for name, value in _flags(given).items()})
        return
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)
    _set_up_process()
    state_directory = StateDirectory(config.state)
    state_directory.make()
    with state_directory.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, state_directory, lambda listener: _announce(listener, config, ready_fd)))


def _flags(given: dict[str, str | None]) -> dict[str, str]:
    return {name.rpartition(".")[2].replace("_", "-"): value for name, value in given.items() if value is not None}


def _set_up_process() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0o022)


async def _serve(config: Config, state: StateDirectory, announce: Callable[[Listener], None]) -> None:
    clock = SystemClock()
    listener = open_listener(config.server, config.state / "tls", clock)
    ca_file = str(listener.certificate.cert) if listener.certificate and listener.own else None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def keep(key: str) -> None:
        state.keep_credentials(Credentials(url=listener.url, api_key=key, ca_file=ca_file))

    def ready() -> None:
        kept = state.credentials()
        if kept is not None and (kept.url, kept.ca_file) != (listener.url, ca_file):
            keep(kept.api_key)
        # What is alive now stays: later collections need not look at it, and are short.
        gc.collect()
        gc.freeze()
        announce(listener)

    with listener.socket:
        async with node(config, clock, keep) as built:
            await serve(built.app, listener, config.server, stop, ready)


def _announce(listener: Listener, config: Config, ready_fd: int | None) -> None:
    lines = [f"listening on {listener.url}", f"API key in {config.state / 'credentials.json'}"]
    if listener.fingerprint:
        lines.append(f"certificate SHA-256 {listener.fingerprint}")
    if listener.own and listener.certificate:
        lines.append(f"clients trust it with DSEC_CA_FILE={listener.certificate.cert}")
    if ready_fd is None:
        click.echo("\n".join(lines), err=True)
    else:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write("\n".join(lines) + "\n")


def _detach(config: Config, flags: dict[str, str]) -> None:
    """Run the same command in a session of its own, and wait until it is ready or has failed."""
    directory = StateDirectory(config.state)
    directory.make()
    log = config.state / "server.log"
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.rename(log.with_suffix(".log.1"))
    reader, writer = os.pipe()
    arguments = [part for name, value in flags.items() for part in (name, value)]
    with log.open("ab") as output:
        begin = output.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "dsec", "up", "--ready-fd", str(writer), *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(writer,), start_new_session=True,
        )  # fmt: skip
    os.close(writer)
    with os.fdopen(reader) as pipe:
        ended, _, _ = select.select([pipe], [], [], _READY_DEADLINE)
        said = pipe.read() if ended else ""
    if not said:
        child.terminate()
        status = child.wait()
        click.echo(_tail(log, begin), err=True)
        say(f"the server did not start; its log is {log}")
        sys.exit(status if status > 0 else PLATFORM_FAILED)
    click.echo(said, nl=False, err=True)


def _tail(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read(64 << 10).decode(errors="replace").strip()
