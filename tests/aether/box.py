"""What tests of aether do with one sandbox: whole operations over its socket."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsec.edge.agent import UnixAgent
from dsec.model import aether as wire
from dsec.ports.agent import Channel

__all__ = ["ENV", "Box", "Ran"]

ENV = ("PATH=/usr/local/bin:/usr/bin:/bin",)
_count = itertools.count()


@dataclass
class Ran:
    """What one command gave."""

    ended: wire.EndedReply
    out: bytes
    err: bytes
    lost: list[wire.LostReply] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        return self.ended.exit_code


async def collect(channel: Channel) -> Ran:
    """Everything until the end; `failed` is raised as an assertion with its code first."""
    out, err, lost = bytearray(), bytearray(), []
    while True:
        frame = await channel.receive()
        if isinstance(frame, tuple):
            (out if frame[0] == wire.FRAME_STDOUT else err).extend(frame[1])
        elif isinstance(frame, wire.LostReply):
            lost.append(frame)
        elif isinstance(frame, wire.EndedReply):
            return Ran(frame, bytes(out), bytes(err), lost)
        elif isinstance(frame, wire.FailedReply):
            raise AssertionError(f"{frame.code} {frame.what} {frame.detail}")
        else:
            assert isinstance(frame, wire.StartedReply)


def request(argv: Sequence[str], **more: object) -> wire.ExecRequest:
    fields: dict[str, object] = {
        "process_id": f"p{next(_count)}",
        "argv": tuple(argv),
        "env": ENV,
        "cwd": "/",
        "make_cwd": False,
        "user": "",
        "stdin": False,
        "pty": None,
        "timeout_ms": 20_000,
        "output_limit": 1 << 16,
        "keep": False,
        "open_files": 256,
        "stream": True,
    }
    return wire.ExecRequest(**(fields | more))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Box:
    """A running sandbox."""

    agent: UnixAgent
    host_pid: int

    async def run(self, *argv: str, stdin: bytes | None = None, **more: object) -> Ran:
        async with await self.agent.begin(request(argv, stdin=stdin is not None, **more)) as channel:
            if stdin is not None:
                await channel.send(stdin)
                await channel.end_of_input()
            return await collect(channel)

    async def sh(self, text: str, **more: object) -> Ran:
        return await self.run("sh", "-c", text, **more)

    async def refusal(self, message: wire.Request) -> tuple[str, str]:
        """Code and `what` of the `failed` reply that the request gets."""
        async with await self.agent.begin(message) as channel:
            while True:
                frame = await channel.receive()
                if isinstance(frame, wire.FailedReply):
                    return frame.code, frame.what
                assert not isinstance(frame, wire.EndedReply | wire.DoneReply | wire.WrittenReply), frame

    async def open(self, session: str, shell: str = "", **more: object) -> wire.SessionInfo:
        fields: dict[str, object] = {"env": ENV, "cwd": "/", "user": "", "open_files": 512}
        reply = await self.agent.call(wire.OpenSessionRequest(session_id=session, shell=shell, **(fields | more)))  # type: ignore[arg-type]
        assert isinstance(reply, wire.SessionReply)
        return reply.info

    async def in_session(self, session: str, command: str, timeout_ms: int | None = 20_000) -> Ran:
        message = wire.RunInSessionRequest(
            session_id=session, process_id=f"p{next(_count)}", command=command, timeout_ms=timeout_ms, output_limit=0
        )
        async with await self.agent.begin(message) as channel:
            return await collect(channel)

    async def write(self, path: str, data: bytes, **more: object) -> wire.WrittenReply:
        fields: dict[str, object] = {"user": "", "mode": None, "make_parents": False, "append": False}
        async with await self.agent.begin(wire.FileWriteRequest(path=path, **(fields | more))) as channel:  # type: ignore[arg-type]
            await channel.send(data)
            await channel.end_of_input()
            reply = await channel.receive()
        assert isinstance(reply, wire.WrittenReply), reply
        return reply

    async def read(self, path: str, offset: int = 0, length: int | None = None, user: str = "") -> bytes:
        message = wire.FileReadRequest(path=path, user=user, offset=offset, length=length)
        return await self._bytes(message)

    async def tree(self, path: str, user: str = "") -> bytes:
        return await self._bytes(wire.TreeReadRequest(path=path, user=user))

    async def _bytes(self, message: wire.Request) -> bytes:
        out = bytearray()
        async with await self.agent.begin(message) as channel:
            while True:
                frame = await channel.receive()
                if isinstance(frame, tuple):
                    out += frame[1]
                elif isinstance(frame, wire.DoneReply):
                    return bytes(out)
                elif isinstance(frame, wire.FailedReply):
                    raise AssertionError(f"{frame.code} {frame.what} {frame.detail}")

    async def put_tree(self, path: str, archive: bytes, user: str = "") -> wire.Reply:
        async with await self.agent.begin(wire.TreeWriteRequest(path=path, user=user)) as channel:
            await channel.send(archive)
            await channel.end_of_input()
            reply = await channel.receive()
        assert not isinstance(reply, tuple)
        return reply

    async def list(self, path: str, depth: int = 1, limit: int = 1000) -> list[wire.FileInfo]:
        items: list[wire.FileInfo] = []
        message = wire.FileListRequest(path=path, user="", depth=depth, limit=limit)
        async with await self.agent.begin(message) as channel:
            while isinstance(frame := await channel.receive(), wire.FilesReply):
                items += frame.items
        assert isinstance(frame, wire.DoneReply), frame
        return items
