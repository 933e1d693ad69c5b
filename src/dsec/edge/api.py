"""The edge's HTTP API: handlers of the sandbox itself, and the application of all the edge's routes."""

from msgspec.structs import replace

from dsec.edge.commits import CommitHandlers
from dsec.edge.door import Door, guard
from dsec.edge.execution import Execution
from dsec.edge.files import Files
from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.network.calls import NetworkHandlers
from dsec.edge.operations import Operations, fingerprint_of
from dsec.edge.ports import PortProxy
from dsec.edge.previews import PreviewKey, Previews
from dsec.edge.processes import Processes
from dsec.edge.resident import Resident
from dsec.edge.routes import (
    COMMIT_ROUTES,
    FILE_ROUTES,
    NETWORK_ROUTES,
    PORT_ROUTES,
    PREVIEW_ROUTES,
    PROCESS_ROUTES,
    ROUTES,
    SANDBOX_ROUTES,
    SESSION_ROUTES,
    CancelQuery,
    RenewQuery,
)
from dsec.edge.sessions import Sessions
from dsec.model.errors import InvalidArgument
from dsec.model.outcome import End, ExecResult
from dsec.model.plan import Usage
from dsec.model.views import ExecRequest, SandboxEvent, SandboxView
from dsec.ports.clock import Clock
from dsec.ports.images import Commits, Images
from dsec.rules import lifecycle as table
from dsec.web import App, Call, bind

__all__ = ["SandboxHandlers", "application"]

_STORY_MAX = 1000
_TTL_MAX = 30 * 86400.0


class SandboxHandlers:
    """Handlers of the sandbox's own routes, called like them. Each but a stop moves its idle end."""

    def __init__(
        self, door: Door, operations: Operations, execution: Execution, journal: Journal, images: Images
    ) -> None:
        self._door = door
        self._operations = operations
        self._execution = execution
        self._journal = journal
        self._images = images

    async def get_sandbox(self, call: Call[None, None]) -> SandboxView:
        return self._door.visit(call)

    async def delete_sandbox(self, call: Call[None, None]) -> SandboxView:
        view = self._door.view(call)
        lifecycle = self._door.lifecycle
        resident = lifecycle.residents.get(view.id)
        if resident is None:
            return view
        who = call.principal.name if call.principal else ""
        return await lifecycle.stop(resident, table.StopAsked(End.STOPPED, f"stopped by {who}"))

    async def renew_sandbox(self, call: Call[RenewQuery, None]) -> SandboxView:
        seconds = call.query.ttl
        if seconds is not None and not 0 < seconds <= _TTL_MAX:
            raise InvalidArgument("more than 0 s, at most 30 days", field="ttl")
        resident = self._door.look(call)

        async def run() -> SandboxView:
            return self._door.lifecycle.renew(resident, seconds)

        mark = fingerprint_of(seconds)
        return await self._operations.once(resident, call.request_id, "renew", mark, run, SandboxView)

    async def sandbox_usage(self, call: Call[None, None]) -> Usage:
        with self._door.enter(call) as resident:
            usage = await self._execution.usage(resident)
            if usage is None:
                raise resident.lost("the sandbox cannot be measured")
        return replace(usage, image_bytes_read=self._image_bytes(resident)) if usage.image_bytes_read is None else usage

    def _image_bytes(self, resident: Resident) -> int | None:
        """Bytes of its layers that the node holds in memory by now, other sandboxes' reads counted too; None if it cannot say."""
        read = [self._images.bytes_read(digest) for digest in resident.row.composition.layers]
        known = [count for count in read if count is not None]
        return sum(known) if len(known) == len(read) else None

    async def sandbox_events(self, call: Call[None, None]) -> list[SandboxEvent]:
        return self._journal.story(self._door.visit(call).id, _STORY_MAX)

    async def cancel_operation(self, call: Call[CancelQuery, None]) -> None:
        with self._door.enter(call) as resident:
            await self._operations.give_up(resident, call.query.request_id)

    async def exec_command(self, call: Call[None, ExecRequest]) -> ExecResult:
        body, key = call.body, call.request_id
        with self._door.enter(call) as resident:
            if key is None:
                return await self._execution.run(resident, body, None)

            async def run() -> ExecResult:
                return await self._execution.run(resident, body, key)

            return await self._operations.once(resident, key, "exec", fingerprint_of(body), run, ExecResult)


def application(
    lifecycle: Lifecycle, operations: Operations, images: Images, commits: Commits, clock: Clock, key: PreviewKey
) -> App:
    """The ASGI application; the scope must carry the caller under "dsec.principal"."""
    door, journal = Door(lifecycle), lifecycle.parts.journal
    execution = Execution(lifecycle, clock)
    handlers = bind(SANDBOX_ROUTES, SandboxHandlers(door, operations, execution, journal, images))
    handlers |= bind(PROCESS_ROUTES, Processes(door, operations, execution, clock))
    handlers |= bind(SESSION_ROUTES, Sessions(door, operations, execution, clock))
    handlers |= bind(FILE_ROUTES, Files(door, operations))
    proxy = PortProxy(door)
    handlers |= bind(PORT_ROUTES, proxy)
    handlers |= bind(PREVIEW_ROUTES, Previews(door, operations, journal, clock, proxy, key))
    handlers |= bind(NETWORK_ROUTES, NetworkHandlers(door, operations))
    handlers |= bind(COMMIT_ROUTES, CommitHandlers(door, operations, commits, clock))
    return App(ROUTES, handlers, clock, guard)
