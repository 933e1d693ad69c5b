"""dsec run."""

import sys
from typing import Any

import click

from dsec.cli.answers import answer_json, fail, pairs, say
from dsec.cli.connection import client_options, with_client
from dsec.cli.exec import Command, perform
from dsec.cli.netrules import RULE_HELP, network_rules
from dsec.cli.terminal import is_terminal
from dsec.model.errors import DSecError
from dsec.model.spec import MountSpec
from dsec.sdk._async.client import DSecClient
from dsec.sdk.arguments import DSecContainerRunArgs

__all__ = ["command"]

_FOREVER = 0.0


def _mount(text: str, kind: str) -> MountSpec:
    name, colon, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not colon or not name or not target.startswith("/") or mode not in ("", "ro"):
        raise click.BadParameter(f"{text!r} is not NAME:/PATH or NAME:/PATH:ro", param_hint=f"--{kind}")
    if kind == "data":
        return MountSpec(target=target, data=name, read_only=True)
    return MountSpec(target=target, volume=name, read_only=mode == "ro")


def _arguments(options: dict[str, Any]) -> DSecContainerRunArgs:
    ttl, absolute = options["ttl"], options["ttl_absolute"]
    volumes = [_mount(text, "volume") for text in options["volume"]]
    return DSecContainerRunArgs(
        container_image=options["image"],
        workspace=options["workspace"],
        toolkits=options["toolkit"],
        memory_limit_mb=options["memory"],
        cpu_cores_limit=options["cpus"],
        disk_limit_mb=options["disk"],
        pids_limit=options["pids"],
        open_files_limit=options["open_files"],
        shm_size_mb=options["shm"],
        qos=options["qos"],
        ttl_running_stop=None if ttl == _FOREVER else ttl,
        ttl_absolute=absolute,
        init_user=options["user"] or "",
        env=pairs(options["env"], "--env"),
        cwd=options["cwd"],
        labels=pairs(options["label"], "--label"),
        job=options["job"],
        network_rules=network_rules(options["network"]),
        network_group=options["network_group"],
        aliases=options["alias"],
        mounts=volumes + [_mount(text, "data") for text in options["data"]],
        hostname=options["hostname"],
        no_new_privileges=options["no_new_privileges"],
    )


@click.command("run", context_settings={"allow_interspersed_args": False})
@client_options
@click.option("--image", required=True, help="The base image.")
@click.option("--workspace", help="A workspace laid over it.")
@click.option("--toolkit", multiple=True, help="A toolkit on top; may be repeated, lowest first.")
@click.option("--memory", type=int, default=2048, show_default=True, metavar="MIB", help="Memory limit.")
@click.option("--cpus", type=float, default=1.0, show_default=True, metavar="CORES", help="CPU limit.")
@click.option("--disk", type=int, default=4096, show_default=True, metavar="MIB", help="Limit of what it may write.")
@click.option("--pids", type=int, default=512, show_default=True, help="Limit of processes and threads.")
@click.option("--open-files", type=int, default=4096, show_default=True, help="Limit of open files of each process.")
@click.option("--shm", type=int, default=64, show_default=True, metavar="MIB", help="Size of /dev/shm.")
@click.option("--qos", type=click.Choice(["be", "ls"]), default="be", show_default=True, help="Service class.")
@click.option(
    "--ttl",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop it when idle so long; 0: never.",
)
@click.option("--ttl-absolute", type=float, metavar="SECONDS", help="Stop it after this time, whatever it does.")
@click.option("--user", metavar="USER[:GROUP]", help="User of its commands; else the image's.")
@click.option("--cwd", metavar="DIR", help="Directory of its commands; else the image's.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="A variable of its commands; may be repeated.")
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="A label; may be repeated.")
@click.option("--job", help="The job it belongs to.")
@click.option("--volume", multiple=True, metavar="NAME:/PATH[:ro]", help="A shared volume; may be repeated.")
@click.option("--data", multiple=True, metavar="NAME:/PATH", help="A data layer, read-only; may be repeated.")
@click.option("--network", multiple=True, metavar="RULE", help=RULE_HELP)
@click.option("--network-group", help="A private network that it shares with the project's sandboxes that name it.")
@click.option("--alias", multiple=True, help="A further name of it in its group; may be repeated.")
@click.option("--hostname", help="Its host name.")
@click.option("--no-new-privileges", is_flag=True, help="Set-uid files and file capabilities do nothing in it.")
@click.option(
    "--create-timeout",
    type=float,
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait so long for it to run.",
)
@click.option("--rm", "remove", is_flag=True, help="Stop it when the command has ended.")
@click.option("-i", "--interactive", is_flag=True, help="Send stdin to the command.")
@click.option("-t", "--tty", is_flag=True, help="Run the command on a terminal of its own.")
@click.option("--timeout", type=float, metavar="SECONDS", help="End the command's process tree after this time.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def command(argv: tuple[str, ...], url: str | None, as_json: bool, **options: Any) -> None:
    """Create a sandbox; with ARGV, run it there and exit with its status, as `dsec exec` does.

    Without a command the sandbox's id is printed. With one, the id is said on stderr, unless --rm.
    """
    if options["tty"] and options["interactive"] and not is_terminal(0):
        raise click.UsageError("-i with -t needs a terminal on stdin; leave out -t to send a pipe")
    if options["remove"] and not argv:
        raise click.UsageError("--rm needs a command whose end it can wait for")
    args = _arguments(options)
    order = Command(argv, interactive=options["interactive"], tty=options["tty"], timeout=options["timeout"])

    async def work(client: DSecClient) -> int:
        box = await client.run_container(args, timeout=options["create_timeout"])
        if not argv:
            if as_json:
                answer_json(box.view)
            else:
                click.echo(box.id)
            return 0
        if not options["remove"]:
            say(f"sandbox {box.id}")
            return await perform(box, order, as_json)
        try:
            return await perform(box, order, as_json)
        finally:
            await box.stop()

    try:
        sys.exit(with_client(url, work))
    except DSecError as error:
        sys.exit(fail(error, as_json, of_command=bool(argv)))
    except BrokenPipeError:
        say("stdout was closed")
        sys.exit(141)
