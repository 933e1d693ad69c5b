"""`dsec image push|pull|sync|sign|keys|prune`: images in shared stores."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dsec.cli.loading import with_loading
from dsec.cli.shelf import Shelf, fail_plainly, open_shelf, show, shown_progress, size_text, with_json, with_state
from dsec.config import Config, load
from dsec.images.inputs import Progress
from dsec.images.remote import Asked
from dsec.images.settings import Stores, load_stores
from dsec.images.stores.layout import Store, open_head
from dsec.images.stores.opening import open_store
from dsec.images.stores.prune import GRACE_SECONDS, prune
from dsec.images.stores.push import ZSTD_LEVEL, PushConfig
from dsec.images.stores.signing import Signer, make_key, parse_key, sign
from dsec.images.stores.transfer import (
    Node,
    PushedImage,
    push_images,
    stored_name,
    sync_images,
)
from dsec.kernel.clock import SystemClock
from dsec.model.errors import InvalidArgument
from dsec.model.loading import LoadMode
from dsec.model.stores import StoreOptions
from dsec.wiring import Loading

__all__ = ["keys", "prune_", "pull", "push", "register", "sign_", "sync"]

_C = TypeVar("_C", bound=Callable[..., Any])


def register(group: click.Group) -> None:
    """Adds these commands to `dsec image`."""
    for command in (push, pull, sync, sign_, keys, prune_):
        group.add_command(command)


def _with_store(call: _C) -> _C:
    """The option --store, as `store`."""
    text = "URL or configured name of the store; the first configured one if not given."
    return click.option("--store", metavar="STORE", help=text)(call)


def _with_compression(call: _C) -> _C:
    """The options --compression and --level."""
    call = click.option(
        "--level", type=click.IntRange(-7, 19), default=ZSTD_LEVEL, show_default=True, help="zstd's level."
    )(call)
    kinds = click.Choice(["zstd", "none"])
    return click.option(
        "--compression", type=kinds, default="zstd", show_default=True, help="How new chunks are stored."
    )(call)


def _stores(state: str | None) -> Stores:
    return load_stores(load({"node.state": state}).config.images)


def _options(stores: Stores, named: str | None) -> StoreOptions:
    if named is not None:
        return stores.find(named)
    listed = stores.all()
    if not listed:
        raise InvalidArgument("no store is configured (images.store): give --store", field="store")
    return listed[0]


def _node(shelf: Shelf, progress: Progress) -> Node:
    return Node(shelf.layers, shelf.names, SystemClock(), progress)


def _config(compression: str, level: int) -> PushConfig:
    return PushConfig(level=level if compression == "zstd" else None)


def _show_pushed(pushed: PushedImage, as_json: bool) -> None:
    if as_json:
        show(pushed)
        return
    click.echo(f"{pushed.name} {pushed.digest}")
    new = [layer for layer in pushed.layers if not layer.already]
    chunks, sent = sum(layer.new_chunks for layer in new), sum(layer.new_bytes for layer in new)
    text = f"{len(new)} of {len(pushed.layers)} layers new, {chunks} chunks, {size_text(sent)}"
    click.echo(text, err=True)


@click.command
@with_state
@with_json
@_with_store
@_with_compression
@click.option("--plain", is_flag=True, help="Also put the data uncompressed, to be mounted from a shared filesystem.")
@click.option("--sign", "key", type=click.Path(path_type=Path), help="Sign with the private key in this file.")
@click.argument("names", nargs=-1, required=True)
def push(
    state: str | None, as_json: bool, store: str | None, compression: str, level: int, plain: bool, key: Path | None,
    names: tuple[str, ...],
) -> None:  # fmt: skip
    """Put the images NAMES of this node into a store. What the store has is not sent again; a push that was killed goes on."""
    shelf = open_shelf(state)
    signer = Signer(key) if key is not None else None
    options = _options(_stores(state), store)

    async def run(progress: Progress) -> None:
        client = open_store(options, create=True)
        try:
            done = push_images(_node(shelf, progress), client, names, _config(compression, level), signer, plain=plain)
            async for pushed in done:
                _show_pushed(pushed, as_json)
        finally:
            await client.close()

    with fail_plainly(), shown_progress(as_json) as progress:
        asyncio.run(run(progress))


@click.command
@with_state
@with_json
@_with_store
@click.option(
    "--load", "how", type=click.Choice([mode.value for mode in LoadMode]), default=LoadMode.WHOLE.value, show_default=True,
    help="whole: all data now; on-demand: chunks as they are read; shared: read where it is, on a shared filesystem.",
)  # fmt: skip
@click.argument("names", nargs=-1, required=True)
def pull(state: str | None, as_json: bool, store: str | None, how: str, names: tuple[str, ...]) -> None:
    """Fetch the images NAMES of a store, and give them their names here. Every byte is checked when it comes.

    Where the store's configuration lists `keys`, an image that none of them has signed is refused.
    """

    async def work(parts: Loading, config: Config) -> None:
        options = _options(parts.stores, store)
        for name in names:
            pulled = await parts.remote.pull(options, name, Asked(LoadMode(how), pulled=True), progress)
            if how == LoadMode.WHOLE:
                for digest in parts.cache.stack(pulled.digest):
                    await parts.on_demand.fill(digest, progress)
            if as_json:
                show(pulled)
            else:
                click.echo(f"{pulled.name} {pulled.digest}")

    with fail_plainly(), shown_progress(as_json) as progress:
        with_loading(state, work)


@click.command
@with_state
@with_json
@_with_compression
@click.argument("source")
@click.argument("target")
@click.argument("names", nargs=-1)
def sync(
    state: str | None, as_json: bool, compression: str, level: int, source: str, target: str, names: tuple[str, ...]
) -> None:
    """Bring the store TARGET what it lacks of the images NAMES (all, if none is given) of the store SOURCE."""
    shelf, stores = open_shelf(state), _stores(state)
    from_options = stores.find(source)

    async def run(progress: Progress) -> None:
        origin = open_store(from_options)
        other = open_store(stores.find(target), create=True)
        try:
            keys = [parse_key(text) for text in from_options.keys]
            config = _config(compression, level)
            async for pushed in sync_images(_node(shelf, progress), origin, other, names, config, keys):
                _show_pushed(pushed, as_json)
        finally:
            await origin.close()
            await other.close()

    with fail_plainly(), shown_progress(as_json) as progress:
        asyncio.run(run(progress))


@click.command(name="sign")
@with_state
@_with_store
@click.option("--key", type=click.Path(path_type=Path), required=True, help="File of the private key.")
@click.argument("names", nargs=-1, required=True)
def sign_(state: str | None, store: str | None, key: Path, names: tuple[str, ...]) -> None:
    """Sign the images NAMES of a store, each for its name."""
    signer = Signer(key)
    options = _options(_stores(state), store)

    async def run() -> None:
        client = open_store(options)
        try:
            await open_head(client, create=False)
            for name in names:
                found = await stored_name(client, name)
                await sign(client, found.digest, name, signer)
                click.echo(f"{name} {found.digest}")
        finally:
            await client.close()

    with fail_plainly():
        asyncio.run(run())


@click.command
@click.argument("file", type=click.Path(path_type=Path))
def keys(file: Path) -> None:
    """Show the public key of the private key in FILE, which is made if it is not there.

    The public key goes into `keys` of the stores file of each node that shall refuse what it has not signed.
    """
    with fail_plainly():
        public = Signer(file).public if file.exists() else make_key(file)
    click.echo(public.text)


@click.command(name="prune")
@with_state
@with_json
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--alone", is_flag=True, help="Remove at once: nobody pushes to the store until this is done.")
@click.argument("store")
def prune_(state: str | None, as_json: bool, dry_run: bool, alone: bool, store: str) -> None:
    """Remove what no name of STORE reaches, in two steps, so that a push is never undone: what is found unused is marked, and
    removed by a later prune once the mark is a day old."""
    options = _stores(state).find(store)

    async def run() -> None:
        client: Store = open_store(options)
        try:
            grace = 0.0 if alone else GRACE_SECONDS
            done = await prune(client, SystemClock(), grace, dry_run=dry_run)
        finally:
            await client.close()
        if as_json:
            show(done)
        else:
            words = f"{done.layers} layers, {done.items} items and {size_text(done.freed_bytes)}"
            click.echo(f"{words} {'would be removed' if dry_run else 'removed'}, {done.marked} marked", file=sys.stderr)

    with fail_plainly():
        asyncio.run(run())
