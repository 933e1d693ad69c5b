"""The state directory as the server sees it: one server at a time, its address for others, the keys that it starts with."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EAGAIN
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.model.errors import Conflict
from dsec.ports.clock import Clock

__all__ = ["Credentials", "StateDirectory"]

_ID_KEY_BYTES = 32
# struct flock of 64-bit Linux: type, whence, start, length, process id.
_FLOCK = "hh4xqqi4x"


class Credentials(Struct, frozen=True, kw_only=True):
    """credentials.json: what a client on this host needs. `ca_file`: to trust a self-signed certificate."""

    url: str
    api_key: str
    ca_file: str | None = None


class StateDirectory:
    """Files of the state directory `path` (mode 0700) that belong to no room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = path / "server.lock"
        self._credentials = path / "credentials.json"

    def make(self) -> None:
        """Make the directory if it is not there."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this process. Raises Conflict, naming the holder's process id, where another has it."""
        # A record lock is the process's own: no child that was being made when it died can go on holding it.
        with os.fdopen(os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (EACCES, EAGAIN):
                    raise
                holder = _holder_of(lock.fileno())
                raise Conflict(f"{self.path} is used by the server with process id {holder}", pid=holder) from error
            # Over what is there, so that no room is needed on a disk that is full.
            os.pwrite(lock.fileno(), f"{os.getpid():<19}\n".encode(), 0)
            try:
                yield
            finally:
                os.pwrite(lock.fileno(), b" " * 19 + b"\n", 0)

    def holder(self) -> int | None:
        """Process id of the server that holds the directory; None where none does. Not to be asked by the holder itself."""
        try:
            with self._lock.open("r+b") as lock:
                return _holder_of(lock.fileno())
        except FileNotFoundError:
            return None

    def id_key(self, clock: Clock) -> bytes:
        """The key of this platform's sandbox ids, made at the first start."""
        path = self.path / "id.key"
        try:
            return path.read_bytes()
        except FileNotFoundError:
            key = clock.random(_ID_KEY_BYTES)
            _write(path, key)
            return key

    def credentials(self) -> Credentials | None:
        """What is in credentials.json; None without the file. Raises msgspec.DecodeError for a damaged one."""
        try:
            return msgspec.json.decode(self._credentials.read_bytes(), type=Credentials)
        except FileNotFoundError:
            return None

    def keep_credentials(self, credentials: Credentials) -> None:
        """Write credentials.json, mode 0600, on the disk when this returns."""
        _write(self._credentials, msgspec.json.format(msgspec.json.encode(credentials)) + b"\n")


def _holder_of(lock: int) -> int | None:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
