"""`dsec layer`: workspace, toolkit and data layers, built from a directory or a tar."""

import os
from pathlib import Path

import click

from dsec.cli.shelf import fail_plainly, open_shelf, show_images, show_import, shown_progress, with_json, with_state
from dsec.images.importing import BuildArgs
from dsec.model.layers import LayerKind

__all__ = ["command"]

_KINDS = [kind.value for kind in LayerKind if kind is not LayerKind.BASE]


class _Owner(click.ParamType[tuple[int, int]]):
    """UID:GID, as numbers."""

    name = "uid:gid"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        uid, _, gid = str(value).partition(":")
        if not (uid.isdecimal() and gid.isdecimal() and int(uid) < 2**32 - 1 and int(gid) < 2**32 - 1):
            self.fail(f"{value!r} is not UID:GID", param, ctx)
        return int(uid), int(gid)


@click.group
def command() -> None:
    """Build and list workspace, toolkit and data layers."""


@command.command
@with_state
@with_json
@click.option("--kind", type=click.Choice(_KINDS), required=True)
@click.option(
    "--prefix", default="", metavar="PATH", help="Where in the root the content goes; the root itself if not given."
)
@click.option("--chown", type=_Owner(), help="Owner of everything, instead of the source's.")
@click.option(
    "--whiteout", "whiteouts", multiple=True, metavar="PATH", help="Hide PATH of the layers below; repeatable."
)
@click.argument("name")
@click.argument("source", type=click.Path(path_type=Path))
def build(
    state: str | None, as_json: bool, kind: str, prefix: str, chown: tuple[int, int] | None, whiteouts: tuple[str, ...],
    name: str, source: Path,
) -> None:  # fmt: skip
    """Make the directory or tar SOURCE the layer NAME.

    In SOURCE, an entry `.wh.FILE` hides FILE of the layers below, and `.wh..wh..opq` in a directory all that they have in it.
    """
    shelf = open_shelf(state)
    hidden = tuple(os.fsencode(path.lstrip("/")) for path in whiteouts)
    args = BuildArgs(LayerKind(kind), name, source.expanduser(), os.fsencode(prefix), chown, hidden)
    with fail_plainly(), shown_progress(as_json) as progress:
        record = shelf.importer.layer(args, progress)
    show_import(record, shelf, as_json)


@command.command(name="list")
@with_state
@with_json
def list_(state: str | None, as_json: bool) -> None:
    """List names of layers that are no base images."""
    views = open_shelf(state).names.views()
    show_images([view for view in views if view.layer.kind != LayerKind.BASE], as_json)
