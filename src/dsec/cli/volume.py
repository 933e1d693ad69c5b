"""`dsec volume`: directories that sandboxes share by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from dsec.cli.shelf import fail_plainly, open_shelf, show, with_json, with_state
from dsec.edge.journal import volume_users
from dsec.images.volumes import Volumes
from dsec.kernel.errors import KernelError
from dsec.kernel.pool import Pool
from dsec.model.errors import RuntimeFailure

__all__ = ["command"]


@click.group
def command() -> None:
    """Make, list and remove shared volumes."""


@contextmanager
def _volumes(state: str | None) -> Iterator[Volumes]:
    """The volumes of a state directory's pool; the pool is unmounted again if it was not mounted before."""
    pool = Pool(_made(open_shelf(state).state))
    mounted = pool.root.is_mount()
    with fail_plainly():
        try:
            pool.open()
        except KernelError as error:
            raise RuntimeFailure(f"the pool cannot be opened: {error}") from error
        try:
            yield Volumes(pool)
        finally:
            if not mounted:
                pool.close()


def _made(state: Path) -> Path:
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return state


@command.command
@with_state
@click.option("--limit-mb", type=click.IntRange(min=1), help="MiB that it may hold; unlimited if not given.")
@click.argument("name")
def create(state: str | None, limit_mb: int | None, name: str) -> None:
    """Make the empty volume NAME."""
    with _volumes(state) as volumes:
        volumes.create(name, limit_mb * 2**20 if limit_mb is not None else None)


@command.command(name="list")
@with_state
@with_json
def list_(state: str | None, as_json: bool) -> None:
    """List volumes."""
    with _volumes(state) as volumes:
        names = volumes.names()
    if as_json:
        show(names)
        return
    for name in names:
        click.echo(name)


@command.command
@with_state
@click.argument("names", nargs=-1, required=True)
def remove(state: str | None, names: tuple[str, ...]) -> None:
    """Remove volumes and all that is in them. One that a sandbox uses is not removed."""
    users = volume_users(open_shelf(state).state / "journal.db")
    with _volumes(state) as volumes:
        for name in names:
            volumes.remove(name, users[name])
