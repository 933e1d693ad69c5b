"""Sandboxes of a test, stopped at its end."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

from dsec.model.outcome import ExecResult
from dsec.model.plan import Usage
from dsec.model.spec import SandboxSpec
from dsec.model.views import ExecRequest, FileView, ProcessView, SandboxView
from dsec.testing.suite.callers import Caller, Refused

__all__ = ["Box", "Boxes", "eventually"]

BUSY_TRIES = 40


class Box:
    """One sandbox and the caller that made it."""

    def __init__(self, caller: Caller, view: SandboxView) -> None:
        self.caller = caller
        self.view = view
        self.id = view.id

    async def exec(self, argv: Sequence[str], request_id: str | None = None, **more: Any) -> ExecResult:
        return await self.caller.run(self.id, ExecRequest(argv=tuple(argv), **more), request_id)

    async def shell(self, text: str, request_id: str | None = None, **more: Any) -> ExecResult:
        return await self.caller.run(self.id, ExecRequest(shell=text, **more), request_id)

    async def said(self, text: str, **more: Any) -> str:
        """What a command prints that must succeed."""
        result = await self.shell(text, **more)
        assert (result.outcome, result.exit_code) == ("exited", 0), (text, result)
        return result.text

    async def start(self, text: str, **more: Any) -> ProcessView:
        return await self.caller.start(self.id, ExecRequest(argv=("/bin/sh", "-c", text), **more))

    async def write(self, path: str, data: bytes | AsyncIterable[bytes], **more: Any) -> FileView:
        return await self.caller.write(self.id, path, data, **more)

    def pieces(self, path: str) -> AsyncGenerator[bytes, None]:
        return self.caller.read(self.id, path)

    async def read(self, path: str, **more: Any) -> bytes:
        return b"".join([piece async for piece in self.caller.read(self.id, path, **more)])

    async def names(self, path: str) -> dict[str, FileView]:
        """What a directory holds, by name."""
        return {view.path.rsplit("/", 1)[-1]: view for view in await self.caller.listing(self.id, path)}

    async def usage(self) -> Usage:
        return await self.caller.usage(self.id)

    async def stop(self) -> SandboxView:
        return await self.caller.stop(self.id)


class Boxes:
    """Makes sandboxes of one backend and stops them all at the end."""

    def __init__(self, caller: Caller, backend: str) -> None:
        self.caller = caller
        self.backend = backend
        self._made: list[Box] = []

    def spec(self, image: str = "box:1", **args: Any) -> SandboxSpec:
        small = {"memory_limit_mb": 128, "disk_limit_mb": 256, "pids_limit": 128}
        return SandboxSpec(container_image=image, backend=self.backend, **{**small, **args})  # type: ignore[arg-type]

    async def make(self, image: str = "box:1", **args: Any) -> Box:
        """One that runs; a platform that is busy is asked again, after the time that it says."""
        spec = self.spec(image, **args)
        for _ in range(BUSY_TRIES):
            try:
                return self.keep(Box(self.caller, await self.caller.create(spec)))
            except Refused as refused:
                if refused.code != "busy":
                    raise
                await asyncio.sleep(float(refused.fields["retry_after"] or 1))
        raise AssertionError(f"busy {BUSY_TRIES} times")

    def keep(self, box: Box) -> Box:
        self._made.append(box)
        return box

    async def close(self) -> None:
        made, self._made = self._made, []
        await asyncio.gather(*(box.stop() for box in made))


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    """Asks until the answer is yes."""
    ends = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > ends:
            raise AssertionError(f"it did not come true within {seconds} s")
        await asyncio.sleep(0.05)
