"""`dsec image build`: an image from a Dockerfile, each RUN in a sandbox of the running node."""

import sys
from collections import deque
from pathlib import Path

import click
from msgspec import Struct

from dsec.cli.answers import fail, pairs
from dsec.cli.connection import client_options, with_client
from dsec.cli.netrules import RULE_HELP, network_rules
from dsec.cli.shelf import fail_plainly, open_shelf, show_import, with_state
from dsec.images.building import Builder, BuildOptions
from dsec.images.importing import Quiet
from dsec.images.oci import host_platform
from dsec.kernel.clock import SystemClock
from dsec.model.build import RunStep
from dsec.model.errors import CommandFailed, DSecError, InvalidArgument, NotFound
from dsec.model.layers import ImageConfig, NameRecord
from dsec.model.outcome import Outcome
from dsec.model.views import ProcessView
from dsec.rules.buildplan import platform_values, unused_arguments
from dsec.rules.dockerfile import parse_dockerfile
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.sandbox import Sandbox
from dsec.sdk.arguments import DSecContainerRunArgs

__all__ = ["build"]

_FILE_MOST = 1 << 20
_TAIL_LINES = 30
_IDLE = 300.0
"""Seconds after which the sandbox of a step whose builder died is stopped."""


class Limits(Struct, frozen=True, kw_only=True):
    """What each RUN may use, and which network rules it has, as words."""

    memory_mb: int
    cpus: float
    disk_mb: int
    pids: int
    network: tuple[str, ...]
    timeout: float | None


class Shown:
    """Implements building.Watcher: steps and their output on stderr, unless `quiet`; JSON on stdout stays alone."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._part = b""

    def begin(self, number: int, total: int, shown: str) -> None:
        """A step begins."""
        self.tail.clear()
        self.say(f"{number}/{total} {shown.splitlines()[0] if shown else ''}")

    def end(self, how: str, digest: str) -> None:
        """A step is done."""
        self.say(f"    {how} {digest.removeprefix('sha256:')[:12]}")

    def say(self, text: str) -> None:
        """One line for people."""
        if not self._quiet:
            click.echo(text, err=True)

    def say_tail(self) -> None:
        """The end of the last command's output, where it was not said as it came."""
        if self._quiet:
            for line in self.tail:
                click.echo(f"    | {line}", err=True)

    def output(self, data: bytes) -> None:
        """Output of a command: whole lines as they come, what is left at `flush`."""
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._part) > 1 << 16:
            self.flush()

    def flush(self) -> None:
        """What has no newline yet."""
        if self._part:
            self._line(self._part)
        self._part = b""

    def _line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        text = "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)
        self.tail.append(text[:500])
        self.say(f"    | {text}")


class SandboxRunner:
    """Implements building.Runner through `client`, with the limits of `limits`."""

    def __init__(self, client: DSecClient, limits: Limits, shown: Shown) -> None:
        self._client = client
        self._limits = limits
        self._shown = shown

    async def run(self, image: str, step: RunStep, name: str, config: ImageConfig) -> str:
        """The digest of the layer that the command makes. Raises CommandFailed with its exit code and the end of its output."""
        rules = network_rules(self._limits.network) if step.network else None
        args = DSecContainerRunArgs(
            container_image=image, memory_limit_mb=self._limits.memory_mb, cpu_cores_limit=self._limits.cpus,
            disk_limit_mb=self._limits.disk_mb, pids_limit=self._limits.pids, ttl_running_stop=_IDLE, job="dsec-image-build",
            network_rules=rules,
        )  # fmt: skip
        async with await self._client.run_container(args) as box:
            view = await self._carry(box, step)
            if view.outcome is not Outcome.EXITED or view.exit_code != 0:
                raise self._failed(step, view)
            report = await box.commit(name, defaults=False, config=config)
        return report.digest

    async def _carry(self, box: Sandbox, step: RunStep) -> ProcessView:
        env = {name: value for name, _, value in (pair.partition("=") for pair in step.env)}
        process = await box.start(
            step.argv, env=env, cwd=step.cwd, user=step.user or "0", timeout=self._limits.timeout
        )  # fmt: skip
        try:
            async for piece in process.stream():
                self._shown.output(piece.data)
            self._shown.flush()
            return process.view if not process.view.running else await process.wait()
        finally:
            # What it left running in the background ends here too: the layer is of what has come to rest.
            await process.stop()

    def _failed(self, step: RunStep, view: ProcessView) -> CommandFailed:
        outcome = view.outcome.value if view.outcome is not None else "unknown"
        how = f"exit code {view.exit_code}" if view.exit_code is not None else f"{outcome}, signal {view.signal}"
        if view.outcome not in (None, Outcome.EXITED, Outcome.SIGNALLED):
            how = f"{outcome} ({how})"
        return CommandFailed(
            f"line {step.line}: {step.shown.splitlines()[0]}: {how}",
            outcome=outcome, exit_code=view.exit_code, signal=view.signal, line=step.line,
        )  # fmt: skip


def _text(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_MOST + 1)
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist", what=what) from None
    if len(raw) > _FILE_MOST:
        raise InvalidArgument(f"{path}: more than {_FILE_MOST} bytes", field=what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8: {error}", field=what) from error


def _ignore(file: Path, context: Path) -> str:
    """The text of the .dockerignore that holds: the Dockerfile's own, else the context's."""
    for place in (file.with_name(file.name + ".dockerignore"), context / ".dockerignore"):
        if place.is_file():
            return _text(place, "dockerignore")
    return ""


@click.command
@with_state
@client_options
@click.option(
    "-f",
    "--file",
    "dockerfile",
    type=click.Path(path_type=Path),
    help="The Dockerfile; CONTEXT/Dockerfile if not given.",
)
@click.option("--target", help="The stage to build; the last if not given.")
@click.option("--build-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Value of an ARG; may be repeated.")
@click.option("--network", multiple=True, metavar="RULE", help=f"{RULE_HELP} RUN alone has it; none if not given.")
@click.option("--no-cache", is_flag=True, help="Make every step anew.")
@click.option(
    "--progress",
    type=click.Choice(["plain", "quiet"]),
    default="plain",
    show_default=True,
    help="What is said of steps.",
)
@click.option("--memory", type=int, default=4096, show_default=True, metavar="MIB", help="Memory limit of a RUN.")
@click.option("--cpus", type=float, default=2.0, show_default=True, metavar="CORES", help="CPU limit of a RUN.")
@click.option(
    "--disk", type=int, default=16384, show_default=True, metavar="MIB", help="Limit of what a RUN may write."
)
@click.option("--pids", type=int, default=2048, show_default=True, help="Limit of processes and threads of a RUN.")
@click.option("--timeout", type=float, metavar="SECONDS", help="End a RUN after this time.")
@click.argument("name")
@click.argument("context", type=click.Path(path_type=Path, exists=True, file_okay=False))
def build(
    state: str | None, url: str | None, as_json: bool, dockerfile: Path | None, target: str | None, arguments: tuple[str, ...],
    network: tuple[str, ...], no_cache: bool, progress: str, memory: int, cpus: float, disk: int, pids: int, timeout: float | None,
    name: str, context: Path,
) -> None:  # fmt: skip
    """Build the image NAME from the Dockerfile in CONTEXT.

    Each RUN is run in a sandbox of the node, which must be up; layers of steps that did not change are used again. Known are FROM, RUN, COPY,
    ADD of local files, ENV, WORKDIR, USER, ARG, SHELL, ENTRYPOINT, CMD, LABEL and EXPOSE; anything else is refused, with its line.
    """
    shown = Shown(quiet=progress == "quiet" or as_json)
    limits = Limits(memory_mb=memory, cpus=cpus, disk_mb=disk, pids=pids, network=network, timeout=timeout)
    network_rules(network)  # a wrong one is said before anything is built
    place = dockerfile or context / "Dockerfile"
    given = pairs(arguments, "--build-arg")
    shelf = open_shelf(state)
    try:
        file = parse_dockerfile(
            _text(place, "dockerfile"), str(place), given, platform_values(host_platform().architecture)
        )
        for unused in unused_arguments(file, given):
            shown.say(f"note: no ARG asks for {unused}")
        options = BuildOptions(
            context=context, ignore=_ignore(place, context), arguments=given, target=target, rules=network, cache=not no_cache
        )  # fmt: skip

        async def work(client: DSecClient) -> NameRecord:
            runner = SandboxRunner(client, limits, shown)
            builder = Builder(shelf.layers, shelf.names, shelf.importer, SystemClock(), runner, shown, Quiet())
            return await builder.build(name, file, options)

        with fail_plainly():
            record = with_client(url, work)
    except CommandFailed as error:
        shown.say_tail()
        sys.exit(fail(error, as_json))
    except DSecError as error:
        sys.exit(fail(error, as_json))
    show_import(record, shelf, as_json)
