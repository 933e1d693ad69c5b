"""Files of a sandbox, carried out by aether as the asked user: the permissions are the kernel's own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from dsec.edge.door import Door
from dsec.edge.execution import broken, failed, opened
from dsec.edge.operations import Operations, fingerprint_of
from dsec.edge.resident import Resident
from dsec.model import aether as wire
from dsec.model.errors import Conflict, DSecError, InvalidArgument, SandboxLost, TooLarge
from dsec.model.views import FileEvent, FileView, TreeWritten
from dsec.ports.agent import Channel, Frame
from dsec.web import OCTETS, TAR, Call, Socket, Stream

__all__ = [
    "Files", "EntriesQuery", "MakeQuery", "MoveQuery", "PathQuery", "ReadQuery", "RemoveQuery", "StatQuery", "WatchQuery",
    "WriteQuery",
]  # fmt: skip

_encode = msgspec.json.Encoder().encode
_LIST_MAX = 100_000
_DEPTH_MAX = 1024
_PATH_MAX = 4096
_LIST_BYTES_MAX = 16 << 20
_NUMBER_MAX = (1 << 63) - 1


class PathQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: absolute, or from the sandbox's directory. `user`: who acts; None: the sandbox's user."""

    path: str
    user: str | None = None


class ReadQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`offset` and `length` in bytes; None: to the end."""

    path: str
    user: str | None = None
    offset: int = 0
    length: int | None = None


class WriteQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`mode`: permission bits as a decimal number; None: those the file has, 0644 for a new one."""

    path: str
    user: str | None = None
    mode: int | None = None
    make_parents: bool = False
    append: bool = False


class StatQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`follow`: of what a symbolic link leads to."""

    path: str
    user: str | None = None
    follow: bool = True


class EntriesQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`depth` 1 is the directory's own entries; at most `limit` of them."""

    path: str
    user: str | None = None
    depth: int = 1
    limit: int = 10_000


class MakeQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`mode`: as for a write. `parents`: make what is missing above it; it may exist already."""

    path: str
    user: str | None = None
    mode: int | None = None
    parents: bool = False


class MoveQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`replace`: a target that exists is replaced."""

    source: str
    target: str
    user: str | None = None
    replace: bool = False


class RemoveQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`recursive`: a directory with all that is in it."""

    path: str
    user: str | None = None
    recursive: bool = False


class WatchQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`recursive`: the directories below it too."""

    path: str
    user: str | None = None
    recursive: bool = False


def _view(info: wire.FileInfo, digest: str | None = None) -> FileView:
    kind: Any = info.kind
    return FileView(
        path=info.path,
        kind=kind,
        size=info.size,
        mode=info.mode & 0o7777,
        uid=info.uid,
        gid=info.gid,
        mtime=info.mtime_ns / 1e9,
        target=info.target,
        sha256=digest,
    )


def _path(resident: Resident, path: str, field: str = "path") -> str:
    if not path or "\0" in path or len(path.encode(errors="surrogateescape")) > _PATH_MAX:
        raise InvalidArgument(f"1 to {_PATH_MAX} bytes without NUL", field=field)
    return path if path.startswith("/") else resident.surroundings.cwd.rstrip("/") + "/" + path


def _user(resident: Resident, user: str | None) -> str:
    if user is None:
        return resident.surroundings.user
    if not user or "\0" in user or len(user) > 256:
        raise InvalidArgument("a name or number, with or without `:group`", field="user")
    return user


def _mode(mode: int | None) -> int | None:
    if mode is not None and not 0 <= mode <= 0o7777:
        raise InvalidArgument("0 to 4095 (octal 7777)", field="mode")
    return mode


class Piped:
    """The bytes that aether sends, as an answer's chunks. It owns its visit and its channel, also when nobody reads it."""

    def __init__(self, owed: AsyncExitStack, resident: Resident, channel: Channel) -> None:
        self._owed = owed
        self._resident = resident
        self._channel = channel

    async def _next(self) -> Frame:
        try:
            return await self._channel.receive()
        except SandboxLost as error:
            raise await broken(self._resident, error) from error

    async def head(self) -> wire.FileInfo:
        """What aether says of the file before its bytes."""
        reply = await self._next()
        if not isinstance(reply, wire.FileReply):
            raise failed(reply)
        return reply.info

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        frame = await self._next()
        if type(frame) is tuple and frame[0] == wire.FRAME_STDOUT:
            return frame[1]
        if isinstance(frame, wire.DoneReply):
            raise StopAsyncIteration
        raise failed(frame)

    async def aclose(self) -> None:
        """Closes the channel and ends the visit."""
        await self._owed.aclose()


class Files:
    """Handlers of the routes under /files, called like them."""

    def __init__(self, door: Door, operations: Operations) -> None:
        self._door = door
        self._operations = operations

    # -- reading -----------------------------------------------------------------------------------------------------

    async def read_file(self, call: Call[ReadQuery, None]) -> Stream:
        query = call.query
        for field, value in (("offset", query.offset), ("length", query.length)):
            if value is not None and not 0 <= value <= _NUMBER_MAX:
                raise InvalidArgument(f"0 to {_NUMBER_MAX}", field=field)

        def request(resident: Resident) -> wire.Request:
            path, user = _path(resident, query.path), _user(resident, query.user)
            return wire.FileReadRequest(path=path, user=user, offset=query.offset, length=query.length)

        piped = await self._piped(call, request)
        try:
            info = await piped.head()
        except BaseException:
            await piped.aclose()
            raise
        return Stream(chunks=piped, media=OCTETS, headers=((b"x-dsec-file", _encode(_view(info))),))

    async def read_tree(self, call: Call[PathQuery, None]) -> Stream:
        def request(resident: Resident) -> wire.Request:
            return wire.TreeReadRequest(path=_path(resident, call.query.path), user=_user(resident, call.query.user))

        return Stream(chunks=await self._piped(call, request), media=TAR)

    async def _piped(self, call: Call[Any, Any], request: Callable[[Resident], wire.Request]) -> Piped:
        async with AsyncExitStack() as stack:
            resident = stack.enter_context(self._door.enter(call))
            channel = await stack.enter_async_context(opened(resident, request(resident)))
            return Piped(stack.pop_all(), resident, channel)

    async def stat_file(self, call: Call[StatQuery, None]) -> FileView:
        query = call.query
        with self._door.enter(call) as resident:
            return _view(await self._stat(resident, query.path, query.user, query.follow))

    async def _stat(self, resident: Resident, path: str, user: str | None, follow: bool) -> wire.FileInfo:
        request = wire.FileStatRequest(path=_path(resident, path), user=_user(resident, user), follow=follow)
        async with opened(resident, request) as channel:
            reply = await channel.receive()
        if not isinstance(reply, wire.FileReply):
            raise failed(reply)
        return reply.info

    async def list_files(self, call: Call[EntriesQuery, None]) -> list[FileView]:
        query = call.query
        if not 1 <= query.depth <= _DEPTH_MAX or not 1 <= query.limit <= _LIST_MAX:
            raise InvalidArgument(
                f"depth 1 to {_DEPTH_MAX}, limit 1 to {_LIST_MAX}",
                field="limit" if 1 <= query.depth <= _DEPTH_MAX else "depth",
            )
        found: list[FileView] = []
        size = 0
        with self._door.enter(call) as resident:
            request = wire.FileListRequest(
                path=_path(resident, query.path), user=_user(resident, query.user), depth=query.depth, limit=query.limit
            )
            async with opened(resident, request) as channel:
                while not isinstance(reply := await channel.receive(), wire.DoneReply):
                    if not isinstance(reply, wire.FilesReply) or len(found) + len(reply.items) > _LIST_MAX:
                        raise failed(reply)
                    size += sum(len(info.path) + len(info.target or "") for info in reply.items)
                    if size > _LIST_BYTES_MAX:  # deep trees and long names are the sandbox's choice, this memory is not
                        raise TooLarge("the paths are too long together: ask for less depth", limit=_LIST_BYTES_MAX)
                    found += map(_view, reply.items)
        return found

    async def watch_files(self, call: Call[WatchQuery, None], socket: Socket) -> None:
        query = call.query
        with self._door.enter(call) as resident:
            request = wire.FileWatchRequest(
                path=_path(resident, query.path), user=_user(resident, query.user), recursive=query.recursive
            )
            async with opened(resident, request) as channel:
                reply = await channel.receive()
                if not isinstance(reply, wire.DoneReply):
                    raise failed(reply)
                await socket.accept()
                await socket.until_gone(self._events(channel, socket))

    @staticmethod
    async def _events(channel: Channel, socket: Socket) -> None:
        while True:
            reply = await channel.receive()
            if not isinstance(reply, wire.FileEventReply):
                raise failed(reply)
            event: Any = reply.event
            await socket.send_text(_encode(FileEvent(event=event, path=reply.path)).decode())

    # -- writing -----------------------------------------------------------------------------------------------------

    async def write_file(self, call: Call[WriteQuery, None]) -> FileView:
        query = call.query
        mode = _mode(query.mode)
        with self._door.enter(call) as resident:
            request = wire.FileWriteRequest(
                path=_path(resident, query.path),
                user=_user(resident, query.user),
                mode=mode,
                make_parents=query.make_parents,
                append=query.append,
            )

            async def run() -> FileView:
                written = await self._write(resident, request, call)
                info = await self._stat(resident, query.path, query.user, True)
                return _view(info, written.sha256)

            found = await self._operations.once(
                resident, call.request_id, "file_write", fingerprint_of(request), run, FileView
            )
            await self._same_body(call, None if query.append else found.sha256)
            return found

    async def write_tree(self, call: Call[PathQuery, None]) -> TreeWritten:
        with self._door.enter(call) as resident:
            request = wire.TreeWriteRequest(
                path=_path(resident, call.query.path), user=_user(resident, call.query.user)
            )

            async def run() -> TreeWritten:
                written = await self._write(resident, request, call)
                return TreeWritten(size=written.size, sha256=written.sha256)

            found = await self._operations.once(
                resident, call.request_id, "tree_write", fingerprint_of(request), run, TreeWritten
            )
            await self._same_body(call, found.sha256)
            return found

    async def _same_body(self, call: Call[Any, Any], digest: str | None) -> None:
        """A repeat answered from the record has not read its body: it must be the same bytes. Raises Conflict."""
        if call.body_ended or call.request_id is None:
            return
        hashed = sha256()
        async for chunk in call.chunks():
            hashed.update(chunk)
        if digest is not None and hashed.hexdigest() != digest:
            raise Conflict("this request_id belongs to another request", request_id=call.request_id)

    async def _write(self, resident: Resident, request: wire.Request, call: Call[Any, Any]) -> wire.WrittenReply:
        """Sends the body as it comes; a body that is cut leaves nothing, since its end is never told."""
        async with opened(resident, request) as channel:
            try:
                async for chunk in call.chunks():
                    for start in range(0, len(chunk), wire.MAX_PAYLOAD):
                        await channel.send(chunk[start : start + wire.MAX_PAYLOAD])
                    if channel.answered:  # refused before it took everything
                        break
                else:
                    await channel.end_of_input()
            except SandboxLost as error:  # the helper died, and what it or aether said last may still be there
                raise await self._refusal(channel, error) from error
            reply = await channel.receive()
        if not isinstance(reply, wire.WrittenReply):
            raise failed(reply)
        return reply

    @staticmethod
    async def _refusal(channel: Channel, error: SandboxLost) -> Exception:
        try:
            reply = await channel.receive()
        except DSecError as other:
            return error if isinstance(other, SandboxLost) else other
        return failed(reply)

    async def make_directory(self, call: Call[MakeQuery, None]) -> FileView:
        query = call.query
        mode = _mode(query.mode)
        with self._door.enter(call) as resident:
            request = wire.FileMkdirRequest(
                path=_path(resident, query.path),
                user=_user(resident, query.user),
                mode=0o755 if mode is None else mode,
                parents=query.parents,
            )
            return await self._changed(call, resident, "file_mkdir", request, query.path)

    async def move_file(self, call: Call[MoveQuery, None]) -> FileView:
        query = call.query
        with self._door.enter(call) as resident:
            request = wire.FileMoveRequest(
                source=_path(resident, query.source, "source"),
                target=_path(resident, query.target, "target"),
                user=_user(resident, query.user),
                replace=query.replace,
            )
            return await self._changed(call, resident, "file_move", request, query.target)

    async def _changed(
        self, call: Call[Any, Any], resident: Resident, kind: str, request: wire.Request, path: str
    ) -> FileView:
        async def run() -> FileView:
            await self._done(resident, request)
            return _view(await self._stat(resident, path, call.query.user, False))

        return await self._operations.once(resident, call.request_id, kind, fingerprint_of(request), run, FileView)

    async def remove_file(self, call: Call[RemoveQuery, None]) -> None:
        query = call.query
        with self._door.enter(call) as resident:
            request = wire.FileRemoveRequest(
                path=_path(resident, query.path), user=_user(resident, query.user), recursive=query.recursive
            )

            async def run() -> bool:
                await self._done(resident, request)
                return True

            await self._operations.once(resident, call.request_id, "file_remove", fingerprint_of(request), run, bool)

    @staticmethod
    async def _done(resident: Resident, request: wire.Request) -> None:
        async with opened(resident, request) as channel:
            reply = await channel.receive()
        if not isinstance(reply, wire.DoneReply):
            raise failed(reply)
