"""Named volumes: directories that sandboxes share, each a subvolume of the pool."""

import errno
import re
from pathlib import Path
from typing import Protocol

from dsec.kernel.errors import KernelError
from dsec.model.errors import Conflict, DSecError, InvalidArgument, NotFound, RuntimeFailure

__all__ = ["VolumePool", "Volumes"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class VolumePool(Protocol):
    """The part of the pool that keeps volumes. Raises KernelError."""

    @property
    def volumes(self) -> Path: ...
    def create_volume(self, name: str, limit: int | None = None) -> Path: ...
    def delete_volume(self, name: str) -> None: ...


class Volumes:
    """Creates, lists and removes volumes in an open pool."""

    def __init__(self, pool: VolumePool) -> None:
        self._pool = pool

    def create(self, name: str, limit_bytes: int | None = None) -> Path:
        """A new, empty volume; it may hold `limit_bytes`. Raises Conflict when the name is taken, InvalidArgument."""
        try:
            return self._pool.create_volume(_checked(name), limit_bytes)
        except KernelError as error:
            raise _mapped(error, name) from error

    def directory(self, name: str) -> Path:
        """Where a volume is on the node. Raises NotFound and InvalidArgument."""
        path = self._pool.volumes / _checked(name)
        if not path.is_dir():
            raise NotFound(f"no volume is named {name!a}", what="volume")
        return path

    def names(self) -> list[str]:
        """All volumes, sorted."""
        return sorted(entry.name for entry in self._pool.volumes.iterdir() if _NAME.fullmatch(entry.name))

    def remove(self, name: str, users: int) -> None:
        """Removes a volume and all that is in it. Raises NotFound, and Conflict where `users` sandboxes use it."""
        self.directory(name)
        if users:
            raise Conflict(
                f"{users} sandboxes use the volume {name!a}: stop them first", what="volume", sandboxes=users
            )
        try:
            self._pool.delete_volume(name)
        except KernelError as error:
            raise _mapped(error, name) from error


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:200]!a} is not a volume's name: letters, digits, ._-, at most 64", field="volume"
        )
    return name


def _mapped(error: KernelError, name: str) -> DSecError:
    if error.errno == errno.EEXIST:
        return Conflict(f"a volume named {name!a} exists", what="volume")
    if error.errno == errno.ENOENT:
        return NotFound(f"no volume is named {name!a}", what="volume")
    return RuntimeFailure(f"volume {name!a}: {error}")
