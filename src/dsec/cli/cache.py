"""`dsec cache`: what layers of stores take of this node's disk, and how that is bounded."""

import time

import click
from msgspec import Struct

from dsec.cli.answers import say
from dsec.cli.answers import table as print_table
from dsec.cli.loading import live_layers, with_loading
from dsec.cli.shelf import fail_plainly, open_shelf, show, shown_progress, size_text, with_json, with_state
from dsec.config import Config
from dsec.images.building import expire
from dsec.images.collect import collect
from dsec.images.fsck import Checked, Fsck
from dsec.kernel.clock import SystemClock
from dsec.model.errors import ImageUnavailable
from dsec.model.loading import LayerCache
from dsec.rules.eviction import taken
from dsec.wiring import Loading

__all__ = ["command"]

_MIB = 1 << 20


class CacheView(Struct, frozen=True, kw_only=True):
    """The cache: its layers, the bytes that those of stores take, and the marks between which that stays (0: no bound)."""

    layers: tuple[LayerCache, ...]
    bytes_taken: int
    high_bytes: int
    low_bytes: int


class Evicted(Struct, frozen=True, kw_only=True):
    """What was evicted: images by the names given, or layers that were the least recently used; and the bytes that came free."""

    evicted: tuple[str, ...]
    forgotten: tuple[str, ...] = ()
    freed_bytes: int


@click.group
def command() -> None:
    """Show and bound what layers of stores take of this node's disk."""


@command.command(name="show")
@with_state
@with_json
def show_(state: str | None, as_json: bool) -> None:
    """List the layers on this node: what of them is here, when they were last used, and what may be evicted."""

    async def work(parts: Loading, config: Config) -> CacheView:
        layers = parts.cache.look(live_layers(config.state))
        high, low = parts.cache.marks
        return CacheView(layers=tuple(layers), bytes_taken=taken(layers), high_bytes=high, low_bytes=low)

    with fail_plainly():
        view = with_loading(state, work)
    if as_json:
        show(view)
        return
    rows = [_row(layer) for layer in sorted(view.layers, key=lambda each: -each.used)]
    print_table(("NAMES", "LAYER", "HERE", "CHUNKS", "USED", "KEPT FOR", "STORE"), rows)
    bound = f"; evicted at {size_text(view.high_bytes)} down to {size_text(view.low_bytes)}" if view.high_bytes else ""
    click.echo(f"{size_text(view.bytes_taken)} of layers of stores{bound}", err=True)


def _row(layer: LayerCache) -> tuple[str, ...]:
    reasons = [
        word
        for word, holds in (("sandboxes", layer.live), ("pin", layer.pinned), ("no store", not layer.evictable))
        if holds
    ]
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(layer.used))
    return (
        ",".join(layer.names) or "-", layer.layer[7:19], size_text(layer.bytes_here), size_text(layer.data_here), used,
        ",".join(reasons) or "-", layer.source or "-",
    )  # fmt: skip


@command.command
@with_state
@click.argument("names", nargs=-1, required=True)
def pin(state: str | None, names: tuple[str, ...]) -> None:
    """Keep the images NAMES (with all their layers) from eviction."""

    async def work(parts: Loading, config: Config) -> None:
        parts.cache.pin([digest for name in names for digest in parts.cache.stack(name)])

    with fail_plainly():
        with_loading(state, work)


@command.command
@with_state
@click.argument("names", nargs=-1, required=True)
def unpin(state: str | None, names: tuple[str, ...]) -> None:
    """Let the images NAMES be evicted again."""

    async def work(parts: Loading, config: Config) -> None:
        parts.cache.unpin([digest for name in names for digest in parts.cache.stack(name)])

    with fail_plainly():
        with_loading(state, work)


@command.command
@with_state
@with_json
@click.option("--to", "low_mb", type=int, metavar="MIB", help="Evict down to this; the low mark if not given.")
@click.argument("names", nargs=-1)
def evict(state: str | None, as_json: bool, low_mb: int | None, names: tuple[str, ...]) -> None:
    """Take chunks off the disk: those of the images NAMES, also of ones that sandboxes use, which read them again from the store;
    without NAMES, those of the least recently used layers that no sandbox has and that are not pinned, down to the low mark."""
    if names and low_mb is not None:
        raise click.UsageError("give NAMES or --to")

    async def work(parts: Loading, config: Config) -> Evicted:
        if names:
            live = live_layers(config.state)
            freed = [await parts.cache.evict(name, live) for name in names]
            return Evicted(evicted=names, freed_bytes=sum(freed))
        low = parts.cache.marks[1] if low_mb is None else low_mb * _MIB
        done = await parts.cache.shrink(live_layers(config.state), low)
        return Evicted(evicted=done.evicted, forgotten=done.forgotten, freed_bytes=done.freed_bytes)

    with fail_plainly():
        done = with_loading(state, work)
    if as_json:
        show(done)
        return
    for each in done.evicted:
        click.echo(each)
    for each in done.forgotten:
        click.echo(f"{each} forgotten")
    click.echo(f"{size_text(done.freed_bytes)} freed", err=True)


@command.command
@with_state
@with_json
@click.option("--repair", is_flag=True, help="Fetch what is damaged again, from a store that has it.")
@click.argument("names", nargs=-1)
def fsck(state: str | None, as_json: bool, repair: bool, names: tuple[str, ...]) -> None:
    """Read back what is here of the images NAMES (of all layers, if none is given) against their manifests.

    Exit status 125 if anything is damaged and was not repaired.
    """

    async def work(parts: Loading, config: Config) -> list[Checked]:
        digests = [digest for name in names for digest in parts.cache.stack(name)] or parts.layers.digests()
        with shown_progress(as_json) as progress:
            checker = Fsck(parts.layers, parts.stores, progress)
            return [await checker.check(digest, repair=repair) for digest in dict.fromkeys(digests)]

    with fail_plainly():
        found = with_loading(state, work)
    if as_json:
        show(found)
    else:
        _show_checked(found)
    bad = [each.layer for each in found if not each.sound]
    if bad:
        raise ImageUnavailable(f"damaged: {', '.join(bad)}")


def _show_checked(found: list[Checked]) -> None:
    for each in found:
        if not (each.files or each.chunks):
            click.echo(f"{each.layer[7:19]}: sound")
            continue
        what = [*each.files, *([f"{len(each.chunks)} chunks"] if each.chunks else [])]
        click.echo(f"{each.layer[7:19]}: {', '.join(what)} {'repaired' if each.repaired else 'DAMAGED'}")
        if each.why_not:
            say(f"{each.layer[7:19]} was not repaired: {each.why_not}")


@command.command
@with_state
@with_json
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--builds", type=float, default=7 * 86400.0, show_default=True, metavar="SECONDS",
    help="Forget steps of builds that none has used for so long.",
)  # fmt: skip
def gc(state: str | None, as_json: bool, dry_run: bool, builds: float) -> None:
    """Remove layers that no name reaches and that are not mounted."""
    shelf = open_shelf(state)
    with fail_plainly():
        if not dry_run:
            expire(shelf.names, SystemClock().now() - builds)
        done = collect(shelf.state, shelf.layers, shelf.names, dry_run=dry_run)
    if as_json:
        show(done)
        return
    for digest in done.removed:
        click.echo(digest)
    word = "would be freed" if dry_run else "freed"
    click.echo(f"{size_text(done.freed_bytes)} {word}; {len(done.in_use)} unnamed layers are in use", err=True)
