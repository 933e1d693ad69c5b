"""A small server that speaks the HTTP API, for tests of the client. Commands run as real local processes in a temporary
directory; nothing is isolated. `Faults` says which requests go wrong, and how."""

import asyncio
import hashlib
import json
import os
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from aiohttp import WSMsgType, web

from apijobs import Job
from apinetwork import network_routes
from dsec.model.errors import BY_CODE
from dsec.model.outcome import ExecResult, Outcome
from dsec.model.spec import Batch, SandboxSpec
from dsec.model.views import (
    BatchItem,
    CommitReport,
    CommitRequest,
    ExecRequest,
    FileView,
    Page,
    Problem,
    SandboxState,
    SandboxView,
    SessionRequest,
    SessionRun,
    SessionView,
    StopMany,
    Stopped,
    StreamEvent,
)  # fmt: skip

KEY = "test-key"
encode = msgspec.json.encode


def problem(code: str, detail: str = "", **fields: object) -> Problem:
    kind = BY_CODE[code]
    return Problem(
        type=f"urn:dsec:error:{code}", title=kind.sentence, status=kind.status, code=code, detail=detail, fields=fields
    )


def answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")


def failing(code: str, detail: str = "", **fields: object) -> web.Response:
    document = problem(code, detail, **fields)
    return web.Response(body=encode(document), status=document.status, content_type="application/problem+json")


class Faults:
    """What goes wrong: `before` and `after` count requests whose connection is cut before or after they act."""

    def __init__(self) -> None:
        self.before = 0
        self.after = 0
        self.busy = 0
        self.hang = False
        self.cut_batch_after: int | None = None
        self.undo_when_cut = 0
        self.cut_stream_after: int | None = None
        self.refuse_batch: set[int] = set()
        self.wrong_hash = False


class Server:
    """The fake. `url`, `key`; `seen` lists (method, path, request_id) of every request that came."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults = Faults()
        self.seen: list[tuple[str, str, str | None]] = []
        self.executed: list[ExecRequest] = []
        self.recorded: dict[str, ExecResult] = {}
        self.sandboxes: dict[str, SandboxView] = {}
        self.by_request: dict[str, SandboxView] = {}
        self.jobs: dict[str, Job] = {}
        self.cancelled = 0
        self.closing = ""
        self.http_headers: dict[str, str] = {}
        self.tree: bytes | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.middleware], client_max_size=1 << 30)
        one = "/v1/sandboxes/{id}"
        app.add_routes([
            web.post("/v1/sandboxes", self.create), web.post("/v1/sandboxes/batch", self.batch),
            web.get("/v1/sandboxes", self.listing), web.post("/v1/sandboxes/stop", self.stop_many),
            web.get("/v1/me", self.me), web.get("/v1/images", self.images),
            web.get(one, self.info), web.delete(one, self.stop), web.post(one + "/renew", self.info), web.post(one + "/commit", self.commit), web.get(one + "/metrics", self.usage), web.get(one + "/events", self.story),
            *network_routes(self.sandboxes),
            web.post(one + "/exec", self.exec), web.post(one + "/processes", self.start), web.get(one + "/processes", self.list_jobs),
            web.get(one + "/processes/{pid}", self.job), web.delete(one + "/processes/{pid}", self.forget),
            web.post(one + "/processes/{pid}/wait", self.wait), web.post(one + "/processes/{pid}/signal", self.signal),
            web.post(one + "/processes/{pid}/resize", self.resize), web.get(one + "/processes/{pid}/stream", self.stream),
            web.post(one + "/sessions", self.open_session), web.post(one + "/sessions/{sid}/run", self.run_session),
            web.delete(one + "/sessions/{sid}", self.close_session),
            web.get(one + "/files", self.read), web.put(one + "/files", self.write), web.get(one + "/files/stat", self.stat),
            web.get(one + "/files/list", self.list_files), web.post(one + "/files/{verb:mkdir|move|remove}", self.change),
            web.get(one + "/files/tree", self.read_tree), web.put(one + "/files/tree", self.write_tree),
            web.get(one + "/files/watch", self.watch), web.route("*", one + "/http/{port}/{path:.*}", self.proxy),
        ])  # fmt: skip
        return app

    @web.middleware
    async def middleware(self, request: web.Request, handler):  # type: ignore[no-untyped-def]
        request_id = request.headers.get("Idempotency-Key")
        self.seen.append((request.method, request.path_qs, request_id))
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return failing("unauthenticated")
        if self.faults.hang:
            await asyncio.sleep(3600)
        if self.faults.before:
            self.faults.before -= 1
            request.transport.abort()
            return web.Response()
        response = await handler(request)
        if self.faults.after:
            self.faults.after -= 1
            request.transport.abort()
        return response

    def make(self, spec: SandboxSpec) -> SandboxView:
        view = SandboxView(
            id=f"s{len(self.sandboxes):031d}", state=SandboxState.RUNNING, spec=spec, project="p", created=1.0, phases={"launch": 0.002},
        )  # fmt: skip
        self.sandboxes[view.id] = view
        return view

    async def create(self, request: web.Request) -> web.Response:
        spec = msgspec.json.decode(await request.read(), type=SandboxSpec)
        if self.faults.busy:
            self.faults.busy -= 1
            return failing("busy", retry_after=0.05)
        key = request.headers["Idempotency-Key"]
        if key not in self.by_request:
            self.by_request[key] = self.make(spec)
        return answer(self.by_request[key], 201)

    async def batch(self, request: web.Request) -> web.StreamResponse:
        order = msgspec.json.decode(await request.read(), type=Batch)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for sent, index in enumerate(reversed(range(order.count))):
            if self.faults.cut_batch_after == sent:
                self.faults.cut_batch_after = None
                for lost in range(self.faults.undo_when_cut):
                    view = msgspec.structs.replace(self.make(order.spec), state=SandboxState.GONE)
                    self.by_request[f"{order.key}/{lost}"] = view
                request.transport.abort()
                return response
            key = f"{order.key}/{index}"
            if index in self.faults.refuse_batch:
                item = BatchItem(index=index, problem=problem("image_unavailable", "no such blob"))
            else:
                if key not in self.by_request:
                    self.by_request[key] = self.make(order.spec)
                item = BatchItem(index=index, sandbox=self.by_request[key])
            await response.write(encode(item) + b"\n")
        return response

    def live(self, job: str | None, labels: dict[str, str]) -> list[SandboxView]:
        return [
            view for view in self.sandboxes.values()
            if (job is None or view.spec.job == job) and labels.items() <= view.spec.labels.items()
        ]  # fmt: skip

    async def listing(self, request: web.Request) -> web.Response:
        labels = dict(pair.split("=", 1) for pair in request.query.getall("label", []))
        found = self.live(request.query.get("job"), labels)
        start = int(request.query.get("cursor", "0"))
        following = str(start + 2) if start + 2 < len(found) else None
        return answer(Page(items=tuple(found[start : start + 2]), next_cursor=following))

    async def stop_many(self, request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=StopMany)
        gone = [view.id for view in self.live(order.job, order.labels)]
        for sandbox_id in gone:
            del self.sandboxes[sandbox_id]
        return answer(Stopped(stopped=tuple(gone)))

    async def me(self, request: web.Request) -> web.Response:
        return answer({"principal": "root", "project": "p", "permissions": ["sandbox:create"]})

    async def images(self, request: web.Request) -> web.Response:
        layer = {
            "digest": "sha256:0",
            "kind": "base",
            "entries": 1,
            "content_bytes": 2,
            "stored_bytes": 3,
            "origin": "test",
        }
        return answer([{"name": "python-3.11", "layer": layer}])

    async def commit(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=CommitRequest)
        layers = ("sha256:base", "sha256:made")
        return answer(CommitReport(name=asked.name, digest=layers[-1], layers=layers, entries=1, bytes=2, whiteouts=0))

    async def info(self, request: web.Request) -> web.Response:
        view = self.sandboxes.get(request.match_info["id"])
        return answer(view) if view else failing("not_found", what="sandbox")

    async def usage(self, request: web.Request) -> web.Response:
        return answer(
            {"memory_bytes": 1, "memory_peak_bytes": 2, "memory_limit_bytes": 3, "cpu_seconds": 0.5, "pids": 1}
        )

    async def story(self, request: web.Request) -> web.Response:
        return answer([{"at": 1.0, "event": "started", "fields": {"by": "p"}}])

    async def stop(self, request: web.Request) -> web.Response:
        view = self.sandboxes.get(request.match_info["id"])
        if view is None:
            return failing("not_found", what="sandbox")
        self.sandboxes[view.id] = view = msgspec.structs.replace(view, state=SandboxState.GONE)
        return answer(view)

    async def execute(self, order: ExecRequest, request_id: str) -> ExecResult:
        job = Job(order, request_id)
        await job.run()
        self.executed.append(order)
        timed_out = False
        try:
            async with asyncio.timeout(order.timeout):
                await job.follow()
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            job.kill()
            await job.process.wait()
        code = job.process.returncode or 0
        out, err = bytes(job.output[1]), bytes(job.output[2])
        outcome = Outcome.TIMEOUT if timed_out else Outcome.SIGNALLED if code < 0 else Outcome.EXITED
        return ExecResult(
            outcome=outcome, exit_code=code if outcome is Outcome.EXITED else None, signal=-code if code < 0 else None,
            stdout=out[: order.output_limit], stderr=err[: order.output_limit], truncated=len(out) > order.output_limit,
            stdout_bytes_total=len(out), stderr_bytes_total=len(err), duration=0.01, request_id=request_id,
        )  # fmt: skip

    async def exec(self, request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=ExecRequest)
        if order.argv[:1] == ("no-such-command",):
            return failing("command_not_found", what="command")
        if request.match_info["id"] not in self.sandboxes:
            return failing("sandbox_lost", end="node_lost")
        key = request.headers["Idempotency-Key"]
        if key not in self.recorded:
            self.recorded[key] = await self.execute(order, key)
        return answer(self.recorded[key])

    async def start(self, request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=ExecRequest)
        key = request.headers["Idempotency-Key"]
        if order.argv[:1] == ("no-such-command",):
            return failing("command_not_found")
        if key not in self.jobs:
            job = self.jobs[key] = Job(order, key)
            await job.run()
            self.spawn(job.follow())
        return answer(self.jobs[key].view(), 201)

    def spawn(self, call) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.get_running_loop().create_task(call)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def list_jobs(self, request: web.Request) -> web.Response:
        return answer([job.view() for job in self.jobs.values()])

    async def job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["pid"])
        return answer(job.view()) if job else failing("not_found", what="process")

    async def forget(self, request: web.Request) -> web.Response:
        job = self.jobs.pop(request.match_info["pid"], None)
        if job is not None:
            job.kill()
        return web.Response(status=204) if job else failing("not_found", what="process")

    async def wait(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["pid"]]
        try:
            async with asyncio.timeout(float(request.query["timeout"])), job.changed:
                await job.changed.wait_for(lambda: job.returncode is not None)
        except TimeoutError:
            pass
        return answer(job.view())

    async def signal(self, request: web.Request) -> web.Response:
        self.jobs[request.match_info["pid"]].kill(int(request.query["signal"]))
        return web.Response(status=204)

    async def resize(self, request: web.Request) -> web.Response:
        return failing("invalid_argument", "the process has no terminal")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        job = self.jobs.get(request.match_info["pid"])
        if job is None:
            return failing("not_found", what="process")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        at = {1: int(request.query["stdout_from"]), 2: int(request.query["stderr_from"])}

        async def inputs() -> None:
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[0] == 3:
                    job.process.stdin.write(message.data[1:])
                    await job.process.stdin.drain()
                elif message.type is WSMsgType.TEXT and json.loads(message.data)["event"] == "stdin_close":
                    job.process.stdin.close()

        reader = asyncio.get_running_loop().create_task(inputs())
        try:
            while True:
                async with job.changed:
                    await job.changed.wait_for(
                        lambda: (
                            job.returncode is not None
                            or any(len(job.output[k]) > at[k] for k in (1, 2))
                            or socket.closed
                        )
                    )
                for kind in (1, 2):
                    data = bytes(job.output[kind][at[kind] :])
                    if self.faults.cut_stream_after is not None:
                        data = data[: self.faults.cut_stream_after]
                    if data:
                        at[kind] += len(data)
                        await socket.send_bytes(bytes([kind]) + data)
                        if self.faults.cut_stream_after is not None:
                            self.faults.cut_stream_after = None
                            request.transport.abort()
                            return socket
                if job.returncode is not None and all(len(job.output[k]) == at[k] for k in (1, 2)):
                    await socket.send_str(encode(StreamEvent(event="ended", process=job.view())).decode())
                    await socket.close()
                    return socket
        finally:
            reader.cancel()

    async def open_session(self, request: web.Request) -> web.Response:
        msgspec.json.decode(await request.read(), type=SessionRequest)
        return answer(SessionView(id="session-1", shell="/bin/sh", running=True, busy=False, started=1.0), 201)

    async def run_session(self, request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=SessionRun)
        return answer(await self.execute(ExecRequest(shell=order.command, timeout=order.timeout), "r"))

    async def close_session(self, request: web.Request) -> web.Response:
        return failing(self.closing, what="session") if self.closing else web.Response(status=204)

    def local(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def file_view(self, path: str, follow: bool = True, digest: str | None = None) -> FileView:
        status = os.stat(self.local(path), follow_symlinks=follow)
        kind = "dir" if self.local(path).is_dir() else "file"
        return FileView(
            path=path, kind=kind, size=status.st_size, mode=status.st_mode & 0o7777, uid=0, gid=0, mtime=status.st_mtime, sha256=digest,
        )  # fmt: skip

    async def stat(self, request: web.Request) -> web.Response:
        path = request.query["path"]
        return answer(self.file_view(path)) if self.local(path).exists() else failing("not_found", what="file")

    async def list_files(self, request: web.Request) -> web.Response:
        path = request.query["path"]
        return answer([self.file_view(f"{path}/{name}") for name in sorted(os.listdir(self.local(path)))])

    async def change(self, request: web.Request) -> web.Response:
        query = request.query
        if request.match_info["verb"] == "mkdir":
            self.local(query["path"]).mkdir(parents=query["parents"] == "true", exist_ok=True)
        elif request.match_info["verb"] == "move":
            self.local(query["source"]).rename(self.local(query["target"]))
        else:
            self.local(query["path"]).unlink()
        return web.Response(status=204)

    async def read(self, request: web.Request) -> web.StreamResponse:
        path = self.local(request.query["path"])
        if not path.exists():
            return failing("not_found", what="file")
        offset = int(request.query.get("offset", "0"))
        end = offset + int(request.query["length"]) if "length" in request.query else None
        return await self.send(request, path.read_bytes()[offset:end])

    async def send(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for start in range(0, len(data), 100_000):
            if self.faults.cut_stream_after is not None and start >= self.faults.cut_stream_after:
                request.transport.abort()
                return response
            await response.write(data[start : start + 100_000])
        return response

    async def write(self, request: web.Request) -> web.Response:
        path = self.local(request.query["path"])
        data = await request.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((path.read_bytes() if request.query.get("append") == "true" else b"") + data)
        digest = hashlib.sha256(b"?" if self.faults.wrong_hash else data).hexdigest()
        return answer(self.file_view(request.query["path"], digest=digest))

    async def read_tree(self, request: web.Request) -> web.StreamResponse:
        if self.tree is None:
            packed = self.root.parent / ".packed.tar"
            with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as out:
                for name in sorted(os.listdir(self.local(request.query["path"]))):
                    out.add(self.local(request.query["path"]) / name, arcname=name)
            return await self.send(request, packed.read_bytes())
        return await self.send(request, self.tree)

    async def write_tree(self, request: web.Request) -> web.Response:
        data = await request.read()
        packed = self.root / ".incoming.tar"
        packed.write_bytes(data)
        target = self.local(request.query["path"])
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as source:
            source.extractall(target, filter="fully_trusted")
        packed.unlink()
        return answer({"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})

    async def watch(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str('{"event":"created","path":"/w/a"}')
        await socket.send_str('{"event":"overflow","path":""}')
        await socket.close(code=4410, message=b"the sandbox has ended")
        return socket

    async def proxy(self, request: web.Request) -> web.Response:
        if request.match_info["port"] != "8000":
            return failing("unavailable", "nothing listens")
        self.http_headers = dict(request.headers)
        body = await request.read()
        return web.Response(
            status=404, body=request.path_qs.encode() + b" " + body, headers={"X-Dsec-Proxied": "1", "X-A": "b"}
        )


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Server]:
    """A fake at a free loopback port."""
    server = Server(root)
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        for job in server.jobs.values():
            job.kill()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        await runner.cleanup()


@contextmanager
def serving_aside(root: Path) -> Iterator[Server]:
    """The fake on a loop in a thread of its own, for tests that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = serving(root)
    made = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
