"""Processes of the fake API server: real local processes, and their recorded output."""

import asyncio
import os
import signal

from dsec.model.outcome import Outcome
from dsec.model.views import ExecRequest, ProcessView


class Job:
    """A started process and its recorded output."""

    def __init__(self, request: ExecRequest, process_id: str) -> None:
        self.id = process_id
        self.request = request
        self.output = {1: bytearray(), 2: bytearray()}
        self.changed = asyncio.Condition()
        self.process: asyncio.subprocess.Process
        self.returncode: int | None = None

    async def run(self) -> None:
        argv = self.request.argv or ("/bin/sh", "-c", self.request.shell or "")
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        if self.request.stdin:
            self.process.stdin.write(self.request.stdin)
        if not self.request.keep_stdin and self.request.pty is None:
            self.process.stdin.close()

    async def follow(self) -> None:
        async def copy(kind: int, source: asyncio.StreamReader) -> None:
            while piece := await source.read(1 << 16):
                self.output[kind] += piece
                await self.tell()

        await asyncio.gather(copy(1, self.process.stdout), copy(2, self.process.stderr))
        self.returncode = await self.process.wait()
        await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def kill(self, number: int = signal.SIGKILL) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def view(self) -> ProcessView:
        code = self.returncode
        ended = {} if code is None else {
            "outcome": Outcome.EXITED if code >= 0 else Outcome.SIGNALLED,
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
        }  # fmt: skip
        return ProcessView(
            id=self.id, argv=self.request.argv, pid=self.process.pid, running=code is None, started=1.0,
            stdout_bytes_total=len(self.output[1]), stderr_bytes_total=len(self.output[2]), **ended,
        )  # fmt: skip
