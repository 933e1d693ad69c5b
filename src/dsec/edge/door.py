"""Into a sandbox: find it, let in only who may, and count the visit as activity."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsec.edge.lifecycle import Lifecycle
from dsec.edge.resident import Resident
from dsec.model.errors import NotFound, PermissionDenied, SandboxLost, Unauthenticated
from dsec.model.views import SandboxView
from dsec.rules.access import sees
from dsec.web import Call

__all__ = ["Door", "guard"]


async def guard(call: Call[Any, Any]) -> None:
    """Raises Unauthenticated without a principal, PermissionDenied for one without the route's permission. A route without one is a
    link's: what stands in its path is what lets in."""
    if call.route.permission is None:
        return
    if call.principal is None:
        raise Unauthenticated("this application is reached through the apiserver")
    permission = call.route.permission
    if permission not in call.principal.permissions:
        raise PermissionDenied(f"this needs the permission {permission}", permission=permission)


class Door:
    """A sandbox of a project that the caller does not see is as if it were not there."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle

    def look(self, call: Call[Any, Any]) -> Resident:
        """The sandbox, not gone, without counting as activity. Raises NotFound and SandboxLost."""
        sandbox_id = call.params["id"]
        try:
            resident = self.lifecycle.find(sandbox_id)
        except SandboxLost:
            self.view(call)
            raise
        self._seen(call, resident.row.project)
        return resident

    def view(self, call: Call[Any, Any]) -> SandboxView:
        """The view of the sandbox, gone or not. Raises NotFound."""
        found = self.lifecycle.view(call.params["id"])
        self._seen(call, found.project)
        return found

    def visit(self, call: Call[Any, Any]) -> SandboxView:
        """As `view`, and as any other call on a sandbox that runs it moves the idle end. Raises NotFound."""
        found = self.view(call)
        resident = self.lifecycle.residents.get(found.id)
        if resident is None or resident.agent is None:
            return found
        with self.lifecycle.expiry.active(resident):
            pass
        return resident.view()

    @contextmanager
    def enter(self, call: Call[Any, Any]) -> Iterator[Resident]:
        """The sandbox, while a call is in it. Raises NotFound, and SandboxLost unless it runs."""
        resident = self.look(call)
        resident.live_agent()
        with self.lifecycle.expiry.active(resident):
            yield resident

    @staticmethod
    def _seen(call: Call[Any, Any], project: str) -> None:
        if call.principal is None or not sees(call.principal.project, project):
            raise NotFound("no such sandbox", what="sandbox")
