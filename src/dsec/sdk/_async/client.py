"""The client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.model.errors import Busy, Unavailable
from dsec.model.spec import Batch
from dsec.model.views import BatchItem, ImageView, Me, Page, SandboxState, SandboxView, StopMany, Stopped
from dsec.sdk._async.sandbox import Sandbox
from dsec.sdk._async.transport import REPEATS, Transport, new_request_id, path_of
from dsec.sdk.arguments import DSecContainerRunArgs
from dsec.sdk.environment import find_endpoint
from dsec.sdk.pending import PENDING_CLIENT, refusing
from dsec.sdk.records import SandboxFailed
from dsec.sdk.wire import error_from_problem

__all__ = ["DSecClient"]

_view = msgspec.json.Decoder(SandboxView)
_item = msgspec.json.Decoder(BatchItem)
_page = msgspec.json.Decoder(Page)
_stopped = msgspec.json.Decoder(Stopped)
_images = msgspec.json.Decoder(list[ImageView])
_image = msgspec.json.Decoder(ImageView)
_me = msgspec.json.Decoder(Me)
_PAGE = 1000
_LEAST_WAIT = 0.05


class DSecClient:
    """A client of one DSec server. An async context manager, or `open()` and `close()`.

    `url`: None means DSEC_URL, the credentials file of `dsec up`, or http://127.0.0.1:7380. `api_key`: None means
    DSEC_API_KEY or that file. `ca_file`: PEM file of the authority of an https server; None means DSEC_CA_FILE, that file,
    or the system's. Raises Unauthenticated where there is no key, InvalidArgument for a bad URL.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, ca_file: str | None = None) -> None:
        self._transport = Transport(find_endpoint(url, api_key, ca_file))

    async def open(self) -> None:
        """Make ready. No connection is made yet; me() checks the server and the key."""
        await self._transport.open()

    async def close(self) -> None:
        """Close every connection. Sandboxes and started processes go on."""
        await self._transport.close()

    async def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float = 120.0, request_id: str | None = None
    ) -> Sandbox:
        """Create a container sandbox and wait until it runs, at most `timeout` seconds.

        A busy platform is asked again after its `retry_after`, until the time is over: then Busy is raised. The same
        `request_id` gives the same sandbox. Cancelling undoes the sandbox: at once, or, with a
        `request_id` of yours, unless it is asked for again within the server's grace time. Raises InvalidArgument, NotFound (image or
        layer), Unsupported, QuotaExceeded, Busy, ImageUnavailable, RuntimeFailure, DeadlineExceeded, Unavailable.
        """
        body = msgspec.json.encode(args.spec())
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        # Nobody else knows a key that is made here, so nobody comes back for it.
        cancel = None if request_id else path_of("v1", "sandboxes", "cancel", query={"project": args.project})
        while True:
            try:
                view = await self._transport.call(
                    "POST",
                    "/v1/sandboxes",
                    _view,
                    body=body,
                    request_id=request_id,
                    deadline=ends - loop.time(),
                    cancel=cancel,
                )
                return Sandbox(self._transport, view)
            except Busy as busy:
                wait = _retry_after(busy)
                if loop.time() + wait >= ends:
                    raise
                await asyncio.sleep(wait)

    async def run_containers(
        self, args: DSecContainerRunArgs, count: int, *, window: int = 16, request_id: str | None = None
    ) -> AsyncGenerator[Sandbox | SandboxFailed, None]:
        """Create `count` sandboxes of one kind, yielding each as it becomes ready, or why it failed; in no set order.

        At most `window` are being created at any moment. A broken stream is taken up again under the same key, so no
        sandbox is made twice; Unavailable is raised where that fails. Leaving the loop early stops asking for more;
        those not yet yielded end by their ttl. Use `contextlib.aclosing` to leave it early at a set moment.
        """
        spec, key = args.spec(), request_id or new_request_id()
        places = list(range(count))
        while places:
            batch = Batch(spec=spec, count=len(places), window=window, key=key)
            undone: list[int] = []
            async for item in self._resumed(batch):
                if item.sandbox is not None and item.sandbox.state is SandboxState.GONE:
                    undone.append(places[item.index])
                else:
                    yield self._made(item, places[item.index])
            places, key = undone, new_request_id()

    async def _resumed(self, batch: Batch) -> AsyncIterator[BatchItem]:
        """Each item once, over as many connections as it takes. A server undoes what it made and could not tell before a
        connection broke; a repeat then shows it as gone."""
        seen: set[int] = set()
        failures = 0
        while True:
            before = len(seen)
            broken = Unavailable(f"the batch ended after {len(seen)} of {batch.count} sandboxes")
            try:
                async for item in self._batch(batch):
                    if item.index not in seen:
                        seen.add(item.index)
                        yield item
            except Unavailable as error:
                broken = error
            if len(seen) == batch.count:
                return
            failures = failures + 1 if len(seen) == before else 0
            if failures > len(REPEATS):
                raise broken
            await asyncio.sleep(REPEATS[max(failures - 1, 0)])

    async def _batch(self, batch: Batch) -> AsyncIterator[BatchItem]:
        body = msgspec.json.encode(batch)
        async with self._transport.stream(
            "POST", "/v1/sandboxes/batch", body=body, request_id=batch.key, silence=None
        ) as response:
            async for line in response.content:
                if line.strip():
                    yield _item.decode(line)

    def _made(self, item: BatchItem, index: int) -> Sandbox | SandboxFailed:
        if item.sandbox is not None:
            return Sandbox(self._transport, item.sandbox)
        if item.problem is not None:
            return SandboxFailed(index=index, error=error_from_problem(item.problem))
        return SandboxFailed(index=index, error=Unavailable("the server said neither sandbox nor problem"))

    async def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id, also one that has ended and is still remembered. Raises NotFound."""
        return Sandbox(
            self._transport, await self._transport.call("GET", path_of("v1", "sandboxes", sandbox_id), _view)
        )

    async def sandboxes(
        self,
        *,
        job: str | None = None,
        labels: Mapping[str, str] | None = None,
        state: SandboxState | str | None = None,
    ) -> list[Sandbox]:
        """Sandboxes of the key's project and those below it: of `job`, with all `labels`, in `state`, where given; without
        `state` also those that have ended and are still remembered."""
        found: list[Sandbox] = []
        cursor: str | None = None
        while True:
            path = path_of(
                "v1",
                "sandboxes",
                query={"job": job, "state": None if state is None else str(state), "cursor": cursor, "limit": _PAGE},
            )
            for name, value in (labels or {}).items():
                path += path_of("", query={"label": f"{name}={value}"}).replace("/?", "&", 1)
            page = await self._transport.call("GET", path, _page)
            found += [Sandbox(self._transport, view) for view in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def stop_many(
        self, *, job: str | None = None, labels: Mapping[str, str] | None = None, request_id: str | None = None
    ) -> list[str]:
        """Stop all live sandboxes of `job` and with all `labels`; at least one must be given. Answers their ids."""
        body = msgspec.json.encode(StopMany(job=job, labels=dict(labels or {})))
        answer = await self._transport.call(
            "POST", "/v1/sandboxes/stop", _stopped, body=body, request_id=request_id, deadline=None
        )
        return list(answer.stopped)

    async def images(self) -> list[ImageView]:
        """Names of images and layers that sandboxes can be made of."""
        return await self._transport.call("GET", "/v1/images", _images)

    async def image(self, name: str) -> ImageView:
        """One of them. Raises NotFound."""
        return await self._transport.call("GET", path_of("v1", "images", name), _image)

    async def me(self) -> Me:
        """Who this key belongs to and what it may do. Raises Unauthenticated."""
        return await self._transport.call("GET", "/v1/me", _me)

    async def __aenter__(self) -> "DSecClient":
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return refusing(PENDING_CLIENT, "DSecClient", name)


def _retry_after(busy: Busy) -> float:
    stated = busy.fields.get("retry_after")
    return max(float(stated), _LEAST_WAIT) if isinstance(stated, int | float) else 1.0
