"""dsec ps."""

import sys

import click

from dsec.cli.answers import answer_json, fail, pairs, table
from dsec.cli.connection import client_options, with_client
from dsec.model.errors import DSecError
from dsec.model.views import ProcessView, SandboxState, SandboxView
from dsec.sdk._async.client import DSecClient

__all__ = ["command"]


def _sandbox_row(view: SandboxView) -> list[str]:
    spec = view.spec
    layers = "+".join([spec.container_image, *([spec.workspace] if spec.workspace else []), *spec.toolkits])
    labels = ",".join(f"{name}={value}" for name, value in sorted(spec.labels.items()))
    end = view.end.end.value if view.end else ""
    return [view.id, view.state.value, layers, spec.job or "-", labels or "-", end or "-"]


def _process_row(view: ProcessView) -> list[str]:
    if view.running:
        state = "running"
    else:
        number = view.exit_code if view.exit_code is not None else view.signal
        state = f"{view.outcome.value if view.outcome else 'unknown'} {'' if number is None else number}".rstrip()
    return [view.id, str(view.pid), state, str(view.stdout_bytes_total), " ".join(view.argv)[:80]]


@click.command("ps")
@client_options
@click.option("--job", help="Sandboxes of this job.")
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="Sandboxes with this label; may be repeated.")
@click.option("-a", "--all", "every", is_flag=True, help="Those that have ended, too.")
@click.argument("sandbox", required=False)
def command(
    url: str | None, as_json: bool, job: str | None, label: tuple[str, ...], every: bool, sandbox: str | None
) -> None:
    """List sandboxes, or with SANDBOX the processes that were started in it."""
    labels = pairs(label, "--label")

    async def sandboxes(client: DSecClient) -> list[SandboxView]:
        found = await client.sandboxes(job=job, labels=labels)
        return [box.view for box in found if every or box.view.state is not SandboxState.GONE]

    async def processes(client: DSecClient) -> list[ProcessView]:
        return await (await client.get(sandbox or "")).processes()

    try:
        if sandbox is None:
            views = with_client(url, sandboxes)
            if as_json:
                answer_json(views)
            else:
                table(["SANDBOX", "STATE", "IMAGE", "JOB", "LABELS", "END"], [_sandbox_row(view) for view in views])
            return
        started = with_client(url, processes)
    except DSecError as error:
        sys.exit(fail(error, as_json))
    if as_json:
        answer_json(started)
    else:
        table(["PROCESS", "PID", "STATE", "STDOUT", "COMMAND"], [_process_row(view) for view in started])
