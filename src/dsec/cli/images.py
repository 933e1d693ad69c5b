"""`dsec images`: what sandboxes read of the images of this node."""

import click
from msgspec import Struct

from dsec.cli.answers import table as print_table
from dsec.cli.loading import with_loading
from dsec.cli.shelf import fail_plainly, show, size_text, with_json, with_state
from dsec.config import Config
from dsec.images.origins import read_origin
from dsec.images.pager import Hello
from dsec.model.loading import LayerReads, LoadMode
from dsec.wiring import Loading

__all__ = ["command"]


class LayerStats(Struct, frozen=True, kw_only=True):
    """One layer of an image: how it is loaded (`local`: it was made here), whether its pager serves it now, and what that counted."""

    name: str
    layer: str
    load: str
    served: bool
    share: float
    reads: LayerReads


@click.group
def command() -> None:
    """Say what was read of images."""


@command.command
@with_state
@with_json
@click.argument("names", nargs=-1)
def stats(state: str | None, as_json: bool, names: tuple[str, ...]) -> None:
    """Say what was read of the images NAMES (of all, if none is given), layer by layer, since each was mounted.

    SHARE is the part of an image's data that is on this node; WAITED counts all readers together.
    """

    async def work(parts: Loading, config: Config) -> list[LayerStats]:
        served: dict[str, LayerReads] = {}
        if await parts.process.running():
            served = {f"sha256:{each.layer}": each for each in await parts.process.client.stats()}
        wanted = names or tuple(record.name for record in parts.names.all())
        return [_stats(parts, name, digest, served) for name in wanted for digest in parts.cache.stack(name)]

    with fail_plainly():
        found = with_loading(state, work)
    if as_json:
        show(found)
        return
    print_table(
        ("NAME", "LAYER", "LOAD", "SIZE", "HERE", "SHARE", "FETCHED", "REQUESTS", "WAITS", "WAITED", "HITS", "ERRORS", "SOURCE"),
        [_row(each) for each in found],
    )  # fmt: skip


def _stats(parts: Loading, name: str, digest: str, served: dict[str, LayerReads]) -> LayerStats:
    folder, size = parts.layers.directory(digest), parts.layers.manifest(digest).data.size
    origin = read_origin(folder)
    reads = served.get(digest)
    if reads is None:
        here = parts.on_demand.bytes_here(digest)
        reads = LayerReads(
            size=size, layer=digest[7:], whole=here == size, source=origin.store if origin else "", bytes_present=here
        )
    load = "local" if origin is None else str(origin.load)
    return LayerStats(
        name=name, layer=digest, load=load, served=digest in served, share=reads.share if load != LoadMode.SHARED else 0.0, reads=reads
    )  # fmt: skip


def _row(each: LayerStats) -> tuple[str, ...]:
    reads = each.reads
    how = f"{each.load} ({reads.mechanism})" if reads.mechanism else each.load
    return (
        each.name, each.layer[7:19], how, size_text(reads.size), size_text(reads.bytes_present), f"{each.share:.1%}",
        size_text(reads.bytes_fetched), str(reads.fetches), str(reads.waits), f"{reads.wait_us_total / 1e6:.2f} s", str(reads.hits),
        str(reads.errors), reads.source or "-",
    )  # fmt: skip


@command.command
@with_state
@with_json
def pager(state: str | None, as_json: bool) -> None:
    """Say which process serves layers on this node, and how often it had to be replaced."""

    async def work(parts: Loading, config: Config) -> Hello:
        return await parts.process.client.hello()

    with fail_plainly():
        found = with_loading(state, work)
    if as_json:
        show(found)
    else:
        click.echo(
            f"process {found.pid}, replaced {found.restarts} times; catches reads by {', '.join(found.mechanisms)}"
        )
