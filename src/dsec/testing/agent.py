"""An honest fake of aether: it keeps files, processes and sessions in memory and speaks the protocol of ports.agent.

Programs are coroutines by name. What it cannot do it refuses as aether would; faults are planted on purpose (`Fault`).
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import StrEnum
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from dsec.edge.tasks import TaskSet
from dsec.model import aether as wire
from dsec.model.errors import SandboxLost, error_from_code
from dsec.ports.agent import Frame

__all__ = ["FakeAgent", "FakeChannel", "FakeProcess", "Fault", "Program"]


class Fault(StrEnum):
    """refuse: answer runtime_failure; lose_answer: do it, then break the connection without telling; break_before: break
    the connection without doing it."""

    REFUSE = "refuse"
    LOSE_ANSWER = "lose_answer"
    BREAK_BEFORE = "break_before"


class FakeProcess:
    """A program that runs. `write` and `write_error` are its output, `read` its input (b"" at the end)."""

    def __init__(self, request: wire.ExecRequest, pid: int) -> None:
        self.request = request
        self.pid = pid
        self.output: list[tuple[int, bytes]] = []
        self.input: asyncio.Queue[bytes] = asyncio.Queue(64)
        self.ended: wire.EndedReply | None = None
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.killed_by = 0

    async def read(self) -> bytes:
        """The next input."""
        return await self.input.get()

    def write(self, data: bytes) -> None:
        """Output on stdout."""
        self._put(wire.FRAME_STDOUT, data)

    def write_error(self, data: bytes) -> None:
        """Output on stderr."""
        self._put(wire.FRAME_STDERR, data)

    def _put(self, kind: int, data: bytes) -> None:
        for start in range(0, len(data), wire.MAX_PAYLOAD):
            self.output.append((kind, data[start : start + wire.MAX_PAYLOAD]))
        self.changed.set()

    def total(self, kind: int) -> int:
        """Bytes written on one stream."""
        return sum(len(data) for stream, data in self.output if stream == kind)

    def end(self, outcome: str, code: int | None, signal: int | None) -> None:
        """It is over."""
        if self.ended is None:
            self.ended = wire.EndedReply(
                outcome=outcome,
                exit_code=code,
                signal=signal,
                stdout_total=self.total(wire.FRAME_STDOUT),
                stderr_total=self.total(wire.FRAME_STDERR),
                duration_ms=1.0,
                session_ended=False,
            )
            self.changed.set()

    def kill(self, signal: int) -> None:
        """Ends it by a signal."""
        self.killed_by = signal
        if self.task is not None:
            self.task.cancel()
        self.end("signalled", None, signal)

    def info(self) -> wire.ProcessInfo:
        """As aether lists it."""
        return wire.ProcessInfo(
            process_id=self.request.process_id,
            pid=self.pid,
            argv=self.request.argv,
            pty=self.request.pty is not None,
            started_ms=self.pid,
            ended=self.ended,
            stdout_total=self.total(wire.FRAME_STDOUT),
            stderr_total=self.total(wire.FRAME_STDERR),
        )


Program = Callable[[FakeProcess], Awaitable[int]]


async def _true(process: FakeProcess) -> int:
    return 0


async def _false(process: FakeProcess) -> int:
    return 1


async def _echo(process: FakeProcess) -> int:
    process.write(" ".join(process.request.argv[1:]).encode() + b"\n")
    return 0


async def _cat(process: FakeProcess) -> int:
    while data := await process.read():
        process.write(data)
    return 0


async def _hang(process: FakeProcess) -> int:
    await asyncio.Event().wait()
    return 0


async def _env(process: FakeProcess) -> int:
    request = process.request
    process.write("\n".join((*request.env, f"cwd={request.cwd}", f"user={request.user}")).encode())
    return 0


async def _fill(process: FakeProcess) -> int:
    """`fill N`: N bytes on each stream."""
    size = int(process.request.argv[1])
    process.write(bytes(i % 251 for i in range(min(size, 1 << 16))) * max(1, size >> 16) if size else b"")
    process.write_error(b"e" * size)
    return 0


PROGRAMS: dict[str, Program] = {
    "true": _true, "false": _false, "echo": _echo, "cat": _cat, "hang": _hang, "env": _env, "fill": _fill,
}  # fmt: skip


class FakeAgent:
    """One sandbox's aether. `requests` is all it was asked. `faults` maps the class of a request to what goes wrong with the
    next one. `listeners`: a port to the coroutine that answers a connection (it gets all bytes sent so far, gives bytes)."""

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self.programs: dict[str, Program] = dict(PROGRAMS)
        self.requests: list[wire.Request] = []
        self.faults: dict[type, Fault] = {}
        self.processes: dict[str, FakeProcess] = {}
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = {"/"}
        self.sessions: dict[str, wire.SessionInfo] = {}
        self.listeners: dict[int, Callable[[bytes], bytes]] = {}
        self.channels: set[FakeChannel] = set()
        self.dead = False
        self._pids = 1

    async def begin(self, request: wire.Request) -> "FakeChannel":
        """Connects and sends the request."""
        if self.dead:
            raise SandboxLost("aether is gone")
        self.requests.append(request)
        fault = self.faults.pop(type(request), None)
        channel = FakeChannel(self, request, fault)
        if fault is Fault.BREAK_BEFORE:
            channel.broken = True
        else:
            channel.task = self._tasks.spawn(channel.work(), "fake aether")
        self.channels.add(channel)
        return channel

    async def call(self, request: wire.Request) -> wire.Reply:
        """One request, one reply."""
        async with await self.begin(request) as channel:
            reply = await channel.receive()
        if isinstance(reply, tuple):
            raise TypeError("a message was expected")
        if isinstance(reply, wire.FailedReply):
            raise error_from_code(reply.code, reply.detail, {"what": reply.what})
        return reply

    def die(self) -> None:
        """All connections break and no new one is taken."""
        self.dead = True
        for channel in tuple(self.channels):
            channel.sever()
        for process in self.processes.values():
            process.kill(9)

    def next_pid(self) -> int:
        """A fresh number."""
        self._pids += 1
        return self._pids

    async def run(self, process: FakeProcess) -> None:
        """Runs a program to its end, or to its timeout."""
        request = process.request
        timeout = None if request.timeout_ms is None else request.timeout_ms / 1000.0
        try:
            async with asyncio.timeout(timeout):
                code = await self.programs[request.argv[0]](process)
        except TimeoutError:
            process.end("timeout", None, 9)
        else:
            process.end("exited", code, None)

    def start(self, request: wire.ExecRequest) -> FakeProcess | wire.FailedReply:
        """Starts a program, or says why not."""
        if request.argv[0] not in self.programs:
            return wire.FailedReply(code="command_not_found", detail=request.argv[0], what="command")
        process = FakeProcess(request, self.next_pid())
        if not request.stdin:
            process.input.put_nowait(b"")
        self.processes[request.process_id] = process
        process.task = self._tasks.spawn(self.run(process), "fake program")
        return process


def _missing(what: str) -> wire.FailedReply:
    return wire.FailedReply(code="not_found", detail=f"no such {what}", what=what)


class FakeChannel:
    """One operation of a FakeAgent."""

    def __init__(self, agent: FakeAgent, request: wire.Request, fault: Fault | None) -> None:
        self._agent = agent
        self._request = request
        self._fault = fault
        room = 1 << 16 if fault is Fault.LOSE_ANSWER else 64
        self._outbound: asyncio.Queue[Frame | None] = asyncio.Queue(room)
        self._put = self._outbound.put
        self._inbound: asyncio.Queue[bytes] = asyncio.Queue(64)
        self.task: asyncio.Task[None] | None = None
        self.broken = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agent.channels.discard(self)
        if self.task is not None:
            self.task.cancel()
        request = self._request
        if isinstance(request, wire.ExecRequest) and not request.keep:
            process = self._agent.processes.pop(request.process_id, None)
            if process is not None and process.ended is None:
                process.kill(9)

    def sever(self) -> None:
        """The connection breaks."""
        self.broken = True
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        while not self._outbound.empty():
            self._outbound.get_nowait()
        self._outbound.put_nowait(None)

    answered = property(lambda self: not self._outbound.empty())

    async def send(self, data: bytes) -> None:
        """Input of the operation."""
        if self.broken:
            raise SandboxLost("aether closed the connection")
        await self._inbound.put(data)

    async def end_of_input(self) -> None:
        """No more input."""
        await self.send(b"")

    async def receive(self) -> Frame:
        """The next frame."""
        frame = None if self.broken else await self._outbound.get()
        if frame is None:
            self.broken = True
            raise SandboxLost("aether closed the connection")
        return frame

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            yield await self.receive()

    async def work(self) -> None:
        """Carries the operation out."""
        if self._fault is Fault.REFUSE:
            await self._put(wire.FailedReply(code="runtime_failure", detail="planted", what=""))
            return
        if self._fault is Fault.LOSE_ANSWER:
            await self._carry_out()
            self.sever()
            return
        await self._carry_out()

    async def _carry_out(self) -> None:
        match self._request:
            case wire.ExecRequest() as request:
                known = self._agent.processes.get(request.process_id)
                process = known or self._agent.start(request)
                if isinstance(process, wire.FailedReply):
                    await self._put(process)
                else:
                    await self._attach(process, request.stream, feed=request.stdin)
            case wire.AttachRequest() as request:
                found = self._agent.processes.get(request.process_id)
                if found is None:
                    await self._put(_missing("process"))
                else:
                    await self._attach(found, request.stream, (request.stdout_from, request.stderr_from))
            case (
                wire.FileReadRequest()
                | wire.FileWriteRequest()
                | wire.FileStatRequest()
                | wire.FileRemoveRequest() as file
            ):
                await self._file(file)
            case wire.FileListRequest() as request:
                await self._list(request)
            case wire.FileMkdirRequest() as request:
                self._agent.directories.add(request.path)
                await self._put(wire.DoneReply())
            case wire.ConnectRequest() as request:
                await self._tunnel(request.port)
            case other:
                await self._put(await self._short(other))

    async def _attach(
        self, process: FakeProcess, stream: bool, starts: tuple[int, int] = (0, 0), feed: bool = False
    ) -> None:
        await self._put(wire.StartedReply(process_id=process.request.process_id, pid=process.pid))
        feeder = self._agent._tasks.spawn(self._feed(process), "fake stdin") if feed else None
        skip = {wire.FRAME_STDOUT: starts[0], wire.FRAME_STDERR: starts[1]}
        at = 0
        try:
            while True:
                process.changed.clear()
                while at < len(process.output):
                    kind, data = process.output[at]
                    at += 1
                    skipped = min(skip[kind], len(data))
                    skip[kind] -= skipped
                    if stream and data[skipped:]:
                        await self._put((kind, data[skipped:]))
                if process.ended is not None and at == len(process.output):
                    await self._put(process.ended)
                    return
                await process.changed.wait()
        finally:
            if feeder is not None:
                feeder.cancel()

    async def _feed(self, process: FakeProcess) -> None:
        while True:
            data = await self._inbound.get()
            await process.input.put(data)
            if not data:
                return

    async def _short(self, request: wire.Request) -> wire.Reply:
        agent = self._agent
        if isinstance(request, wire.SignalRequest | wire.ResizeRequest | wire.ForgetRequest | wire.WriteStdinRequest):
            process = agent.processes.get(request.process_id)
            if process is None:
                return _missing("process")
            return await self._on_process(process, request)
        match request:
            case wire.HelloRequest():
                return wire.HelloReply(version=wire.VERSION, pid=1)
            case wire.ListProcessesRequest():
                return wire.ProcessesReply(items=tuple(each.info() for each in agent.processes.values()))
            case wire.ListSessionsRequest():
                return wire.SessionsReply(items=tuple(agent.sessions.values()))
            case wire.OpenSessionRequest():
                info = wire.SessionInfo(
                    session_id=request.session_id, shell=request.shell or "/bin/bash", pid=agent.next_pid(), running=True,
                    busy=False, started_ms=0,
                )  # fmt: skip
                agent.sessions[request.session_id] = info
                return wire.SessionReply(info=info)
            case wire.RunInSessionRequest():
                return await self._in_session(request)
            case wire.CloseSessionRequest():
                return wire.DoneReply() if agent.sessions.pop(request.session_id, None) else _missing("session")
            case wire.FileMoveRequest():
                if request.source not in agent.files:
                    return _missing("file")
                agent.files[request.target] = agent.files.pop(request.source)
                return wire.DoneReply()
        return wire.FailedReply(code="unsupported", detail=f"the fake has no {type(request).__name__}", what="")

    async def _in_session(self, request: wire.RunInSessionRequest) -> wire.Reply:
        """The fake's shell language: a command is split at blanks; `exit` ends the session."""
        info = self._agent.sessions.get(request.session_id)
        if info is None:
            return _missing("session")
        self._agent.sessions[request.session_id] = replace(info, busy=True)
        ends = request.command == "exit"
        await self._put(wire.StartedReply(process_id=request.process_id, pid=info.pid))
        await self._put((wire.FRAME_STDOUT, request.command.encode()))
        if ends:
            del self._agent.sessions[request.session_id]
        else:
            self._agent.sessions[request.session_id] = info
        return wire.EndedReply(
            outcome="exited",
            exit_code=0,
            stdout_total=len(request.command),
            stderr_total=0,
            duration_ms=1.0,
            session_ended=ends,
        )

    async def _on_process(
        self,
        process: FakeProcess,
        request: wire.SignalRequest | wire.ResizeRequest | wire.ForgetRequest | wire.WriteStdinRequest,
    ) -> wire.Reply:
        match request:
            case wire.SignalRequest():
                process.kill(request.signal)
            case wire.ForgetRequest():
                process.kill(9)
                del self._agent.processes[request.process_id]
            case wire.WriteStdinRequest():
                while data := await self._inbound.get():
                    await process.input.put(data)
                if request.close:
                    await process.input.put(b"")
        return wire.DoneReply()

    def _info(self, path: str) -> wire.FileInfo | None:
        agent = self._agent
        if path in agent.files:
            kind, size, mode = "file", len(agent.files[path]), 0o644
        elif path in agent.directories:
            kind, size, mode = "dir", 0, 0o755
        else:
            return None
        return wire.FileInfo(path=path, kind=kind, size=size, mode=mode, uid=0, gid=0, mtime_ns=1_500_000_000)

    async def _file(
        self, request: wire.FileReadRequest | wire.FileWriteRequest | wire.FileStatRequest | wire.FileRemoveRequest
    ) -> None:
        files = self._agent.files
        if isinstance(request, wire.FileWriteRequest):
            written = b""
            while data := await self._inbound.get():
                written += data
            files[request.path] = files.get(request.path, b"") + written if request.append else written
            digest = hashlib.sha256(written).hexdigest()
            await self._put(wire.WrittenReply(size=len(written), sha256=digest))
            return
        info = self._info(request.path)
        if info is None:
            await self._put(_missing("file"))
        elif isinstance(request, wire.FileStatRequest):
            await self._put(wire.FileReply(info=info))
        elif isinstance(request, wire.FileRemoveRequest):
            files.pop(request.path, None)
            await self._put(wire.DoneReply())
        elif request.path not in files:
            await self._put(wire.FailedReply(code="invalid_argument", detail="is a directory", what="file"))
        else:
            await self._put(wire.FileReply(info=info))
            data = files[request.path][request.offset :][: request.length]
            for start in range(0, len(data), wire.MAX_PAYLOAD):
                await self._put((wire.FRAME_STDOUT, data[start : start + wire.MAX_PAYLOAD]))
            await self._put(wire.DoneReply())

    async def _list(self, request: wire.FileListRequest) -> None:
        prefix = request.path.rstrip("/") + "/"
        names = sorted(path for path in (*self._agent.files, *self._agent.directories) if path.startswith(prefix))
        infos = [info for info in map(self._info, names[: request.limit]) if info is not None]
        await self._put(wire.FilesReply(items=tuple(infos)))
        await self._put(wire.DoneReply())

    async def _tunnel(self, port: int) -> None:
        answer = self._agent.listeners.get(port)
        if answer is None:
            await self._put(_missing("port"))
            return
        await self._put(wire.DoneReply())
        heard = b""
        while True:
            heard += await self._inbound.get()
            said = answer(heard)
            if said:
                await self._put((wire.FRAME_STDOUT, said))
                await self._put(wire.ClosedReply())
                return
