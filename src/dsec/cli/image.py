"""`dsec image`: base images of this node, and all names of its store."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from dsec.cli.image_build import build
from dsec.cli.image_commit import commit
from dsec.cli.image_record import record
from dsec.cli.image_stores import register
from dsec.cli.shelf import (
    fail_plainly,
    open_shelf,
    show,
    show_images,
    show_import,
    shown_progress,
    size_text,
    with_json,
    with_state,
)
from dsec.images.daemon import SOCKET, save_image
from dsec.images.importing import open_path
from dsec.images.inputs import ImportConfig, Source
from dsec.images.oci import Platform, Workshop, host_platform, load, parse_platform
from dsec.images.registry import credentials_from, pull
from dsec.images.registryclient import Credentials, parse_reference
from dsec.images.verify import Report, verify
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, PermissionDenied

__all__ = ["command"]

_DAEMON = "docker-daemon:"
_REGISTRY = "docker://"


@click.group
def command() -> None:
    """Import, build, commit, list, tag, verify and remove images."""


command.add_command(build)
command.add_command(commit)


register(command)
command.add_command(record)


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", "./", "../", "~")) or Path(source).exists()


def _open(
    source: str,
    ref: str | None,
    wanted: Platform | None,
    login: Credentials | None,
    docker_config: Path,
    work: Workshop,
) -> Source:
    """What SOURCE means: a path of this host, docker-daemon:NAME, or a reference that begins with a registry's host."""
    if source.startswith(_DAEMON):
        archive = asyncio.run(save_image(source.removeprefix(_DAEMON), SOCKET, work))
        opened = open_path(archive, ref, wanted, work)
        opened.origin = source
        return opened
    if not source.startswith(_REGISTRY) and _looks_like_path(source):
        return open_path(Path(source).expanduser(), ref, wanted, work)
    try:
        reference = parse_reference(source.removeprefix(_REGISTRY))
    except InvalidArgument as error:
        raise NotFound(
            f"{source!a} is neither a path that exists nor a reference with a registry's host", what="source"
        ) from error
    login = login or credentials_from(docker_config, reference.host)
    platform = wanted or host_platform()
    parts, top = asyncio.run(pull(reference, login, platform, work))
    return load(parts, top, f"{_REGISTRY}{reference}", platform, work)


@command.command(name="import")
@with_state
@with_json
@click.option("--ref", help="Which image of a layout or archive that holds several.")
@click.option("--platform", help="OS/ARCH[/VARIANT] of an image for several; this host's if not given.")
@click.option("--username", help="User name at the registry; `docker login`'s is used if not given.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
@click.option(
    "--docker-config", type=click.Path(path_type=Path), default=Path("~/.docker/config.json"), show_default=True
)
@click.option(
    "--merge-mb", type=click.IntRange(min=0), default=ImportConfig().merge_bytes >> 20, show_default=True, metavar="MIB",
    help="Neighbouring layers of the image become one while their files have at most this many MiB.",
)  # fmt: skip
@click.argument("name")
@click.argument("source")
def import_(
    state: str | None, as_json: bool, ref: str | None, platform: str | None, username: str | None, password_stdin: bool,
    docker_config: Path, merge_mb: int, name: str, source: str,
) -> None:  # fmt: skip
    """Import SOURCE as the base image NAME.

    SOURCE is a directory with a root filesystem, an OCI layout, a tar of either (plain, gzip or zstd) or of `docker save`,
    docker-daemon:IMAGE, or HOST/REPOSITORY[:TAG][@DIGEST] of a registry. Its layers become
    one, or several where they are large.
    """
    if password_stdin != (username is not None):
        raise click.UsageError("--username and --password-stdin go together")
    login = Credentials(username, sys.stdin.read().rstrip("\r\n")) if username is not None else None
    shelf, wanted = open_shelf(state), parse_platform(platform) if platform else None
    with fail_plainly(), shown_progress(as_json) as progress, shelf.layers.scratch() as folder:
        work = shelf.importer.workshop(folder, progress)
        work.config = replace(work.config, merge_bytes=merge_mb << 20)
        record = shelf.importer.image(name, _open(source, ref, wanted, login, docker_config.expanduser(), work), work)
    show_import(record, shelf, as_json)


@command.command(name="list")
@with_state
@with_json
def list_(state: str | None, as_json: bool) -> None:
    """List all names: images and layers of every kind."""
    show_images(open_shelf(state).names.views(), as_json)


@command.command
@with_state
@with_json
@click.argument("name")
def inspect(state: str | None, as_json: bool, name: str) -> None:
    """Show all about the layer NAME (a name or a digest): its record and its manifest. Always JSON."""
    shelf = open_shelf(state)
    record = shelf.names.record(name)
    show(
        {
            "record": record,
            "manifest": shelf.layers.manifest(record.digest),
            "directory": str(shelf.layers.directory(record.digest)),
        }
    )


@command.command
@with_state
@click.argument("name")
@click.argument("new")
def tag(state: str | None, name: str, new: str) -> None:
    """Give the layer NAME (a name or a digest) the name NEW too."""
    with fail_plainly():
        open_shelf(state).names.tag(name, new)


@command.command
@with_state
@click.argument("names", nargs=-1, required=True)
def remove(state: str | None, names: tuple[str, ...]) -> None:
    """Forget NAMES. Layers stay until `dsec cache gc`; sandboxes that run are not touched."""
    shelf = open_shelf(state)
    with fail_plainly():
        for name in names:
            shelf.names.remove(name)


@command.command(name="verify")
@with_state
@with_json
@click.argument("names", nargs=-1)
def verify_(state: str | None, as_json: bool, names: tuple[str, ...]) -> None:
    """Read back every chunk and file of the layers of NAMES (all names if none is given), and name each that is damaged.

    Exit status 125 if anything is.
    """
    if os.geteuid() != 0:
        raise PermissionDenied("mounting layers needs root")
    shelf = open_shelf(state)
    records = [shelf.names.record(name) for name in names] or shelf.names.all()
    reports: dict[str, Report] = {}
    found = []
    with fail_plainly(), shown_progress(as_json) as progress:
        for record in records:
            for digest in (*shelf.layers.manifest(record.digest).below, record.digest):
                if digest not in reports:
                    reports[digest] = verify(shelf.layers, digest, progress)
                found.append((record.name, reports[digest]))
    _show_reports(found, as_json)
    bad = dict.fromkeys(name for name, report in found if not report.ok)
    if bad:
        raise ImageUnavailable(f"damaged: {', '.join(bad)}")


def _show_reports(reports: list[tuple[str, Report]], as_json: bool) -> None:
    if as_json:
        show([{"name": name, "ok": report.ok, "report": report} for name, report in reports])
        return
    for name, report in reports:
        if report.ok:
            click.echo(f"{name}: {report.entries} entries and {size_text(report.bytes_read)} are as they were")
        for damage in report.damages:
            click.echo(f"{name}: {damage.path}: {damage.what}")
