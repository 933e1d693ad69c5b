"""Processes that outlive the call that started them, and streams attached to them."""

import asyncio
import math
from typing import Any

import msgspec
from msgspec import Struct

from dsec.edge.door import Door
from dsec.edge.execution import Execution, broken, failed, name_of, opened, pty_size, send_all, wire_request
from dsec.edge.operations import Operations, fingerprint_of
from dsec.edge.output import joined
from dsec.edge.resident import Resident
from dsec.model import aether as wire
from dsec.model.errors import DSecError, Interrupted, InvalidArgument, NotFound, SandboxLost
from dsec.model.outcome import Outcome
from dsec.model.views import ExecRequest, ProcessView, PtySize, StreamEvent
from dsec.ports.agent import Channel
from dsec.ports.clock import Clock
from dsec.rules.verdict import Counters
from dsec.web import Call, Socket, SocketGone, problem_of

__all__ = ["Processes", "SignalQuery", "StreamQuery", "WaitQuery"]

_encode = msgspec.json.Encoder().encode
_events = msgspec.json.Decoder(StreamEvent)
_SIGNALS = 64
_WAIT_MAX = 86400.0
_OFFSET_MAX = (1 << 63) - 1


class WaitQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout`: seconds to wait; then the answer is the process as it is. None: until it ends."""

    timeout: float | None = None


class SignalQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`signal`: its number. `tree`: to every process of the command, not to its first alone."""

    signal: int = 15
    tree: bool = False


class StreamQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of each stream from which output is wanted; what is no longer kept is told by a `lost` event."""

    stdout_from: int = 0
    stderr_from: int = 0


class Processes:
    """Handlers of the routes under /processes, called like them."""

    def __init__(self, door: Door, operations: Operations, execution: Execution, clock: Clock) -> None:
        self._door = door
        self._operations = operations
        self._execution = execution
        self._clock = clock

    # -- views -------------------------------------------------------------------------------------------------------

    async def _view(self, resident: Resident, info: wire.ProcessInfo) -> ProcessView:
        ended = info.ended
        outcome = None
        if ended is not None:
            outcome = Outcome(ended.outcome)
            if outcome is Outcome.SIGNALLED and ended.signal == 9:
                # After a restart its start's counts are not known: then any such kill in its sandbox counts.
                before = resident.began_at.get(info.process_id, Counters(0, resident.pids_refused))
                outcome, _ = await self._execution.outcome(resident, ended, before)
        began = resident.row.created + resident.phases.get("total", 0.0)
        return ProcessView(
            id=info.process_id,
            argv=info.argv,
            pid=info.pid,
            running=ended is None,
            started=began + info.started_ms / 1000.0,
            pty=info.pty,
            outcome=outcome,
            exit_code=ended.exit_code if ended else None,
            signal=ended.signal if ended else None,
            stdout_bytes_total=ended.stdout_total if ended else info.stdout_total,
            stderr_bytes_total=ended.stderr_total if ended else info.stderr_total,
            duration=ended.duration_ms / 1000.0 if ended else None,
        )

    async def _listed(self, resident: Resident) -> tuple[wire.ProcessInfo, ...]:
        async with opened(resident, wire.ListProcessesRequest()) as channel:
            reply = await channel.receive()
        if not isinstance(reply, wire.ProcessesReply):
            raise failed(reply)
        return reply.items

    async def _one(self, resident: Resident, process_id: str) -> ProcessView:
        for info in await self._listed(resident):
            if info.process_id == process_id:
                return await self._view(resident, info)
        raise NotFound("no such process", what="process")

    async def _done(self, resident: Resident, request: wire.Request) -> None:
        async with opened(resident, request) as channel:
            reply = await channel.receive()
        if not isinstance(reply, wire.DoneReply):
            raise failed(reply)

    # -- routes ------------------------------------------------------------------------------------------------------

    async def start_process(self, call: Call[None, ExecRequest]) -> ProcessView:
        with self._door.enter(call) as resident:
            process_id = name_of(call.request_id, self._clock)

            async def run() -> ProcessView:
                return await self._start(resident, call.body, process_id)

            mark = fingerprint_of(call.body)
            try:
                return await self._operations.once(resident, call.request_id, "process", mark, run, ProcessView)
            except Interrupted:
                if call.body.stdin:  # it may have got a part of it
                    raise
                for info in await self._listed(resident):  # aether knows how far it came
                    if info.process_id == process_id:
                        return await self._view(resident, info)
                raise

    async def _start(self, resident: Resident, request: ExecRequest, process_id: str) -> ProcessView:
        wanted = wire_request(resident, request, process_id, keep=True, stream=False)
        now = self._clock.now()
        before = Counters(resident.oom_kills, resident.pids_refused)
        async with opened(resident, wanted) as channel:
            reply = await channel.receive()
            if not isinstance(reply, wire.StartedReply):
                raise failed(reply)
            if request.stdin:
                await send_all(channel, request.stdin, end=not request.keep_stdin)
        resident.began_at[process_id] = before
        return ProcessView(
            id=process_id, argv=wanted.argv, pid=reply.pid, running=True, started=now, pty=request.pty is not None
        )

    async def list_processes(self, call: Call[None, None]) -> list[ProcessView]:
        with self._door.enter(call) as resident:
            return [await self._view(resident, info) for info in await self._listed(resident)]

    async def get_process(self, call: Call[None, None]) -> ProcessView:
        with self._door.enter(call) as resident:
            return await self._one(resident, call.params["pid"])

    async def wait_process(self, call: Call[WaitQuery, None]) -> ProcessView:
        timeout = call.query.timeout
        if timeout is not None and not (0 <= timeout <= _WAIT_MAX and math.isfinite(timeout)):
            raise InvalidArgument(f"0 to {_WAIT_MAX:.0f} s", field="timeout")
        with self._door.enter(call) as resident:
            process_id = call.params["pid"]
            wanted = wire.AttachRequest(process_id=process_id, stdout_from=0, stderr_from=0, stream=False)
            try:
                async with asyncio.timeout(timeout), opened(resident, wanted) as channel:
                    while not isinstance(frame := await channel.receive(), wire.EndedReply):
                        if not isinstance(frame, wire.StartedReply | wire.LostReply):
                            raise failed(frame)
            except TimeoutError:
                return await self._one(resident, process_id)
            return await self._one(resident, process_id)

    async def signal_process(self, call: Call[SignalQuery, None]) -> None:
        query = call.query
        if not 1 <= query.signal <= _SIGNALS:
            raise InvalidArgument(f"1 to {_SIGNALS}", field="signal")
        wanted = wire.SignalRequest(process_id=call.params["pid"], signal=query.signal, tree=query.tree)
        await self._acted(call, "signal", wanted)

    async def resize_process(self, call: Call[None, PtySize]) -> None:
        wanted = wire.ResizeRequest(process_id=call.params["pid"], size=pty_size(call.body))
        await self._acted(call, "resize", wanted)

    async def end_process(self, call: Call[None, None]) -> None:
        process_id = call.params["pid"]
        await self._acted(call, "end_process", wire.ForgetRequest(process_id=process_id))
        resident = self._door.lifecycle.residents.get(call.params["id"])
        if resident is not None:
            resident.began_at.pop(process_id, None)

    async def _acted(self, call: Call[Any, Any], kind: str, request: wire.Request) -> None:
        with self._door.enter(call) as resident:

            async def run() -> bool:
                await self._done(resident, request)
                return True

            await self._operations.once(resident, call.request_id, kind, fingerprint_of(request), run, bool)

    # -- streams -----------------------------------------------------------------------------------------------------

    async def stream_process(self, call: Call[StreamQuery, None], socket: Socket) -> None:
        """Both directions at once; ends with the process, with the client, or with the sandbox."""
        query, process_id = call.query, call.params["pid"]
        for field, value in (("stdout_from", query.stdout_from), ("stderr_from", query.stderr_from)):
            if not 0 <= value <= _OFFSET_MAX:
                raise InvalidArgument(f"0 to {_OFFSET_MAX}", field=field)
        wanted = wire.AttachRequest(
            process_id=process_id, stdout_from=query.stdout_from, stderr_from=query.stderr_from, stream=True
        )
        with self._door.enter(call) as resident:
            async with opened(resident, wanted) as channel:
                first = await channel.receive()
                if not isinstance(first, wire.StartedReply):
                    raise failed(first)
                await socket.accept()
                view = await self._one(resident, process_id)
                await socket.send_text(_encode(StreamEvent(event="started", process=view)).decode())
                error = await self._both_ways(resident, process_id, channel, socket)
                if isinstance(error, SandboxLost):
                    error = await broken(resident, error)
        if error is not None:
            await socket.send_text(_encode(StreamEvent(event="problem", problem=problem_of(error))).decode())
            raise error

    async def _both_ways(
        self, resident: Resident, process_id: str, channel: Channel, socket: Socket
    ) -> DSecError | None:
        """The error that ended it; None for an ordinary end, or a client that left."""
        found: DSecError | None = None
        async with asyncio.TaskGroup() as group:
            inward = group.create_task(self._inward(resident, process_id, socket))
            outward = group.create_task(self._outward(resident, process_id, channel, socket))
            await asyncio.wait((inward, outward), return_when=asyncio.FIRST_COMPLETED)
            for task in (inward, outward):
                if task.done():
                    found = found or task.result()
                task.cancel()
        return found

    async def _outward(self, resident: Resident, process_id: str, channel: Channel, socket: Socket) -> DSecError | None:
        try:
            async for frame in joined(channel):
                if type(frame) is tuple:
                    await socket.send_bytes(bytes((frame[0],)) + frame[1])
                elif isinstance(frame, wire.LostReply):
                    stream: Any = frame.stream
                    lost = StreamEvent(event="lost", stream=stream, offset=frame.offset)
                    await socket.send_text(_encode(lost).decode())
                elif isinstance(frame, wire.EndedReply):
                    view = await self._one(resident, process_id)
                    await socket.send_text(_encode(StreamEvent(event="ended", process=view)).decode())
                    return None
                elif not isinstance(frame, wire.StartedReply):
                    raise failed(frame)
            return None
        except SocketGone:
            return None
        except SandboxLost as error:
            return await broken(resident, error)
        except DSecError as error:
            return error

    async def _inward(self, resident: Resident, process_id: str, socket: Socket) -> DSecError | None:
        try:
            async with opened(resident, wire.WriteStdinRequest(process_id=process_id, close=False)) as input_:
                while True:
                    message = await socket.receive()
                    if isinstance(message, bytes):
                        if message[:1] != bytes((wire.FRAME_STDIN,)):
                            raise InvalidArgument("binary frames to a process begin with byte 3", field="frame")
                        await send_all(input_, message[1:], end=False)
                        if input_.answered:  # the process takes no more
                            raise failed(await input_.receive())
                    else:
                        await self._told(resident, process_id, message, input_)
        except SocketGone:
            return None
        except DSecError as error:
            return error

    async def _told(self, resident: Resident, process_id: str, text: str, input_: Channel) -> None:
        try:
            event = _events.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidArgument("not a stream event", field="frame") from error
        if event.event == "signal" and event.signal is not None and 1 <= event.signal <= _SIGNALS:
            await self._done(resident, wire.SignalRequest(process_id=process_id, signal=event.signal, tree=False))
        elif event.event == "resize" and event.size is not None:
            await self._done(resident, wire.ResizeRequest(process_id=process_id, size=pty_size(event.size)))
        elif event.event == "stdin_close":
            await input_.end_of_input()
            reply = await input_.receive()
            if not isinstance(reply, wire.DoneReply):
                raise failed(reply)
            async with opened(resident, wire.WriteStdinRequest(process_id=process_id, close=True)) as closing:
                await closing.end_of_input()
                reply = await closing.receive()
                if not isinstance(reply, wire.DoneReply):
                    raise failed(reply)
        else:
            raise InvalidArgument("from a client: stdin_close, resize with size, signal with signal", field="frame")
