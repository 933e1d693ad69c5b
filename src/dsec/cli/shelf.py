"""What the image, layer and volume commands share: the store of a state directory, and how work and answers are shown."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from dsec.config import load
from dsec.images import inputs
from dsec.images.importing import Importer, Quiet
from dsec.images.names import NameStore
from dsec.images.store import LayerStore
from dsec.kernel.clock import SystemClock
from dsec.model.errors import PermissionDenied, Unavailable
from dsec.model.layers import NameRecord
from dsec.model.views import ImageView

__all__ = [
    "Shelf",
    "fail_plainly",
    "open_shelf",
    "show",
    "show_images",
    "show_import",
    "shown_progress",
    "size_text",
    "with_json",
    "with_state",
]

_C = TypeVar("_C", bound=Callable[..., Any])


def with_state(call: _C) -> _C:
    """The option --state, as `state`."""
    return click.option("--state", metavar="DIR", help="State directory; /var/lib/dsec if not configured.")(call)


def with_json(call: _C) -> _C:
    """The flag --json, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(call)


@dataclass(frozen=True)
class Shelf:
    """The stores of one state directory."""

    state: Path
    layers: LayerStore
    names: NameStore
    importer: Importer


def open_shelf(state: str | None) -> Shelf:
    """The stores of `state`, or of the configured state directory."""
    place = load({"node.state": state}).config.state
    clock = SystemClock()
    layers = LayerStore(place, clock)
    names = NameStore(place, layers, clock)
    return Shelf(place, layers, names, Importer(layers, names, clock))


class _Bars:
    """Progress as bars on the terminal: one a step, bytes done of bytes in all."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: Any = None

    def step(self, what: str, total: int | None) -> None:
        if self._task is not None:
            done = self._bars.tasks[-1].completed
            self._bars.update(self._task, total=done or 1, completed=done or 1)
        self._task = self._bars.add_task(what, total=total)

    def add(self, count: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, count)


@contextmanager
def shown_progress(as_json: bool) -> Iterator[inputs.Progress]:
    """Progress bars on stderr if that is a terminal and no JSON is asked for; else nothing is shown."""
    if as_json or not sys.stderr.isatty():
        yield Quiet()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield _Bars(bars)


@contextmanager
def fail_plainly() -> Iterator[None]:
    """An OSError of the host (a full disk, a missing right) is said in a line, not in a traceback."""
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(f"{error.filename}: {error.strerror}; run as root") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Unavailable(f"{where}{error.strerror or error}") from error


def show(value: object) -> None:
    """A record as indented JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def size_text(count: int) -> str:
    """Bytes for people: three figures and a binary unit."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def show_images(views: Sequence[ImageView], as_json: bool) -> None:
    """Names with their layers: a table, or JSON."""
    if as_json:
        show(views)
        return
    table = Table(box=None, header_style="bold")
    for heading in ("NAME", "KIND", "FILES", "SIZE", "DIGEST"):
        table.add_column(heading, justify="right" if heading in ("FILES", "SIZE") else "left", overflow="fold")
    for view in views:
        layer = view.layer
        digest = layer.digest.removeprefix("sha256:")[:12]
        table.add_row(view.name, layer.kind, str(layer.entries), size_text(layer.content_bytes), digest)
    Console().print(table)


def show_import(record: NameRecord, shelf: Shelf, as_json: bool) -> None:
    """What an import or a build made."""
    if as_json:
        show(record)
        return
    layer = shelf.names.view(record.name).layer
    click.echo(f"{record.name} {record.digest}")
    text = f"{layer.entries} entries, {size_text(layer.content_bytes)} in {size_text(layer.stored_bytes)}"
    click.echo(text, err=True)
    for note in record.notes:
        click.echo(f"note: {note}", err=True)
