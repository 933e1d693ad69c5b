"""The btrfs pool of a node: one subvolume for each sandbox's writes, limited by simple quotas; volumes are in it too."""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EBUSY, EEXIST, EINVAL, ENOENT, ENOSPC
from pathlib import Path

from dsec import _native
from dsec.kernel.errors import KernelError, as_kernel_error, from_kernel, kernel_op
from dsec.kernel.mounts import mount, umount

__all__ = ["Pool"]

_MS_NOATIME, _MS_NODEV = 0x400, 0x4
_OPTIONS = "space_cache=v2"
_RESCUE = 32 << 20
_RELEASE_TRIES, _RELEASE_PAUSE = 100, 0.1
_SMALLEST = 256 << 20
_ROOM_LEFT = 0.9


class Pool:
    """`state`: the node's directory: the pool is mounted at `state/pool`, from `device`, or else from the sparse file
    `state/pool.img` of `size` bytes (default: nine tenths of what is free). `reserve`: the file takes all of its room at once
    and keeps it. All methods raise KernelError.
    """

    def __init__(
        self, state: Path, *, device: str | None = None, size: int | None = None, reserve: bool = False
    ) -> None:
        self.root = state / "pool"
        self.cells = self.root / "cells"
        self.volumes = self.root / "volumes"
        self.frozen = self.root / "frozen"
        self._image = state / "pool.img"
        self._lock = state / "pool.lock"
        self._rescue = state / "pool.rescue"
        self._reserve = reserve
        self._device = device
        self._size = size
        self._fsid = ""

    def open(self) -> None:
        """Mounts the pool, making it the first time. Does nothing where it is mounted already."""
        with kernel_op("mkdir", str(self.root)):
            self.root.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if not self.root.is_mount():
                self._mount()
            self._limit_by_quota()
            self._keep_rescue()
        self._fsid = from_kernel(_native.filesystem_id)(str(self.root))
        with kernel_op("mkdir", str(self.cells)):
            self.cells.mkdir(exist_ok=True)
            self.volumes.mkdir(exist_ok=True)
            self.frozen.mkdir(exist_ok=True)

    def close(self) -> bool:
        """Unmounts the pool; what is in it stays in its file or device. False, and nothing done, while it is in use: by a
        sandbox, or by another process that works on a volume.
        """
        with self._alone():
            if self.root.is_mount():
                try:
                    umount(str(self.root))
                except KernelError as error:
                    if error.errno == EBUSY:
                        return False
                    raise
        return True

    def mend(self) -> None:
        """Mounts a pool anew that the kernel made read-only, in room set aside for it. No sandbox may run. Does nothing where
        it can be written, or is not mounted."""
        with self._alone():
            if not self.root.is_mount() or self.writable():
                return
            umount(str(self.root))
            self._rescue.unlink(missing_ok=True)
            for left in reversed(range(_RELEASE_TRIES)):
                try:
                    self._mount(fresh=True)
                    break
                except KernelError as error:
                    # The last mounts of what has ended hold the old file system a moment longer, and nothing tells of its end.
                    if error.errno != EBUSY or not left:
                        raise
                    time.sleep(_RELEASE_PAUSE)
        self.open()

    def _keep_rescue(self) -> None:
        """Room on the disk under the pool's file, so that a pool that was broken by a full one can be mounted and emptied."""
        if self._device is not None or self._reserve:
            return
        try:
            with kernel_op("fallocate", str(self._rescue)), self._rescue.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, _RESCUE)
        except KernelError as error:
            self._rescue.unlink(missing_ok=True)
            if error.errno != ENOSPC:
                raise

    def create(self, name: str, limit: int) -> Path:
        """The new, empty writable layer `name`, with `upper` and `work` in it; it may hold `limit` bytes."""
        path = self.cells / name
        from_kernel(_native.subvolume_create)(str(self.cells), name)
        try:
            from_kernel(_native.subvolume_limit)(str(path), limit)
            with kernel_op("mkdir", str(path)):
                os.mkdir(path / "upper", 0o755)
                os.mkdir(path / "work", 0o755)
        except KernelError:
            self.delete(name)
            raise
        return path

    def delete(self, name: str) -> None:
        """Removes a writable layer; done when it is not there."""
        _delete(self.cells, name)

    def free(self) -> int:
        """Bytes that can still be written."""
        with kernel_op("statvfs", str(self.root)):
            found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def host_free(self) -> int | None:
        """Bytes free in the file system that holds the pool's file; None where the pool is a device or has all of its room."""
        if self._device is not None or self._reserve:
            return None
        with kernel_op("statvfs", str(self._image)):
            found = os.statvfs(self._image)
        return found.f_bavail * found.f_frsize

    def writable(self) -> bool:
        """False after the kernel found that it could not write the pool: until it is mounted anew, nothing can."""
        with kernel_op("statvfs", str(self.root)):
            return not os.statvfs(self.root).f_flag & os.ST_RDONLY

    def broken(self) -> bool:
        """It is mounted, and read-only."""
        return self.root.is_mount() and not self.writable()

    def shortage(self, reserve: int) -> str:
        """Why no writable layer should be made now, "" where one may: `reserve` bytes must be free in the pool, and in the
        file system under its file, where the pool breaks when that is full."""
        if not self.writable():
            return "the pool of writable layers became read-only; its sandboxes are ended, then it is mounted anew"
        if self.free() < reserve:
            return "the pool of writable layers is full"
        free = self.host_free()
        if free is not None and free < reserve:
            return "the disk under the pool of writable layers is nearly full"
        return ""

    def exists(self, name: str) -> bool:
        return (self.cells / name).is_dir()

    def names(self) -> list[str]:
        """Names of all writable layers."""
        with kernel_op("readdir", str(self.cells)):
            return sorted(os.listdir(self.cells))

    def create_volume(self, name: str, limit: int | None = None) -> Path:
        """A new volume: a subvolume whose root directory anyone in a sandbox owns as its root."""
        path = self.volumes / name
        from_kernel(_native.subvolume_create)(str(self.volumes), name)
        if limit is not None:
            from_kernel(_native.subvolume_limit)(str(path), limit)
        return path

    def delete_volume(self, name: str) -> None:
        _delete(self.volumes, name)

    def snapshot(self, source: Path, parent: Path, name: str, *, read_only: bool = False) -> Path:
        """Makes `parent/name` a snapshot of the subvolume `source`."""
        from_kernel(_native.subvolume_snapshot)(str(source), str(parent), name, read_only)
        return parent / name

    def freeze(self, name: str, copy: str) -> Path:
        """The changes of the writable layer `name` as of now, in the read-only snapshot `copy`; what was written before is on disk then."""
        return self.snapshot(self.cells / name, self.frozen, copy, read_only=True) / "upper"

    def thaw(self, copy: str) -> None:
        """Removes what `freeze` made; done when it is not there."""
        _delete(self.frozen, copy)

    def thaw_all(self) -> None:
        """Removes all that `freeze` made: what a server that died was reading."""
        with kernel_op("readdir", str(self.frozen)):
            names = os.listdir(self.frozen)
        for name in names:
            self.thaw(name)

    def used(self, name: str) -> tuple[int, int] | None:
        """Bytes that the writable layer holds now, and its limit; None where it is gone."""
        try:
            group = from_kernel(_native.subvolume_id)(str(self.cells / name))
            folder = f"/sys/fs/btrfs/{self._fsid}/qgroups/0_{group}"
            return _number(f"{folder}/referenced"), _number(f"{folder}/max_referenced")
        except KernelError as error:
            if error.errno == ENOENT:
                return None
            raise

    def _mount(self, *, fresh: bool = False) -> None:
        """`fresh`: raises EBUSY while mounts of what has ended keep the file system before alive; else it is mounted again."""
        source, loop = self._device, -1
        if source is None:
            self._make_image()
            source, loop = from_kernel(_native.loop_attach)(str(self._image), fresh)
        try:
            # What a discard gives back is no longer reserved.
            options = f"{_OPTIONS},{'nodiscard' if self._reserve else 'discard=async'}"
            mount(source, str(self.root), "btrfs", _MS_NOATIME | _MS_NODEV, options)
        finally:
            if loop >= 0:
                os.close(loop)

    def _limit_by_quota(self) -> None:
        """Turns quotas on, each time: a server may have died between its mount and this."""
        try:
            from_kernel(_native.quota_enable_simple)(str(self.root))
        except KernelError as error:
            # EEXIST: on already. Anything else means that no disk limit would hold.
            if error.errno != EEXIST:
                umount(str(self.root))
                raise

    def _make_image(self) -> None:
        if self._image.exists():
            self._fill(self._image)
            return
        size = self._size or max(_SMALLEST, int(shutil.disk_usage(self._image.parent).free * _ROOM_LEFT))
        for left in self._image.parent.glob("pool.*.new"):
            # By a name of its own each time: the mkfs of a server that died may still be at work on the last one.
            left.unlink()
        unfinished = self._image.with_suffix(f".{os.getpid()}.new")
        with kernel_op("create", str(unfinished)), open(unfinished, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size & ~0xFFFF)
        _format(unfinished)
        self._fill(unfinished)
        with kernel_op("rename", str(self._image)):
            unfinished.rename(self._image)

    def _fill(self, image: Path) -> None:
        if self._reserve:
            with kernel_op("fallocate", str(image)), image.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, image.stat().st_size)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with kernel_op("lock", str(self._lock)):
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                os.close(lock)
                raise
        try:
            yield
        finally:
            os.close(lock)


def _number(path: str) -> int:
    with kernel_op("read", path):
        return int(Path(path).read_text("ascii"))


def _delete(parent: Path, name: str) -> None:
    try:
        _native.subvolume_delete(str(parent), name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_kernel_error(error) from error


def _format(path: Path) -> None:
    program = shutil.which("mkfs.btrfs", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise KernelError("mkfs.btrfs", "mkfs.btrfs", ENOENT)
    argv = [program, "-q", "-m", "single", "-d", "single", str(path)]
    done = subprocess.run(argv, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise KernelError("mkfs.btrfs: " + done.stderr.decode(errors="replace")[-300:].strip(), str(path), EINVAL)
