"""A running sandbox, as a caller holds it."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.model.errors import InvalidArgument, TooLarge
from dsec.model.layers import ImageConfig
from dsec.model.network import Flow, NetworkChange, NetworkRule, NetworkView, Verdict
from dsec.model.outcome import ExecResult
from dsec.model.plan import Usage
from dsec.model.views import (
    CommitReport,
    CommitRequest,
    ExecRequest,
    PreviewSpec,
    PreviewView,
    ProcessView,
    PtySize,
    SandboxEvent,
    SandboxView,
    SessionRequest,
    SessionView,
)
from dsec.sdk._async.files import Files
from dsec.sdk._async.process import Process
from dsec.sdk._async.session import Session
from dsec.sdk._async.transport import MARGIN, PROXIED, Transport, path_of
from dsec.sdk._async.tunnel import Tunnel
from dsec.sdk.arguments import rules_of
from dsec.sdk.pending import PENDING_SANDBOX, refusing
from dsec.sdk.records import HttpResponse
from dsec.sdk.results import checked

__all__ = ["Sandbox"]

OUTPUT_LIMIT = 1 << 20
_PLATFORM_HEADERS = ("authorization", "idempotency-key", "host", "content-length", "transfer-encoding")
_encode = msgspec.json.Encoder().encode
_result = msgspec.json.Decoder(ExecResult)
_view = msgspec.json.Decoder(SandboxView)
_usage = msgspec.json.Decoder(Usage)
_events = msgspec.json.Decoder(list[SandboxEvent])
_preview = msgspec.json.Decoder(PreviewView)
_previews = msgspec.json.Decoder(list[PreviewView])
_network = msgspec.json.Decoder(NetworkView)
_flows = msgspec.json.Decoder(list[Flow])
_commit = msgspec.json.Decoder(CommitReport)
_process = msgspec.json.Decoder(ProcessView)
_processes = msgspec.json.Decoder(list[ProcessView])
_session = msgspec.json.Decoder(SessionView)
_sessions = msgspec.json.Decoder(list[SessionView])


def _argv(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str | bytes):
        raise InvalidArgument("argv is a list of texts; run_shell() runs text through a shell", field="argv")
    return tuple(argv)


class Sandbox:
    """A sandbox. Made by `DSecClient.run_container`, `run_containers`, `get` and `sandboxes`; nothing is held but its
    name, so any number of objects may stand for one sandbox. A context manager that stops the sandbox at its end."""

    def __init__(self, transport: Transport, view: SandboxView) -> None:
        self._transport = transport
        self._view = view
        self._exec_url = transport.url(self._path("exec"))
        self._cancel_path = self._path("cancel")
        self._files = Files(transport, view.id)

    def _path(self, *parts: str, **query: str | int | float | bool | None) -> str:
        return path_of("v1", "sandboxes", self._view.id, *parts, query=query)

    @property
    def id(self) -> str:
        """The sandbox's id: [a-z0-9], at most 50 characters."""
        return self._view.id

    @property
    def view(self) -> SandboxView:
        """The sandbox as last heard of; info() asks again."""
        return self._view

    @property
    def phases(self) -> dict[str, float]:
        """Seconds that each part of its creation took."""
        return self._view.phases

    @property
    def files(self) -> Files:
        """Its files."""
        return self._files

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run a command and wait for its end.

        `stdin`: all of its input. `env` is laid over the sandbox's. `cwd`, `user` ("name", "uid", "u:g"): None means the
        sandbox's. `timeout` seconds, then the whole process tree is ended (outcome timeout); None: no limit.
        `output_limit`: bytes kept of each stream, its first and last half. `check`: raise CommandFailed unless it exits
        with 0. `request_id`: a repeat answers the recorded result and runs nothing; one is made where none is given.
        Cancelling ends the process tree. Raises CommandNotFound, CommandNotExecutable, SandboxLost, NotFound,
        InvalidArgument, Conflict, and DeadlineExceeded or Unavailable from the transport.
        """
        request = ExecRequest(
            argv=_argv(argv),
            stdin=stdin,
            env=dict(env) if env else {},
            cwd=cwd,
            user=user,
            timeout=timeout,
            output_limit=output_limit,
        )
        return checked(await self._run(request, request_id), check, argv)

    async def run_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        session: Session | str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        output_limit: int = OUTPUT_LIMIT,
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run text through a shell: a fresh /bin/sh, or that of `session` (then stdin, env, cwd and user are its own and
        may not be given). Everything else, errors too, as in `exec`."""
        if session is not None:
            if stdin or env or cwd is not None or user is not None:
                raise InvalidArgument("a session has its own stdin, env, cwd and user", field="session")
            return await self._session_of(session).run(
                command, timeout=timeout, output_limit=output_limit, check=check, request_id=request_id
            )
        request = ExecRequest(
            shell=command,
            stdin=stdin,
            env=dict(env) if env else {},
            cwd=cwd,
            user=user,
            timeout=timeout,
            output_limit=output_limit,
        )
        return checked(await self._run(request, request_id), check, command)

    async def _run(self, request: ExecRequest, request_id: str | None) -> ExecResult:
        deadline = None if request.timeout is None else request.timeout + MARGIN
        return await self._transport.call(
            "POST",
            self._exec_url,
            _result,
            body=_encode(request),
            request_id=request_id,
            deadline=deadline,
            cancel=self._cancel_path,
        )

    async def start(
        self,
        argv: Sequence[str],
        *,
        pty: PtySize | None = None,
        stdin: bytes = b"",
        keep_stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        request_id: str | None = None,
    ) -> Process:
        """Start a process that outlives this call and this client.

        `pty`: run it on a terminal of that size. `keep_stdin`: leave stdin open after `stdin` for write(). `output_limit`:
        bytes of each stream kept for attaching later. The rest, errors too, as in `exec`. Cancelling while it starts may
        leave it started: with a `request_id` of yours, attach(request_id) finds it.
        """
        request = ExecRequest(
            argv=_argv(argv),
            stdin=stdin,
            env=dict(env) if env else {},
            cwd=cwd,
            user=user,
            timeout=timeout,
            output_limit=output_limit,
            pty=pty,
            keep_stdin=keep_stdin,
        )
        view = await self._transport.call(
            "POST", self._path("processes"), _process, body=_encode(request), request_id=request_id
        )
        return Process(self._transport, self.id, view)

    async def attach(self, process_id: str, from_offset: int = 0, stderr_from: int = 0) -> Process:
        """A process started earlier, by this client or another; its streams are read from these byte offsets on.
        Raises NotFound for one that never was or is forgotten."""
        view = await self._transport.call("GET", self._path("processes", process_id), _process)
        return Process(self._transport, self.id, view, from_offset, stderr_from)

    async def processes(self) -> list[ProcessView]:
        """Processes started with `start`, running and ended, until they are forgotten."""
        return await self._transport.call("GET", self._path("processes"), _processes)

    async def open_session(
        self,
        *,
        shell: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        request_id: str | None = None,
    ) -> Session:
        """Open a shell that keeps its state. `shell`: None means /bin/bash, else /bin/sh. Raises CommandNotFound."""
        request = SessionRequest(shell=shell, env=dict(env) if env else {}, cwd=cwd, user=user)
        view = await self._transport.call(
            "POST", self._path("sessions"), _session, body=_encode(request), request_id=request_id
        )
        return Session(self._transport, self.id, view)

    async def sessions(self) -> list[Session]:
        """Open sessions."""
        views = await self._transport.call("GET", self._path("sessions"), _sessions)
        return [Session(self._transport, self.id, view) for view in views]

    def _session_of(self, session: Session | str) -> Session:
        if isinstance(session, Session):
            return session
        view = SessionView(id=session, shell="", running=True, busy=False, started=0.0)
        return Session(self._transport, self.id, view)

    async def http(
        self,
        port: int,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = 60.0,
        limit: int = 64 << 20,
    ) -> HttpResponse:
        """Send an HTTP request to 127.0.0.1:`port` in the sandbox. `path` may carry a query; redirects are not followed.

        `headers` may not name the platform's own: Authorization, Idempotency-Key, Host and what frames the body. `timeout`: seconds of silence. Never repeated. Raises TooLarge for an answer above `limit` bytes, Unavailable or
        NotFound where nothing listens; an error status of the server inside is an answer, not an error.
        """
        if not path.startswith("/"):
            raise InvalidArgument("path begins with /", field="path")
        if any(name.lower() in _PLATFORM_HEADERS for name in headers or ()):
            raise InvalidArgument(f"{', '.join(_PLATFORM_HEADERS)} are the platform's own", field="headers")
        target = self._path("http", str(port)) + path
        async with self._transport.stream(
            method.upper(), target, body=body, headers=headers, silence=timeout, proxied=True
        ) as response:
            content = bytearray()
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > limit:
                    raise TooLarge(f"the answer is larger than {limit} bytes", limit=limit)
            received: dict[str, str] = {}
            for name, value in response.headers.items():
                key = name.lower()
                if key == PROXIED.lower():
                    continue
                received[key] = f"{received[key]}, {value}" if key in received else value
            return HttpResponse(status=response.status, headers=received, content=bytes(content))

    async def tunnel(self, port: int) -> Tunnel:
        """Open a TCP connection to 127.0.0.1:`port` in the sandbox. Not repeated. Raises NotFound where nothing listens, SandboxLost."""
        return Tunnel(await self._transport.websocket(self._path("tunnel", str(port))), port)

    async def preview(self, port: int, *, seconds: float = 3600.0, request_id: str | None = None) -> PreviewView:
        """Make a link by which whoever has it sees `port` over HTTP and WebSocket, without a key, for `seconds` (7 days at most) or until
        it is revoked or the sandbox ends. Visits count as activity. Raises Busy when the sandbox has its 64 links."""
        body = _encode(PreviewSpec(port=port, seconds=seconds))
        made = await self._transport.call("POST", self._path("previews"), _preview, body=body, request_id=request_id)
        return self._reached(made)

    def _reached(self, preview: PreviewView) -> PreviewView:
        return msgspec.structs.replace(preview, url=str(self._transport.url(f"/p/{preview.id}/")))

    async def previews(self) -> list[PreviewView]:
        """Its links that have not ended."""
        return [self._reached(each) for each in await self._transport.call("GET", self._path("previews"), _previews)]

    async def revoke_preview(self, preview_id: str) -> None:
        """End a link at once; also one that has ended."""
        await self._transport.fetch("DELETE", self._path("previews", preview_id))

    async def network(self) -> NetworkView:
        """The network rules in force, as they were asked for and as the kernel has them. Raises SandboxLost and Unavailable."""
        return await self._transport.call("GET", self._path("network"), _network)

    async def set_network_rules(
        self, rules: Mapping[str, bool | NetworkRule | Sequence[NetworkRule]], *, request_id: str | None = None
    ) -> NetworkView:
        """Put exactly `rules` in force, when this returns for flows that there are too.

        Raises InvalidArgument and Unsupported, and then nothing has changed; Unsupported also for a sandbox created with
        network_rules=None. Raises Unavailable where it failed: then everything is refused until a later call succeeds.
        """
        return await self._change_network(NetworkChange(rules=rules_of(rules, "network_rules")), request_id)

    async def set_phase(self, phase: str, *, request_id: str | None = None) -> NetworkView:
        """Put the rules of one of its network_phases in force; all else as in set_network_rules."""
        return await self._change_network(NetworkChange(phase=phase), request_id)

    async def _change_network(self, change: NetworkChange, request_id: str | None) -> NetworkView:
        return await self._transport.call(
            "PUT", self._path("network"), _network, body=_encode(change), request_id=request_id
        )

    async def net_log(self, *, limit: int = 1000, verdict: Verdict | None = None) -> list[Flow]:
        """The newest `limit` flows of those kept, oldest first. `pid` and `comm` are what the program in the sandbox said of itself."""
        return await self._transport.call("GET", self._path("network", "log", limit=limit, verdict=verdict), _flows)

    async def commit(
        self,
        name: str,
        *,
        scrub: Sequence[str] = (),
        keep: Sequence[str] = (),
        defaults: bool = True,
        config: ImageConfig | None = None,
        timeout: float = 3600.0,
        request_id: str | None = None,
    ) -> CommitReport:
        """Make what it has changed, as of now, a layer over its own, and `name` an image of all of them. It runs on meanwhile.

        `scrub` and `keep`: patterns of paths that are left out, and that are kept whatever else is said; `defaults`: caches, /tmp and what
        else only this sandbox had use for is left out too. `config`: the image's; None: that of this one's image. `timeout`
        seconds for all. Raises InvalidArgument for a name, a pattern, or what a layer cannot hold; PermissionDenied for a name
        outside of the project's; QuotaExceeded, Busy, SandboxLost.
        """
        request = CommitRequest(
            name=name, scrub=tuple(scrub), keep=tuple(keep), defaults=defaults, config=config
        )  # fmt: skip
        return await self._transport.call(
            "POST", self._path("commit"), _commit, body=_encode(request), request_id=request_id, deadline=timeout,
            cancel=self._cancel_path,
        )  # fmt: skip

    async def info(self) -> SandboxView:
        """The sandbox as it is now. Raises NotFound once the platform has forgotten it."""
        self._view = await self._transport.call("GET", self._path(), _view)
        return self._view

    async def events(self) -> list[SandboxEvent]:
        """Its story: transitions of its life and operations in it, oldest first."""
        return await self._transport.call("GET", self._path("events"), _events)

    async def metrics(self) -> Usage:
        """What it uses now."""
        return await self._transport.call("GET", self._path("metrics"), _usage)

    async def renew(self, ttl: float, *, request_id: str | None = None) -> SandboxView:
        """Move its idle end to `ttl` seconds from now; ttl_absolute stays. Raises SandboxLost when it has ended."""
        self._view = await self._transport.call("POST", self._path("renew", ttl=ttl), _view, request_id=request_id)
        return self._view

    async def stop(self) -> SandboxView:
        """End it and all it holds; also when it has ended already. Answers once it is gone."""
        self._view = await self._transport.call("DELETE", self._path(), _view)
        return self._view

    async def __aenter__(self) -> "Sandbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return refusing(PENDING_SANDBOX, "Sandbox", name)
