"""Shell sessions: open, run in, list, close."""

from dsec.edge.door import Door
from dsec.edge.execution import Execution, failed, name_of, opened
from dsec.edge.operations import Operations, fingerprint_of
from dsec.edge.resident import Resident
from dsec.model import aether as wire
from dsec.model.errors import Interrupted, InvalidArgument
from dsec.model.outcome import ExecResult
from dsec.model.views import SessionRequest, SessionRun, SessionView
from dsec.ports.clock import Clock
from dsec.rules.environ import within
from dsec.web import Call

__all__ = ["Sessions"]


class Sessions:
    """Handlers of the routes under /sessions, called like them."""

    def __init__(self, door: Door, operations: Operations, execution: Execution, clock: Clock) -> None:
        self._door = door
        self._operations = operations
        self._execution = execution
        self._clock = clock

    def _view(self, resident: Resident, info: wire.SessionInfo) -> SessionView:
        began = resident.row.created + resident.phases.get("total", 0.0)
        return SessionView(
            id=info.session_id,
            shell=info.shell,
            running=info.running,
            busy=info.busy,
            started=began + info.started_ms / 1000.0,
        )

    async def open_session(self, call: Call[None, SessionRequest]) -> SessionView:
        with self._door.enter(call) as resident:
            session_id = name_of(call.request_id, self._clock)

            async def run() -> SessionView:
                return await self._open(resident, call.body, session_id)

            mark = fingerprint_of(call.body)
            try:
                return await self._operations.once(resident, call.request_id, "session", mark, run, SessionView)
            except Interrupted:
                for view in await self._listed(resident):  # aether knows how far it came
                    if view.id == session_id:
                        return view
                raise

    async def _open(self, resident: Resident, request: SessionRequest, session_id: str) -> SessionView:
        if request.shell is not None and (not request.shell.startswith("/") or "\0" in request.shell):
            raise InvalidArgument("an absolute path", field="shell")
        env, cwd, _, user = within(resident.surroundings, request.env, request.cwd, request.user)
        wanted = wire.OpenSessionRequest(
            session_id=session_id,
            shell=request.shell or "",
            env=env,
            cwd=cwd,
            user=user,
            open_files=resident.row.spec.open_files_limit,
        )
        async with opened(resident, wanted) as channel:
            reply = await channel.receive()
        if not isinstance(reply, wire.SessionReply):
            raise failed(reply)
        return self._view(resident, reply.info)

    async def list_sessions(self, call: Call[None, None]) -> list[SessionView]:
        with self._door.enter(call) as resident:
            return await self._listed(resident)

    async def _listed(self, resident: Resident) -> list[SessionView]:
        async with opened(resident, wire.ListSessionsRequest()) as channel:
            reply = await channel.receive()
        if not isinstance(reply, wire.SessionsReply):
            raise failed(reply)
        return [self._view(resident, info) for info in reply.items]

    async def run_in_session(self, call: Call[None, SessionRun]) -> ExecResult:
        session_id, body, key = call.params["sid"], call.body, call.request_id
        with self._door.enter(call) as resident:

            async def run() -> ExecResult:
                return await self._execution.run_in_session(resident, session_id, body, key)

            mark = fingerprint_of(session_id, body)
            return await self._operations.once(resident, key, "session_run", mark, run, ExecResult)

    async def close_session(self, call: Call[None, None]) -> None:
        session_id = call.params["sid"]
        with self._door.enter(call) as resident:

            async def run() -> bool:
                async with opened(resident, wire.CloseSessionRequest(session_id=session_id)) as channel:
                    reply = await channel.receive()
                if not isinstance(reply, wire.DoneReply):
                    raise failed(reply)
                resident.session_locks.pop(session_id, None)
                return True

            mark = fingerprint_of(session_id)
            await self._operations.once(resident, call.request_id, "session_close", mark, run, bool)
