"""`dsec image record`: what a run of an image touches first, kept as its profile, along which later starts fetch ahead."""

import os
import sys
from pathlib import Path

import click
from msgspec import Struct

from dsec.cli.answers import exit_status, say
from dsec.cli.loading import live_layers, with_loading
from dsec.cli.shelf import fail_plainly, show, with_json, with_state
from dsec.config import Config
from dsec.images.index import ChunkIndex
from dsec.images.making import INDEX
from dsec.images.origins import keep_profile, read_origin, read_profile
from dsec.images.remote import push_profile
from dsec.images.stores.opening import open_store
from dsec.model.errors import Conflict, InvalidArgument
from dsec.model.loading import LoadMode, Profile
from dsec.model.outcome import ExecResult
from dsec.rules.profiles import merge_run
from dsec.sdk._async.client import DSecClient
from dsec.sdk.arguments import DSecContainerRunArgs
from dsec.wiring import Loading

__all__ = ["record"]


class Recorded(Struct, frozen=True, kw_only=True):
    """The profile of one layer after a run: its version, how many runs it holds, the chunks that this run touched and all that it names."""

    layer: str
    version: int
    runs: int
    touched: int
    chunks: int


@click.command(context_settings={"allow_interspersed_args": False})
@with_state
@with_json
@click.option("--url", metavar="URL", help="The server; else DSEC_URL or the credentials file.")
@click.option("--push", is_flag=True, help="Put the profiles into the store that the image came from.")
@click.option("--timeout", type=float, metavar="SECONDS", help="End the command after this time.")
@click.argument("name")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def record(
    state: str | None, as_json: bool, url: str | None, push: bool, timeout: float | None, name: str, argv: tuple[str, ...]
) -> None:  # fmt: skip
    """Run ARGV in a sandbox of the image NAME, which is loaded on demand, and merge the order in which it first touches chunks into the
    image's profile. Its chunks are taken off the disk first; no other sandbox may use it meanwhile.

    Ends with the command's exit status. The server must run.
    """

    async def work(parts: Loading, config: Config) -> tuple[ExecResult, list[Recorded]]:
        digests = _recordable(parts, config, name)
        for digest in digests:
            await parts.on_demand.evict(digest)
            forget_pages(config.state / "mnt" / digest.removeprefix("sha256:"))
        async with DSecClient(url) as client:
            result, touched = await parts.on_demand.trace(digests, lambda: _run(client, name, argv, timeout))
        kept = [_keep(parts, digest, touched[digest]) for digest in digests]
        if push:
            for digest in digests:
                await _push(parts, digest)
        return result, kept

    with fail_plainly():
        result, kept = with_loading(state, work)
    if as_json:
        show(kept)
    else:
        for each in kept:
            text = f"version {each.version}, {each.runs} runs, {each.touched} chunks touched, {each.chunks} in all"
            click.echo(f"{each.layer[7:19]}: {text}")
    status = exit_status(result.outcome, result.exit_code, result.signal)
    if status:
        say(f"the command ended with {status}: {result.stderr[-500:].decode(errors='replace').strip()}")
    sys.exit(status)


def _recordable(parts: Loading, config: Config, name: str) -> list[str]:
    """The layers of the image that are loaded on demand. Raises InvalidArgument where there is none, Conflict where a sandbox has one."""
    digests = []
    for digest in parts.cache.stack(name):
        origin = read_origin(parts.layers.directory(digest))
        if origin is not None and origin.load is LoadMode.ON_DEMAND:
            digests.append(digest)
    if not digests:
        raise InvalidArgument(
            f"no layer of {name!a} is loaded on demand, so there is nothing to fetch ahead", field="name"
        )
    if used := live_layers(config.state).intersection(digests):
        raise Conflict(f"sandboxes use layer {min(used)}: what they read cannot be told from the run", what="layer")
    return digests


def forget_pages(root: Path) -> None:
    """Drops what the page cache holds of the files below a mounted layer, so that its next reads are seen."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path) or os.path.islink(path):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


async def _run(client: DSecClient, name: str, argv: tuple[str, ...], timeout: float | None) -> ExecResult:
    box = await client.run_container(DSecContainerRunArgs(container_image=name))
    try:
        return await box.exec(argv, timeout=timeout)
    finally:
        await box.stop()


def _keep(parts: Loading, digest: str, touched: tuple[int, ...]) -> Recorded:
    folder = parts.layers.directory(digest)
    count = ChunkIndex.read(folder / INDEX, parts.layers.manifest(digest)).count
    before: Profile | None = read_profile(folder, digest, count)
    profile = merge_run(before, digest, touched)
    keep_profile(folder, profile)
    return Recorded(
        layer=digest, version=profile.version, runs=profile.runs, touched=len(set(touched)), chunks=len(profile.order)
    )


async def _push(parts: Loading, digest: str) -> None:
    folder = parts.layers.directory(digest)
    origin = read_origin(folder)
    if origin is None:
        raise InvalidArgument(f"layer {digest} came from no store", field="push")
    store = open_store(parts.stores.find(origin.store))
    try:
        count = ChunkIndex.read(folder / INDEX, parts.layers.manifest(digest)).count
        version = await push_profile(store, folder, digest, count)
        say(f"{digest[7:19]}: profile {version} is in {origin.store}")
    finally:
        await store.close()
