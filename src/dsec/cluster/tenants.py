"""Projects, principals and keys: what IAM lets its callers change. Nothing that is handed on ever grows."""

import re

import sqlalchemy as sa
from msgspec import structs

from dsec.cluster.iam import ROOT_PRINCIPAL, SqlIam
from dsec.cluster.keys import RANDOM_BYTES, make_key
from dsec.cluster.tables import grants, keys, principals, projects, quotas
from dsec.model.errors import Conflict, InvalidArgument, NotFound, PermissionDenied
from dsec.model.tenancy import (
    KeyCreated,
    KeySpec,
    KeyView,
    PrincipalSpec,
    PrincipalView,
    ProjectSpec,
    ProjectView,
    Quota,
)  # fmt: skip
from dsec.ports.clock import Clock
from dsec.ports.cluster import Principal
from dsec.rules.access import ROOT_PROJECT, check_delegation, check_project_path, may, parent_of, sees
from dsec.rules.quota import Account, close, delegate

__all__ = ["Tenants"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._@-]{0,62}\Z")
_MAX_NOTE = 200


class Tenants:
    """Changes to the tree of projects and to who may act in it. `by` is always the caller."""

    def __init__(self, iam: SqlIam, clock: Clock) -> None:
        self._iam = iam
        self._clock = clock

    def projects(self, by: Principal) -> list[ProjectView]:
        """The caller's project and those below it, by path."""
        _need(by, "project.read", by.project)
        accounts = self._iam.accounts
        return [_project_view(path, accounts[path]) for path in sorted(accounts) if sees(by.project, path)]

    def create_project(self, by: Principal, spec: ProjectSpec) -> ProjectView:
        """A subproject with a quota taken out of its parent's. Raises Conflict where it exists already."""
        check_project_path(spec.path)
        parent = parent_of(spec.path)
        if parent is None:
            raise Conflict("project root exists from the start", project=spec.path)
        _need(by, "project.manage", parent)
        accounts = self._iam.accounts
        if parent not in accounts:
            raise NotFound("no such project", what="project", project=parent)
        if spec.path in accounts:
            raise Conflict("the project exists", project=spec.path)
        giver, taker = delegate(accounts[parent], None, spec.quota, spec.path)
        with self._iam.durably() as database:
            database.execute(projects.insert().values(path=spec.path, created=self._clock.now()))
            database.execute(quotas.insert().values(project=spec.path, **structs.asdict(spec.quota)))
        accounts[parent], accounts[spec.path] = giver, taker
        return _project_view(spec.path, taker)

    def set_quota(self, by: Principal, spec: ProjectSpec) -> ProjectView:
        """Change a project's quota; the caller must manage its parent (root's own: root). Raises QuotaExceeded."""
        check_project_path(spec.path)
        parent = parent_of(spec.path)
        _need(by, "project.manage", parent or ROOT_PROJECT)
        accounts = self._iam.accounts
        if spec.path not in accounts:
            raise NotFound("no such project", what="project", project=spec.path)
        below = [account.quota for path, account in accounts.items() if parent_of(path) == spec.path]
        giver = accounts[parent] if parent else Account(quota=Quota())
        giver, taker = delegate(giver, accounts[spec.path], spec.quota, spec.path, below)
        with self._iam.durably() as database:
            change = quotas.update().where(quotas.c.project == spec.path)
            database.execute(change.values(**structs.asdict(spec.quota)))
        if parent:
            accounts[parent] = giver
        accounts[spec.path] = taker
        return _project_view(spec.path, taker)

    def remove_project(self, by: Principal, path: str) -> None:
        """Remove an unused project. Raises Conflict while it has sandboxes, subprojects or principals."""
        check_project_path(path)
        parent = parent_of(path)
        if parent is None:
            raise InvalidArgument("project root cannot be removed", field="path")
        _need(by, "project.manage", parent)
        accounts = self._iam.accounts
        if path not in accounts:
            raise NotFound("no such project", what="project", project=path)
        if accounts[path].used.sandboxes or any(parent_of(other) == path for other in accounts):
            raise Conflict("the project still has sandboxes or subprojects", project=path)
        giver = close(accounts[parent], accounts[path])
        with self._iam.durably() as database:
            if database.scalar(sa.select(principals.c.name).where(principals.c.project == path).limit(1)) is not None:
                raise Conflict("the project still has principals", project=path)
            database.execute(projects.delete().where(projects.c.path == path))
        accounts[parent] = giver
        del accounts[path]

    def principals(self, by: Principal) -> list[PrincipalView]:
        """Principals of the caller's project and those below it, by name."""
        _need(by, "principal.manage", by.project)
        with self._iam.database.begin():
            rows = self._iam.database.execute(sa.select(principals).order_by(principals.c.name)).all()
            return [self._principal_view(row) for row in rows if sees(by.project, row.project)]

    def create_principal(self, by: Principal, spec: PrincipalSpec) -> PrincipalView:
        """A principal with permissions out of the caller's. Raises Conflict where the name is taken."""
        if not _NAME.match(spec.name):
            raise InvalidArgument("a principal's name is of [a-z0-9._@-], at most 63 characters", field="name")
        check_project_path(spec.project)
        _need(by, "principal.manage", spec.project)
        given = check_delegation(by.project, by.permissions, spec.project, spec.permissions)
        if spec.project not in self._iam.accounts:
            raise NotFound("no such project", what="project", project=spec.project)
        now = self._clock.now()
        with self._iam.durably() as database:
            if database.scalar(sa.select(principals.c.name).where(principals.c.name == spec.name)) is not None:
                raise Conflict("the name is taken", principal=spec.name)
            database.execute(principals.insert().values(name=spec.name, project=spec.project, created=now))
            if given:
                database.execute(grants.insert(), [{"principal": spec.name, "permission": p} for p in sorted(given)])
        return PrincipalView(name=spec.name, project=spec.project, permissions=tuple(sorted(given)), created=now)

    def remove_principal(self, by: Principal, name: str) -> None:
        """Remove a principal and its keys, at once."""
        if name == ROOT_PRINCIPAL:
            raise InvalidArgument("principal root cannot be removed", field="name")
        with self._iam.durably() as database:
            row = database.execute(sa.select(principals).where(principals.c.name == name)).first()
            if row is None or not sees(by.project, row.project):
                raise NotFound("no such principal", what="principal", principal=name)
            _need(by, "principal.manage", row.project)
            database.execute(principals.delete().where(principals.c.name == name))

    def keys(self, by: Principal) -> list[KeyView]:
        """The caller's own keys; with key.manage those of every principal it sees too. Oldest first."""
        query = sa.select(keys, principals.c.project).join(principals).order_by(keys.c.created, keys.c.id)
        every = may(by.project, by.permissions, "key.manage", by.project)
        with self._iam.database.begin():
            rows = self._iam.database.execute(query).all()
        return [
            _key_view(row) for row in rows if row.principal == by.name or (every and sees(by.project, row.project))
        ]  # fmt: skip

    def create_key(self, by: Principal, spec: KeySpec) -> KeyCreated:
        """A new key. It, and the principal that it is for, may do nothing that the caller may not."""
        name = spec.principal or by.name
        if spec.ttl is not None and not 0 < spec.ttl < float("inf"):
            raise InvalidArgument("ttl must be a positive number of seconds", field="ttl")
        if len(spec.note) > _MAX_NOTE:
            raise InvalidArgument(f"a note has at most {_MAX_NOTE} characters", field="note")
        text, record = make_key(self._clock.random(RANDOM_BYTES))
        now = self._clock.now()
        with self._iam.durably() as database:
            row = database.execute(sa.select(principals).where(principals.c.name == name)).first()
            if row is None or not sees(by.project, row.project):
                raise NotFound("no such principal", what="principal", principal=name)
            _need(by, "key.manage", row.project)
            holds = frozenset(database.scalars(sa.select(grants.c.permission).where(grants.c.principal == name)))
            given = holds if spec.permissions is None else frozenset(spec.permissions)
            check_delegation(by.project, by.permissions, row.project, given)
            view = KeyView(
                id=record.id, principal=name, permissions=None if spec.permissions is None else tuple(sorted(given)),
                created=now, expires=None if spec.ttl is None else now + spec.ttl, note=spec.note,
            )  # fmt: skip
            database.execute(
                keys.insert().values(
                    id=view.id, principal=name, salt=record.salt, hash=record.hash, created=now,
                    permissions=None if view.permissions is None else list(view.permissions),
                    expires=view.expires, note=view.note,
                )
            )  # fmt: skip
        return KeyCreated(key=view, text=text)

    def revoke_key(self, by: Principal, key_id: str) -> None:
        """End a key at once: one's own, or with key.manage that of a principal one sees."""
        query = sa.select(keys, principals.c.project).join(principals).where(keys.c.id == key_id)
        with self._iam.durably() as database:
            row = database.execute(query).first()
            if row is None or (row.principal != by.name and not sees(by.project, row.project)):
                raise NotFound("no such key", what="key", key=key_id)
            if row.principal != by.name:
                _need(by, "key.manage", row.project)
            database.execute(keys.delete().where(keys.c.id == key_id))

    def _principal_view(self, row: sa.Row[tuple[object, ...]]) -> PrincipalView:
        held = sa.select(grants.c.permission).where(grants.c.principal == row.name).order_by(grants.c.permission)
        permissions = tuple(self._iam.database.scalars(held))
        return PrincipalView(name=row.name, project=row.project, permissions=permissions, created=row.created)


def _need(by: Principal, permission: str, project: str) -> None:
    if not may(by.project, by.permissions, permission, project):
        raise PermissionDenied(f"this needs the permission {permission} in {project}", permission=permission)


def _project_view(path: str, account: Account) -> ProjectView:
    return ProjectView(path=path, quota=account.quota, used=account.used, delegated=account.delegated)


def _key_view(row: sa.Row[tuple[object, ...]]) -> KeyView:
    return KeyView(
        id=row.id, principal=row.principal, permissions=None if row.permissions is None else tuple(row.permissions),
        created=row.created, expires=row.expires, note=row.note,
    )  # fmt: skip
