"""A shell session: state kept between commands."""

from types import TracebackType

import msgspec

from dsec.model.errors import NotFound, SandboxLost
from dsec.model.outcome import ExecResult
from dsec.model.views import SessionRun, SessionView
from dsec.sdk._async.transport import MARGIN, Transport, path_of
from dsec.sdk.results import checked

__all__ = ["Session"]

_result = msgspec.json.Decoder(ExecResult)


class Session:
    """A shell in a sandbox that keeps its directory, variables and background jobs between commands. Made by
    `Sandbox.open_session`. A context manager that closes the session at its end."""

    def __init__(self, transport: Transport, sandbox_id: str, view: SessionView) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._view = view

    @property
    def id(self) -> str:
        """The session's id, as `run_shell(session=...)` takes it too."""
        return self._view.id

    @property
    def view(self) -> SessionView:
        """The session as it was when it was opened or listed."""
        return self._view

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        output_limit: int = 1 << 20,
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run `command` in the shell, after the one before it has ended.

        `timeout` seconds, then the command's process tree is ended (outcome timeout). `output_limit` bytes kept of each
        stream. `check`: raise CommandFailed unless it exits with 0. Cancelling ends the command. Raises NotFound when
        the session is closed, SandboxLost, and the errors of the transport.
        """
        body = msgspec.json.encode(SessionRun(command=command, timeout=timeout, output_limit=output_limit))
        result = await self._transport.call(
            "POST",
            path_of("v1", "sandboxes", self._sandbox_id, "sessions", self.id, "run"),
            _result,
            body=body,
            request_id=request_id,
            deadline=None if timeout is None else timeout + MARGIN,
            cancel=path_of("v1", "sandboxes", self._sandbox_id, "cancel"),
        )
        return checked(result, check, command)

    async def close(self) -> None:
        """End the shell and everything it started. One that is gone already, by `exit` or with its sandbox, may be closed."""
        try:
            await self._transport.fetch("DELETE", path_of("v1", "sandboxes", self._sandbox_id, "sessions", self.id))
        except (NotFound, SandboxLost):
            return

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
