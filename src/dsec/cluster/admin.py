"""The apiserver's handlers for projects, principals and keys."""

from typing import Any

from dsec.cluster.routes import NamedProject
from dsec.cluster.tenants import Tenants
from dsec.model.tenancy import KeyCreated, KeySpec, KeyView, PrincipalSpec, PrincipalView, ProjectSpec, ProjectView
from dsec.ports.cluster import Principal
from dsec.web import Call

__all__ = ["TenancyHandlers", "caller"]


def caller(call: Call[Any, Any]) -> Principal:
    """Whom the guard let through."""
    if call.principal is None:
        raise RuntimeError(f"route {call.route.name} is served without a guard")
    return call.principal


class TenancyHandlers:
    """One method a route of the tag `tenancy`, but `me`."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def list_projects(self, call: Call[None, None]) -> list[ProjectView]:
        return self._tenants.projects(caller(call))

    async def create_project(self, call: Call[None, ProjectSpec]) -> ProjectView:
        return self._tenants.create_project(caller(call), call.body)

    async def set_quota(self, call: Call[None, ProjectSpec]) -> ProjectView:
        return self._tenants.set_quota(caller(call), call.body)

    async def remove_project(self, call: Call[NamedProject, None]) -> None:
        self._tenants.remove_project(caller(call), call.query.path)

    async def list_principals(self, call: Call[None, None]) -> list[PrincipalView]:
        return self._tenants.principals(caller(call))

    async def create_principal(self, call: Call[None, PrincipalSpec]) -> PrincipalView:
        return self._tenants.create_principal(caller(call), call.body)

    async def remove_principal(self, call: Call[None, None]) -> None:
        self._tenants.remove_principal(caller(call), call.params["name"])

    async def list_keys(self, call: Call[None, None]) -> list[KeyView]:
        return self._tenants.keys(caller(call))

    async def create_key(self, call: Call[None, KeySpec]) -> KeyCreated:
        return self._tenants.create_key(caller(call), call.body)

    async def revoke_key(self, call: Call[None, None]) -> None:
        self._tenants.revoke_key(caller(call), call.params["id"])
