"""Stores in a directory or a bucket, through obstore. Retries of what a bucket refuses for a while are obstore's own."""

import asyncio
import os
import re
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, S3Store

from dsec.images.stores.layout import VERSION, Folder, Item, Stored
from dsec.model.errors import (
    ImageUnavailable,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from dsec.model.stores import StoreOptions

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

__all__ = ["Directory", "Objects", "open_bucket", "open_directory"]

MAX_LISTED = 2_000_000
TIMEOUTS: "ClientConfig" = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "120s"}
RETRY_SECONDS = 60
_MULTIPART = 64 << 20
_PIECE = 1 << 20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class Objects:
    """A store in whatever obstore speaks to. `url`: for people."""

    def __init__(self, url: str, client: LocalStore | S3Store) -> None:
        self.url = url
        self._client = client

    async def read(self, item: Item, limit: int) -> bytes:
        with self._plainly(item):
            found = await self._client.get_async(item.path)
            if found.meta["size"] > limit:
                raise _too_long(item, limit)
            raw = bytearray()
            async for piece in found.stream(min_chunk_size=_PIECE):
                raw += piece
                if len(raw) > limit:
                    raise _too_long(item, limit)
            return bytes(raw)

    async def read_range(self, item: Item, offset: int, length: int) -> bytes:
        with self._plainly(item):
            raw = bytes(await self._client.get_range_async(item.path, start=offset, length=length))
        if len(raw) != length:
            raise ImageUnavailable(f"{self.url}: {item.path} ends before byte {offset + length}")
        return raw

    async def size(self, item: Item) -> int | None:
        try:
            with self._plainly(item):
                return int((await self._client.head_async(item.path))["size"])
        except NotFound:
            return None

    async def write(self, item: Item, data: bytes | Path) -> None:
        size = len(data) if isinstance(data, bytes) else (await asyncio.to_thread(data.stat)).st_size
        with self._plainly(item):
            await self._client.put_async(item.path, data, use_multipart=size > _MULTIPART, max_concurrency=2)

    async def publish(self, layer: str, manifest: bytes, parts: Sequence[Item]) -> None:
        await self.write(Item(Folder.MANIFESTS, layer, layer), manifest)

    async def list(self, folder: Folder, below: str = "") -> AsyncIterator[Stored]:
        start = f"{Item(folder, '').path}/"
        seen = 0
        with self._plainly(Item(folder, below)):
            # A prefix ends at a slash for obstore, so what lies below is asked for by folder.
            async for batch in self._client.list(start + below):
                seen += len(batch)
                if seen > MAX_LISTED:
                    raise ImageUnavailable(f"{self.url}: {folder} has more than {MAX_LISTED} entries")
                for meta in batch:
                    name = meta["path"].removeprefix(start)
                    yield Stored(name, int(meta["size"]), meta["last_modified"].timestamp())

    async def remove(self, item: Item) -> None:
        try:
            with self._plainly(item):
                await self._client.delete_async(item.path)
        except NotFound:
            return

    async def close(self) -> None:
        return

    @contextmanager
    def _plainly(self, item: Item) -> Iterator[None]:
        """obstore's exceptions as the taxonomy's; of their text the first line, which is for people."""
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{self.url} has no {item.path}", what="store item") from None
        except UnauthenticatedError as error:
            raise Unauthenticated(f"{self.url}: {_first_line(error)}") from error
        except (PermissionDeniedError, PermissionError) as error:
            raise PermissionDenied(f"{self.url}: {_first_line(error)}") from error
        except (BaseError, OSError, ValueError) as error:
            raise Unavailable(f"{self.url}: {_first_line(error)}") from error


class Directory(Objects):
    """A store below a directory of this host: a disk of its own, or any shared POSIX filesystem."""

    def __init__(self, root: Path) -> None:
        super().__init__(f"file://{root}", LocalStore(root))
        self.root = root
        self._unsafe: set[Path] = set()

    async def write(self, item: Item, data: bytes | Path) -> None:
        await super().write(item, data)
        if item.folder in (Folder.PACKS, Folder.BLOBS, Folder.MAPS):
            self._unsafe.add(self.root / item.path)
        elif item.folder in (Folder.MANIFESTS, Folder.NAMES, Folder.SIGNATURES, Folder.PROFILES):
            await self._settle({self.root / item.path}, item)

    async def publish(self, layer: str, manifest: bytes, parts: Sequence[Item]) -> None:
        # A host that stops now must not come back with a manifest and without what it names.
        unsafe, self._unsafe = self._unsafe, set()
        await self._settle(unsafe, Item(Folder.PACKS, ""))
        await super().publish(layer, manifest, parts)

    async def remove(self, item: Item) -> None:
        await super().remove(item)
        self._unsafe.discard(self.root / item.path)

    async def _settle(self, paths: set[Path], item: Item) -> None:
        with self._plainly(item):
            await asyncio.to_thread(_make_safe, paths)

    def place(self, item: Item) -> Path:
        """Where an item is, for what can be mounted from there."""
        return self.root / item.path

    def remove_leftovers(self, before: float) -> None:
        """Removes files of pushes that were killed while they wrote them, if untouched since `before` (Unix seconds)."""
        for folder, _, names in os.walk(self.root / f"v{VERSION}"):
            for name in names:
                path = Path(folder, name)
                # obstore's name for what is not done yet; no item has one like it.
                if re.search(r"#\d+$", name) and path.stat().st_mtime <= before:
                    path.unlink(missing_ok=True)


def _make_safe(paths: set[Path]) -> None:
    for path in [*paths, *{path.parent for path in paths}]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def open_directory(options: StoreOptions, *, create: bool) -> Directory:
    """The store of file:///path, which is made if `create`. Raises InvalidArgument for what is no absolute path, and NotFound."""
    parts = urllib.parse.urlsplit(options.url)
    path = Path(urllib.parse.unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute() or ".." in path.parts:
        raise InvalidArgument(f"{options.url!a} is not file:///absolute/path", field="store")
    if create:
        path.mkdir(parents=True, exist_ok=True)
    elif not path.is_dir():
        raise NotFound(f"{path} is no directory", what="store")
    return Directory(path)


def open_bucket(options: StoreOptions) -> Objects:
    """The store of s3://bucket/prefix. Raises InvalidArgument.

    Without keys in `options` the credentials are those that AWS's own clients find in the environment or on the machine.
    """
    parts = urllib.parse.urlsplit(options.url)
    if not _BUCKET.fullmatch(parts.netloc):
        raise InvalidArgument(f"{options.url!a} is not s3://bucket/prefix", field="store")
    if options.endpoint.startswith("http://") and not options.allow_http:
        raise InvalidArgument(
            f"{options.endpoint} is plain HTTP, which anybody on the way can read: set allow_http to use it",
            field="endpoint",
        )
    given: S3Config = {"virtual_hosted_style_request": not options.endpoint}
    if options.endpoint:
        given["endpoint"] = options.endpoint
    if options.region:
        given["region"] = options.region
    if options.access_key:
        given["access_key_id"] = options.access_key
        given["secret_access_key"] = options.secret_key
        if options.token:
            given["session_token"] = options.token
    client: ClientConfig = {**TIMEOUTS, "allow_http": options.allow_http}
    retry: RetryConfig = {"max_retries": 6, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    prefix = parts.path.strip("/")
    store = S3Store(parts.netloc, prefix=prefix or None, config=given, client_options=client, retry_config=retry)
    return Objects(f"s3://{parts.netloc}/{prefix}", store)


def _too_long(item: Item, limit: int) -> ImageUnavailable:
    return ImageUnavailable(f"{item.path} of the store is longer than {limit} bytes")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
