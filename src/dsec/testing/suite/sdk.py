"""The platform through its SDK."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import dsec
from dsec.model.outcome import ExecResult
from dsec.model.plan import Usage
from dsec.model.spec import SandboxSpec
from dsec.model.views import ExecRequest, FileView, ProcessView, SandboxEvent, SandboxView
from dsec.testing.suite.callers import Refused

__all__ = ["OverSdk"]


@contextmanager
def told() -> Iterator[None]:
    """The SDK's errors as the suite's."""
    try:
        yield
    except dsec.DSecError as error:
        raise Refused(error.code, error.detail, dict(error.fields)) from error


def given(request: ExecRequest) -> dict[str, object]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(request).items()
        if name not in ("argv", "shell", "pty", "keep_stdin")
    }


class OverSdk:
    """A Caller over `dsec.DSecClient`."""

    surface = "sdk"

    def __init__(self, url: str, key: str) -> None:
        self._client = dsec.DSecClient(url=url, api_key=key)
        self._boxes: dict[str, dsec.Sandbox] = {}

    async def open(self) -> None:
        await self._client.open()

    async def close(self) -> None:
        self._boxes.clear()
        await self._client.close()

    async def _box(self, box: str) -> dsec.Sandbox:
        if box not in self._boxes:
            self._boxes[box] = await self._client.get(box)
        return self._boxes[box]

    async def create(self, spec: SandboxSpec, request_id: str | None = None) -> SandboxView:
        values = msgspec.structs.asdict(spec)
        del values["backend"]  # run_container says it
        values = {name: value for name, value in values.items() if value is not msgspec.UNSET}
        with told():
            made = await self._client.run_container(dsec.DSecContainerRunArgs(**values), request_id=request_id)
        self._boxes[made.id] = made
        return made.view

    async def look(self, box: str) -> SandboxView:
        with told():
            return await (await self._box(box)).info()

    async def story(self, box: str) -> list[SandboxEvent]:
        with told():
            return await (await self._box(box)).events()

    async def usage(self, box: str) -> Usage:
        with told():
            return await (await self._box(box)).metrics()

    async def renew(self, box: str, ttl: float) -> SandboxView:
        with told():
            return await (await self._box(box)).renew(ttl)

    async def stop(self, box: str) -> SandboxView:
        with told():
            return await (await self._box(box)).stop()

    async def stop_job(self, job: str) -> None:
        with told():
            await self._client.stop_many(job=job)

    async def listed(self, *, job: str | None = None, state: str | None = None) -> list[SandboxView]:
        with told():
            return [box.view for box in await self._client.sandboxes(job=job, state=state)]

    async def run(self, box: str, request: ExecRequest, request_id: str | None = None) -> ExecResult:
        with told():
            target, more = await self._box(box), given(request)
            if request.shell is not None:
                return await target.run_shell(request.shell, request_id=request_id, **more)  # type: ignore[arg-type]
            return await target.exec(request.argv, request_id=request_id, **more)  # type: ignore[arg-type]

    async def start(self, box: str, request: ExecRequest) -> ProcessView:
        with told():
            process = await (await self._box(box)).start(
                request.argv, pty=request.pty, keep_stdin=request.keep_stdin, **given(request)  # type: ignore[arg-type]
            )  # fmt: skip
            return process.view

    async def process(self, box: str, process: str) -> ProcessView:
        with told():
            return (await (await self._box(box)).attach(process)).view

    async def wait(self, box: str, process: str) -> ProcessView:
        with told():
            return await (await (await self._box(box)).attach(process)).wait()

    async def end(self, box: str, process: str) -> None:
        with told():
            await (await (await self._box(box)).attach(process)).stop()

    async def output(self, box: str, process: str) -> AsyncGenerator[bytes, None]:
        with told():
            pieces = (await (await self._box(box)).attach(process)).stream()
            try:
                async for piece in pieces:
                    yield piece.data
            finally:
                await pieces.aclose()

    async def open_session(self, box: str) -> str:
        with told():
            return (await (await self._box(box)).open_session()).id

    async def run_in_session(self, box: str, session: str, command: str, *, timeout: float | None = None) -> ExecResult:
        with told():
            return await (await self._box(box)).run_shell(command, session=session, timeout=timeout)

    async def close_session(self, box: str, session: str) -> None:
        with told():
            for found in await (await self._box(box)).sessions():
                if found.id == session:
                    await found.close()

    async def write(
        self, box: str, path: str, data: bytes | AsyncIterable[bytes], *, user: str | None = None
    ) -> FileView:
        with told():
            return await (await self._box(box)).files.write(path, data, user=user)

    async def read(self, box: str, path: str, *, user: str | None = None) -> AsyncGenerator[bytes, None]:
        with told():
            async for piece in (await self._box(box)).files.read_stream(path, user=user):
                yield piece

    async def stat(self, box: str, path: str) -> FileView:
        with told():
            return await (await self._box(box)).files.stat(path)

    async def listing(self, box: str, path: str) -> list[FileView]:
        with told():
            return await (await self._box(box)).files.list(path)

    async def remove(self, box: str, path: str, *, recursive: bool = False) -> None:
        with told():
            await (await self._box(box)).files.remove(path, recursive=recursive)

    async def move(self, box: str, source: str, target: str) -> None:
        with told():
            await (await self._box(box)).files.move(source, target)

    async def fetch_tree(self, box: str, path: str, target: Path) -> set[str]:
        with told():
            done = await (await self._box(box)).files.download(path, target)
            return {refusal.path for refusal in done.refused}

    async def send_tree(self, box: str, source: Path, path: str) -> None:
        with told():
            await (await self._box(box)).files.upload(source, path)
