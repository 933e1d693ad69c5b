"""The platform through its HTTP API alone, as a client in any language would: JSON, bytes, tar and WebSocket frames."""

import json
import tarfile
from asyncio import to_thread
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar
from urllib.parse import quote, urlencode
from uuid import uuid4

import aiohttp
import msgspec
from yarl import URL

from dsec.model.outcome import ExecResult
from dsec.model.plan import Usage
from dsec.model.spec import SandboxSpec
from dsec.model.views import ExecRequest, FileView, Page, ProcessView, SandboxEvent, SandboxView
from dsec.testing.suite.callers import Refused

__all__ = ["OverHttp"]

T = TypeVar("T")
Query = Mapping[str, str | int | float | bool | None]
_DATA = 1, 2


def address(path: str, query: Query | None) -> str:
    given = {
        name: json.dumps(v) if isinstance(v, bool) else str(v) for name, v in (query or {}).items() if v is not None
    }
    return path + ("?" + urlencode(given, quote_via=quote) if given else "")


class OverHttp:
    """A Caller over aiohttp and nothing of the SDK."""

    surface = "http"

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"},
            # Thousands at once wait to be taken from the server's queue: a busy machine is no absent one.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
            connector=aiohttp.TCPConnector(limit=0),
            max_field_size=1 << 16,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, *, query: Query | None = None, body: Any = None, request_id: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("open() comes first")
        headers = {} if method == "GET" else {"Idempotency-Key": request_id or uuid4().hex}
        if isinstance(body, msgspec.Struct | dict):
            headers["Content-Type"], body = "application/json", msgspec.json.encode(body)
        try:
            url = URL(self._url + address(path, query), encoded=True)
            async with self._session.request(method, url, data=body, headers=headers) as response:
                if response.status >= 300:
                    raise self._refusal(response.status, await response.read())
                yield response
        except aiohttp.ClientError as error:
            raise Refused("unavailable", str(error), {}) from error

    @staticmethod
    def _refusal(status: int, content: bytes) -> Refused:
        problem = json.loads(content)
        if problem["status"] != status:
            raise AssertionError(f"status {status}, and the problem says {problem['status']}")
        return Refused(problem["code"], problem.get("detail", ""), problem.get("fields", {}))

    async def _json(self, kind: type[T], method: str, path: str, **more: Any) -> T:
        async with self._asked(method, path, **more) as response:
            return msgspec.json.decode(await response.read(), type=kind)

    async def _done(self, method: str, path: str, **more: Any) -> None:
        async with self._asked(method, path, **more) as response:
            await response.read()

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, request_id: str | None = None) -> SandboxView:
        return await self._json(SandboxView, "POST", "/v1/sandboxes", body=spec, request_id=request_id)

    async def look(self, box: str) -> SandboxView:
        return await self._json(SandboxView, "GET", f"/v1/sandboxes/{box}")

    async def story(self, box: str) -> list[SandboxEvent]:
        return await self._json(list[SandboxEvent], "GET", f"/v1/sandboxes/{box}/events")

    async def usage(self, box: str) -> Usage:
        return await self._json(Usage, "GET", f"/v1/sandboxes/{box}/metrics")

    async def renew(self, box: str, ttl: float) -> SandboxView:
        return await self._json(SandboxView, "POST", f"/v1/sandboxes/{box}/renew", query={"ttl": ttl})

    async def stop(self, box: str) -> SandboxView:
        return await self._json(SandboxView, "DELETE", f"/v1/sandboxes/{box}")

    async def stop_job(self, job: str) -> None:
        await self._done("POST", "/v1/sandboxes/stop", body={"job": job})

    async def listed(self, *, job: str | None = None, state: str | None = None) -> list[SandboxView]:
        found: list[SandboxView] = []
        query = {"job": job, "state": state, "limit": 1000, "cursor": None}
        while True:
            page = await self._json(Page, "GET", "/v1/sandboxes", query=query)
            found += page.items
            if page.next_cursor is None:
                return found
            query["cursor"] = page.next_cursor

    # -- commands ----------------------------------------------------------------------------------------------------

    async def run(self, box: str, request: ExecRequest, request_id: str | None = None) -> ExecResult:
        return await self._json(
            ExecResult, "POST", f"/v1/sandboxes/{box}/exec", body=request, request_id=request_id
        )  # fmt: skip

    async def start(self, box: str, request: ExecRequest) -> ProcessView:
        return await self._json(ProcessView, "POST", f"/v1/sandboxes/{box}/processes", body=request)

    async def process(self, box: str, process: str) -> ProcessView:
        return await self._json(ProcessView, "GET", f"/v1/sandboxes/{box}/processes/{process}")

    async def wait(self, box: str, process: str) -> ProcessView:
        return await self._json(ProcessView, "POST", f"/v1/sandboxes/{box}/processes/{process}/wait")

    async def end(self, box: str, process: str) -> None:
        await self._done("DELETE", f"/v1/sandboxes/{box}/processes/{process}")

    async def output(self, box: str, process: str) -> AsyncGenerator[bytes, None]:
        if self._session is None:
            raise RuntimeError("open() comes first")
        url = f"{self._url}/v1/sandboxes/{box}/processes/{process}/stream"
        async with self._session.ws_connect(url, max_msg_size=8 << 20) as socket:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    if message.data[0] not in _DATA:
                        raise AssertionError(f"a frame of kind {message.data[0]}")
                    yield message.data[1:]
                elif message.type is aiohttp.WSMsgType.TEXT and json.loads(message.data)["event"] == "ended":
                    return

    async def open_session(self, box: str) -> str:
        return str((await self._json(dict[str, Any], "POST", f"/v1/sandboxes/{box}/sessions", body={}))["id"])

    async def run_in_session(self, box: str, session: str, command: str, *, timeout: float | None = None) -> ExecResult:
        body = {"command": command, "timeout": timeout}
        return await self._json(ExecResult, "POST", f"/v1/sandboxes/{box}/sessions/{session}/run", body=body)

    async def close_session(self, box: str, session: str) -> None:
        await self._done("DELETE", f"/v1/sandboxes/{box}/sessions/{session}")

    # -- files -------------------------------------------------------------------------------------------------------

    async def write(
        self, box: str, path: str, data: bytes | AsyncIterable[bytes], *, user: str | None = None
    ) -> FileView:
        query = {"path": path, "make_parents": True, "user": user}
        return await self._json(FileView, "PUT", f"/v1/sandboxes/{box}/files", query=query, body=data)

    async def read(self, box: str, path: str, *, user: str | None = None) -> AsyncGenerator[bytes, None]:
        query = {"path": path, "user": user}
        async with self._asked("GET", f"/v1/sandboxes/{box}/files", query=query) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def stat(self, box: str, path: str) -> FileView:
        return await self._json(FileView, "GET", f"/v1/sandboxes/{box}/files/stat", query={"path": path})

    async def listing(self, box: str, path: str) -> list[FileView]:
        return await self._json(list[FileView], "GET", f"/v1/sandboxes/{box}/files/list", query={"path": path})

    async def remove(self, box: str, path: str, *, recursive: bool = False) -> None:
        query = {"path": path, "recursive": recursive}
        await self._done("POST", f"/v1/sandboxes/{box}/files/remove", query=query)

    async def move(self, box: str, source: str, target: str) -> None:
        query = {"source": source, "target": target, "replace": True}
        await self._done("POST", f"/v1/sandboxes/{box}/files/move", query=query)

    async def fetch_tree(self, box: str, path: str, target: Path) -> set[str]:
        with TemporaryFile() as spool:
            async with self._asked("GET", f"/v1/sandboxes/{box}/files/tree", query={"path": path}) as response:
                async for piece in response.content.iter_chunked(1 << 20):
                    await to_thread(spool.write, piece)
            spool.seek(0)
            return await to_thread(unpacked, spool, target)

    async def send_tree(self, box: str, source: Path, path: str) -> None:
        with TemporaryFile() as spool:
            await to_thread(packed, source, spool)
            spool.seek(0)
            await self.send_archive(box, spool, path)

    async def send_archive(self, box: str, archive: bytes | IO[bytes], path: str) -> None:
        """Sends a tar as it is."""
        await self._done("PUT", f"/v1/sandboxes/{box}/files/tree", query={"path": path}, body=archive)


def packed(source: Path, spool: IO[bytes]) -> None:
    with tarfile.open(fileobj=spool, mode="w") as archive:
        archive.add(source, arcname=".")


def unpacked(spool: IO[bytes], target: Path) -> set[str]:
    """Unpacks with the standard library's filter for data of strangers."""
    refused: set[str] = set()
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=spool) as archive:
        for member in archive:
            try:
                archive.extract(member, target, filter="data")
            except tarfile.FilterError:
                refused.add(member.name.removeprefix("./"))
    return refused
