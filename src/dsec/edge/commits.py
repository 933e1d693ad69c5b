"""Making images of sandboxes: the handler of /commit."""

from msgspec.structs import replace

from dsec.edge.door import Door
from dsec.edge.operations import Operations, fingerprint_of
from dsec.edge.planning import error_of
from dsec.edge.resident import Resident
from dsec.model.errors import PermissionDenied
from dsec.model.views import CommitReport, CommitRequest
from dsec.ports.backend import BackendFailure
from dsec.ports.clock import Clock
from dsec.ports.images import Changed, Commits
from dsec.rules.access import check_image_name
from dsec.rules.admit import MIB
from dsec.web import Call

__all__ = ["CommitHandlers"]


class CommitHandlers:
    """The handler of one route, called like it. `commits`: of the node's image room."""

    def __init__(self, door: Door, operations: Operations, commits: Commits, clock: Clock) -> None:
        self._door = door
        self._operations = operations
        self._commits = commits
        self._clock = clock

    async def commit_sandbox(self, call: Call[None, CommitRequest]) -> CommitReport:
        principal, request = call.principal, call.body
        # What it reads is all that the sandbox's files are.
        if principal is None or "sandbox.use" not in principal.permissions:
            raise PermissionDenied("this needs the permission sandbox.use too", permission="sandbox.use")
        check_image_name(principal.project, request.name)
        with self._door.enter(call) as resident:

            async def run() -> CommitReport:
                return await self._commit(resident, request, principal.project)

            mark = fingerprint_of(request)
            return await self._operations.once(resident, call.request_id, "commit", mark, run, CommitReport)

    async def _commit(self, resident: Resident, request: CommitRequest, project: str) -> CommitReport:
        self._commits.check(request)
        if resident.handle is None:
            raise resident.lost()
        begun = self._clock.monotonic()
        try:
            async with resident.backend.changes(resident.handle) as directory:
                taken = self._clock.monotonic() - begun
                changed = Changed(
                    sandbox_id=resident.id,
                    project=project,
                    directory=directory,
                    composition=resident.row.composition,
                    most_bytes=resident.row.spec.disk_limit_mb * MIB,
                )
                report = await self._commits.commit(request, changed)
        except BackendFailure as failure:
            raise error_of(failure) from failure
        return replace(report, phases={"snapshot": taken, **report.phases})
