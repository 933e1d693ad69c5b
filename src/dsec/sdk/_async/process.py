"""A process that outlives the call that started it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal

import aiohttp
import msgspec

from dsec.model.errors import InvalidArgument, NotFound, RuntimeFailure, SandboxLost, Unavailable
from dsec.model.views import ProcessView, PtySize, StreamEvent
from dsec.sdk._async.transport import DEADLINE, REPEATS, Transport, path_of
from dsec.sdk.records import Output
from dsec.sdk.wire import error_from_close, error_from_problem

__all__ = ["Process"]

_STDOUT, _STDERR, _STDIN = 1, 2, 3
_INPUT_FRAME = 1 << 17
_WAIT_SLICE = 30.0
_view = msgspec.json.Decoder(ProcessView)
_event = msgspec.json.Decoder(StreamEvent)


class Process:
    """A command started with `Sandbox.start` or found again with `Sandbox.attach`. It lives until it ends, is stopped, or
    its sandbox is; closing the client leaves it running. One reader and any number of writers a Process object; several
    objects may attach to one process, and each sees all output."""

    def __init__(
        self, transport: Transport, sandbox_id: str, view: ProcessView, from_offset: int = 0, stderr_from: int = 0
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._view = view
        self._offsets = {"stdout": from_offset, "stderr": stderr_from}
        self._channel: aiohttp.ClientWebSocketResponse | None = None
        self._opening = asyncio.Lock()
        self._reading = False

    @property
    def id(self) -> str:
        """The process's id, for `Sandbox.attach`: the request_id of its start, or one made by the server."""
        return self._view.id

    @property
    def view(self) -> ProcessView:
        """The process as last heard of."""
        return self._view

    def _path(self, *parts: str, **query: str | int | float | bool | None) -> str:
        return path_of("v1", "sandboxes", self._sandbox_id, "processes", self.id, *parts, query=query)

    async def info(self) -> ProcessView:
        """The process as it is now. Raises NotFound once it is forgotten."""
        self._view = await self._transport.call("GET", self._path(), _view)
        return self._view

    async def stream(self) -> AsyncGenerator[Output, None]:
        """All output from `from_offset` on, as it comes, until the process ends and its output is drained.

        A broken connection is made again where it broke, so nothing is doubled; what the sandbox no longer keeps is said
        in `Output.lost`. Leaving the loop early detaches and leaves the process running. Raises InvalidArgument where
        another reader is at work on this object, SandboxLost, NotFound, and Unavailable.
        """
        if self._reading:
            raise InvalidArgument("this Process is being read already; attach() gives another reader", field="stream")
        self._reading = True
        try:
            failures = 0
            while True:
                try:
                    channel = await self._open()
                    async for piece in self._receive(channel):
                        failures = 0
                        yield piece
                    return
                except Unavailable:
                    await self.detach()
                    if failures == len(REPEATS):
                        raise
                    await asyncio.sleep(REPEATS[failures])
                    failures += 1
        finally:
            self._reading = False
            await self.detach()

    async def _receive(self, channel: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Output]:
        lost: dict[str, int] = {}
        while True:
            message = await channel.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                yield self._output(message.data, lost)
            elif message.type is aiohttp.WSMsgType.TEXT:
                event = _event.decode(message.data)
                if event.process is not None:
                    self._view = event.process
                if event.event == "ended":
                    return
                if event.event == "problem" and event.problem is not None:
                    raise error_from_problem(event.problem)
                if event.event == "lost" and event.stream is not None and event.offset is not None:
                    lost[event.stream] = max(event.offset - self._offsets[event.stream], 0)
                    self._offsets[event.stream] = event.offset
            else:
                raise error_from_close(channel.close_code, str(message.extra or ""), f"the stream of process {self.id}")

    def _output(self, frame: bytes, lost: dict[str, int]) -> Output:
        if not frame or frame[0] not in (_STDOUT, _STDERR):
            raise RuntimeFailure("the server sent a frame of an unknown kind")
        stream: Literal["stdout", "stderr"] = "stdout" if frame[0] == _STDOUT else "stderr"
        data, offset = frame[1:], self._offsets[stream]
        self._offsets[stream] = offset + len(data)
        return Output(stream=stream, data=data, offset=offset, lost=lost.pop(stream, 0))

    async def _open(self) -> aiohttp.ClientWebSocketResponse:
        async with self._opening:
            if self._channel is None or self._channel.closed:
                self._channel = await self._transport.websocket(
                    self._path("stream", stdout_from=self._offsets["stdout"], stderr_from=self._offsets["stderr"])
                )
            return self._channel

    async def write(self, data: bytes) -> None:
        """Write to the process's stdin (or terminal). Waits while the process does not read. Needs `keep_stdin` or a pty.

        Never repeated: raises Unavailable where the connection broke, and then it is unknown how much arrived.
        """
        channel = await self._open()
        try:
            for start in range(0, len(data), _INPUT_FRAME):
                await channel.send_bytes(bytes([_STDIN]) + data[start : start + _INPUT_FRAME])
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"input to process {self.id}: {error}; some of it may have arrived") from error

    async def close_stdin(self) -> None:
        """End of input; a process that reads on sees the end of file. May be called again."""
        channel = await self._open()
        try:
            await channel.send_str(msgspec.json.encode(StreamEvent(event="stdin_close")).decode())
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"end of input to process {self.id}: {error}") from error

    async def signal(self, number: int, *, tree: bool = False, request_id: str | None = None) -> None:
        """Send signal `number` to the process, or to every process of its tree. Raises NotFound once it is forgotten."""
        await self._transport.fetch("POST", self._path("signal", signal=int(number), tree=tree), request_id=request_id)

    async def resize(self, cols: int, rows: int) -> None:
        """Set the size of its terminal in characters, 1..1000 each. Raises InvalidArgument where it has none."""
        await self._transport.fetch("POST", self._path("resize"), body=msgspec.json.encode(PtySize(cols, rows)))

    async def wait(self, timeout: float | None = None) -> ProcessView:
        """Wait until it has ended, or `timeout` seconds: then the answer's `running` is true. Cancelling leaves it be."""
        loop = asyncio.get_running_loop()
        ends = None if timeout is None else loop.time() + timeout
        while True:
            slice_ = _WAIT_SLICE if ends is None else min(max(ends - loop.time(), 0.0), _WAIT_SLICE)
            self._view = await self._transport.call(
                "POST", self._path("wait", timeout=round(slice_, 3)), _view, deadline=slice_ + DEADLINE
            )
            if not self._view.running or (ends is not None and loop.time() >= ends):
                return self._view

    async def detach(self) -> None:
        """Close this object's connection to the process, which goes on; stream() and write() open it again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def stop(self) -> None:
        """End its whole process tree and forget it. One that is gone already, with its sandbox too, may be stopped again."""
        await self.detach()
        try:
            await self._transport.fetch("DELETE", self._path())
        except (NotFound, SandboxLost):
            return
