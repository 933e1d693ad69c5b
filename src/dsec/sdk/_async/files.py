"""Files of a sandbox."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dsec.model.errors import InvalidArgument, NotFound, RuntimeFailure, TooLarge, Unavailable
from dsec.model.views import FileEvent, FileView
from dsec.sdk._async.transport import DEADLINE, Transport, path_of
from dsec.sdk.packing import Packer, read_pieces
from dsec.sdk.records import Transfer
from dsec.sdk.unpacking import FileReceiver, Unpacker
from dsec.sdk.wire import error_from_close

__all__ = ["Files"]

READ_LIMIT = 256 << 20
_file = msgspec.json.Decoder(FileView)
_files = msgspec.json.Decoder(list[FileView])
_event = msgspec.json.Decoder(FileEvent)


class Written(msgspec.Struct, frozen=True):
    """The answer to an uploaded tree: bytes of the tar that arrived and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


_written = msgspec.json.Decoder(Written)


class Files:
    """The files of one sandbox, as `Sandbox.files`. Paths are absolute, or relative to the sandbox's directory. `user`:
    whose permissions count; None means the sandbox's user. Every call raises NotFound, PermissionDenied, InvalidArgument,
    LimitReached (disk), SandboxLost, and the errors of the transport. Cancelling a write leaves the old file or none."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    def _path(self, *parts: str, **query: str | int | float | bool | None) -> str:
        return path_of("v1", "sandboxes", self._sandbox_id, "files", *parts, query=query)

    async def read(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
        limit: int = READ_LIMIT,
    ) -> bytes:
        """The bytes of a file from `offset` on, at most `length`. Raises TooLarge above `limit` bytes: use read_stream."""
        content = bytearray()
        async for piece in self.read_stream(path, offset=offset, length=length, user=user):
            content += piece
            if len(content) > limit:
                raise TooLarge(f"{path} has more than {limit} bytes; use read_stream() or download()", limit=limit)
        return bytes(content)

    async def read_text(self, path: str, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """A whole file as text. Raises UnicodeDecodeError where it is not in `encoding`."""
        return (await self.read(path, user=user)).decode(encoding)

    async def read_stream(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As `read`, piece by piece. Raises Unavailable where the answer breaks off before its end."""
        target = self._path(path=path, offset=offset or None, length=length, user=user)
        async with self._transport.stream("GET", target) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def write(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = True,
        append: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> FileView:
        """Write a file whole or not at all; `append` adds to its end instead. `mode`: permission bits; None keeps those of
        a file that exists, and is 0o644 for a new one. The SHA-256 that the sandbox reports is compared with what was
        sent. Bytes are sent again after a connection fault, an iterable is not: then Unavailable is raised.
        """
        target = self._path(path=path, mode=mode, make_parents=make_parents, append=append or None, user=user)
        digest = hashlib.sha256()
        if isinstance(data, bytes | bytearray | memoryview):
            digest.update(data)
            content = bytes(data)
            deadline = DEADLINE + len(content) / (1 << 20)
            answer = await self._transport.fetch("PUT", target, body=content, request_id=request_id, deadline=deadline)
        else:
            answer = await self._put(target, _hashed(data, digest), request_id)
        view = _file.decode(answer)
        if view.sha256 is not None and not append and view.sha256 != digest.hexdigest():
            raise RuntimeFailure(f"{path}: what arrived is not what was sent", path=path)
        return view

    async def write_text(
        self, path: str, text: str, *, encoding: str = "utf-8", mode: int | None = None, user: str | None = None
    ) -> FileView:
        """Write a whole file from text; parents are made."""
        return await self.write(path, text.encode(encoding), mode=mode, user=user)

    async def _put(self, target: str, data: AsyncIterator[bytes], request_id: str | None) -> bytes:
        failed: list[Exception] = []

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in data:
                    yield piece
            except Exception as error:
                failed.append(error)
                raise

        try:
            async with self._transport.stream("PUT", target, body=body, request_id=request_id) as response:
                return await response.read()
        except Unavailable:
            if failed:  # the source broke off, and the connection only because of it
                raise failed[0] from None
            raise

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileView:
        """A file's attributes; of the link itself with `follow=False`."""
        return await self._transport.call("GET", self._path("stat", path=path, follow=follow, user=user), _file)

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """True where the path leads to something. Raises PermissionDenied where it cannot be known."""
        try:
            await self.stat(path, user=user)
        except NotFound as error:
            if type(error) is not NotFound or error.fields.get("what") in ("sandbox", "sandbox_id"):
                raise
            return False
        return True

    async def list(
        self, path: str, *, depth: int = 1, limit: int = 10_000, user: str | None = None
    ) -> "list[FileView]":
        """What a directory holds, `depth` levels of it, at most `limit` entries; links are not followed."""
        return await self._transport.call(
            "GET", self._path("list", path=path, depth=depth, limit=limit, user=user), _files
        )

    async def mkdir(
        self,
        path: str,
        *,
        mode: int = 0o755,
        parents: bool = True,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None:
        """Make a directory; with `parents`, those above it too, and one that exists is well."""
        await self._transport.fetch(
            "POST", self._path("mkdir", path=path, mode=mode, parents=parents, user=user), request_id=request_id
        )

    async def move(
        self, source: str, target: str, *, replace: bool = True, user: str | None = None, request_id: str | None = None
    ) -> None:
        """Rename. Raises Conflict where the target exists and `replace` is not set."""
        await self._transport.fetch(
            "POST", self._path("move", source=source, target=target, replace=replace, user=user), request_id=request_id
        )

    async def remove(
        self, path: str, *, recursive: bool = False, user: str | None = None, request_id: str | None = None
    ) -> None:
        """Remove a file or an empty directory, or a whole tree with `recursive`; links are not followed."""
        await self._transport.fetch(
            "POST", self._path("remove", path=path, recursive=recursive, user=user), request_id=request_id
        )

    async def upload(
        self,
        source: str | Path,
        target: str,
        *,
        user: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Transfer:
        """Copy a local file, or what a local directory holds, to `target` in the sandbox; parents are made.

        Streams with a fixed amount of memory. Links go as links, hard links too; what is neither file, directory, link
        nor pipe is left out and named in `Transfer.refused`. A file that changes its size meanwhile raises InvalidArgument,
        and the transfer is broken off. `progress` is called with the bytes of each piece sent.
        """
        local = Path(source)
        if not await asyncio.to_thread(os.path.isdir, local):
            return await self._upload_file(local, target, user, progress)
        packer = Packer(local)
        answer = _written.decode(
            await self._put(self._path("tree", path=target, user=user), _threaded(packer.pieces(), progress), None)
        )
        if answer.sha256 != packer.sha256:
            raise RuntimeFailure(f"{target}: what arrived is not what was sent", path=target)
        return packer.summary

    async def _upload_file(
        self, local: Path, target: str, user: str | None, progress: Callable[[int], None] | None
    ) -> Transfer:
        try:
            status = await asyncio.to_thread(os.stat, local)
        except OSError as error:
            raise InvalidArgument(f"{local}: {error.strerror}", field="source") from error
        digest = hashlib.sha256()
        remote = self._path(path=target, mode=status.st_mode & 0o777, make_parents=True, user=user)
        pieces = _threaded(read_pieces(local, digest), progress)
        view = _file.decode(await self._put(remote, pieces, None))
        if view.sha256 is not None and view.sha256 != digest.hexdigest():
            raise RuntimeFailure(f"{target}: what arrived is not what was sent", path=target)
        return Transfer(entries=1, size=view.size)

    async def download(
        self,
        source: str,
        target: str | Path,
        *,
        user: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Transfer:
        """Copy a file of the sandbox, or what a directory of it holds, to the local path `target`; parents are made.

        The sandbox is not trusted: nothing outside `target` is touched, links are made but never followed, absolute links
        into the tree are made relative, and every entry that would lead outside, every device and every pipe is left out
        and named in `Transfer.refused`. Owners are the caller's own, set-id bits are dropped. Memory is fixed.
        `progress` is called with the bytes of each piece received. Raises RuntimeFailure for what is no archive.
        """
        view = await self.stat(source, user=user)
        if view.kind == "dir":
            receiver: Unpacker | FileReceiver = Unpacker(
                Path(target), view.path if view.path.startswith("/") else source
            )
            remote = self._path("tree", path=source, user=user)
        else:
            receiver = FileReceiver(Path(target), view.mode)
            remote = self._path(path=source, user=user)
        await asyncio.to_thread(receiver.open)
        try:
            async with self._transport.stream("GET", remote) as response:
                await _fed(response.content.iter_any(), receiver, progress)
            return await asyncio.to_thread(receiver.finish)
        finally:
            receiver.close()

    async def watch(
        self, path: str, *, recursive: bool = True, user: str | None = None
    ) -> AsyncGenerator[FileEvent, None]:
        """Changes below `path`, from the moment the first item is asked for; `overflow` means: list again. Ends never by
        itself; leave the loop to end it. Raises Unavailable where the connection breaks."""
        channel = await self._transport.websocket(self._path("watch", path=path, recursive=recursive, user=user))
        try:
            while True:
                message = await channel.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise error_from_close(channel.close_code, str(message.extra or ""), f"the watch of {path}")
                yield _event.decode(message.data)
        finally:
            await channel.close()


async def _hashed(data: AsyncIterable[bytes], digest: "hashlib._Hash") -> AsyncIterator[bytes]:
    async for piece in data:
        digest.update(piece)
        yield piece


async def _threaded(pieces: Iterator[bytes], progress: Callable[[int], None] | None) -> AsyncIterator[bytes]:
    """Pieces made in a worker thread, one ahead: reading a disk does not stop the event loop, nor wait for the network."""
    loop = asyncio.get_running_loop()
    ahead = loop.run_in_executor(None, next, pieces, b"")
    try:
        while piece := await asyncio.shield(ahead):
            ahead = loop.run_in_executor(None, next, pieces, b"")
            yield piece
            if progress is not None:
                progress(len(piece))
    finally:
        await _over(ahead)


async def _fed(
    pieces: AsyncIterable[bytes], receiver: Unpacker | FileReceiver, progress: Callable[[int], None] | None
) -> None:
    """Feeds the receiver in a worker thread, while the next piece comes in."""
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    try:
        async for piece in pieces:
            if writing is not None:
                await asyncio.shield(writing)
            writing = loop.run_in_executor(None, receiver.feed, piece)
            if progress is not None:
                progress(len(piece))
        if writing is not None:
            await asyncio.shield(writing)
    finally:
        if writing is not None:
            await _over(writing)


async def _over(work: asyncio.Future[Any]) -> None:
    """Returns when a worker thread has let go of what it was given; how it ended is told elsewhere."""
    await asyncio.wait((work,))
    if not work.cancelled():
        work.exception()
