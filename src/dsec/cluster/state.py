"""The state directory as the server sees it: one server at a time, its address for others, the keys that it starts with."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.model.errors import Conflict
from dsec.ports.clock import Clock

__all__ = ["Credentials", "StateDirectory"]

_ID_KEY_BYTES = 32


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
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                raise Conflict(f"{self.path} is used by the server with process id {holder}", pid=holder) from error
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            try:
                yield
            finally:
                os.ftruncate(lock, 0)
        finally:
            os.close(lock)

    def holder(self) -> int | None:
        """Process id of the server that holds the directory; None where none does."""
        try:
            lock = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(lock, 32, 0).strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(lock)
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


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
