"""IAM: who asks, what it may do, and how much its project holds (paper, layer 1).

One process owns the database. Accounts are kept in memory beside it, written through in the same call; authenticated keys
are cached and forgotten at every change of a principal or key, so revocation is immediate.
"""

import hashlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct

from dsec.cluster.keys import RANDOM_BYTES, KeyRecord, key_id_of, make_key, matches
from dsec.cluster.tables import grants, keys, open_database, principals, projects, quotas, reservations
from dsec.model.errors import Busy, NotFound, PermissionDenied, RuntimeFailure, Unauthenticated
from dsec.model.spec import SandboxSpec
from dsec.model.tenancy import Amount, Quota
from dsec.model.views import Me
from dsec.ports.clock import Clock
from dsec.ports.cluster import Principal
from dsec.rules.access import PERMISSIONS, ROOT_PROJECT, may, sees
from dsec.rules.quota import Account, amount_of, release, reserve

__all__ = ["ROOT_PRINCIPAL", "SqlIam"]

_log = logging.getLogger("dsec.cluster")

ROOT_PRINCIPAL = "root"

_INSERT_RESERVATION = reservations.insert()
_DELETE_RESERVATION = reservations.delete().where(reservations.c.sandbox_id == sa.bindparam("held"))


class _Known(Struct, frozen=True):
    principal: Principal
    expires: float | None


class SqlIam:
    """The Iam port on SQLite. `open` before use, `close` after; not to be shared between threads or processes."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._pepper = clock.random(32)
        self.accounts: dict[str, Account] = {}
        self._held: dict[str, tuple[str, Amount]] = {}
        self._database: sa.Connection | None = None

    @property
    def database(self) -> sa.Connection:
        """The open connection; RuntimeError before `open`."""
        if self._database is None:
            raise RuntimeError("IAM is not open")
        return self._database

    def open(self, keep_first_key: Callable[[str], None]) -> None:
        """Open the database; at the first start make project and principal `root` and its key.

        `keep_first_key` gets the key's text before the key is valid, so that a crash between the two repeats the first start.
        """
        self._database = open_database(self._path)
        with self.durably() as database:
            if database.scalar(sa.select(principals.c.name).where(principals.c.name == ROOT_PRINCIPAL)) is None:
                self._first_start(database, keep_first_key)
            held = set(database.scalars(sa.select(grants.c.permission).where(grants.c.principal == ROOT_PRINCIPAL)))
            missing = sorted(PERMISSIONS.keys() - held)
            if missing:
                database.execute(grants.insert(), [{"principal": ROOT_PRINCIPAL, "permission": p} for p in missing])
            self._load(database)

    def _first_start(self, database: sa.Connection, keep_first_key: Callable[[str], None]) -> None:
        now = self._clock.now()
        text, record = make_key(self._clock.random(RANDOM_BYTES))
        database.execute(projects.insert().values(path=ROOT_PROJECT, created=now))
        database.execute(quotas.insert().values(project=ROOT_PROJECT))
        database.execute(principals.insert().values(name=ROOT_PRINCIPAL, project=ROOT_PROJECT, created=now))
        database.execute(
            keys.insert().values(
                id=record.id,
                principal=ROOT_PRINCIPAL,
                salt=record.salt,
                hash=record.hash,
                created=now,
                note="first start",
            )
        )
        keep_first_key(text)

    def _load(self, database: sa.Connection) -> None:
        quota_of = {
            row.project: Quota(
                sandboxes=row.sandboxes, memory_mb=row.memory_mb, cpu_milli=row.cpu_milli, disk_mb=row.disk_mb
            )
            for row in database.execute(sa.select(quotas))
        }
        delegated = {path: Amount() for path in quota_of}
        for path, quota in quota_of.items():
            parent, _, _ = path.rpartition("/")
            if parent:
                delegated[parent] = _plus(delegated[parent], quota)
        self.accounts = {path: Account(quota=quota, delegated=delegated[path]) for path, quota in quota_of.items()}
        self._held = {}
        for row in database.execute(sa.select(reservations)):
            amount = Amount(
                sandboxes=row.sandboxes, memory_mb=row.memory_mb, cpu_milli=row.cpu_milli, disk_mb=row.disk_mb
            )
            self._held[row.sandbox_id] = (row.project, amount)
            # Taken back as it was granted: a quota made smaller since stops new sandboxes, not these.
            self.accounts[row.project] = release(self.accounts[row.project], _negative(amount))

    def close(self) -> None:
        """Close the database. Any number of times."""
        if self._database is not None:
            self._database.close()
            self._database.engine.dispose()
            self._database = None

    @contextmanager
    def durably(self) -> Iterator[sa.Connection]:
        """A transaction that is on the disk when it ends, and after which no cached key is believed."""
        database = self.database
        # Reservations can be rebuilt from the edges, so they commit without a sync; keys, grants and quotas cannot.
        database.exec_driver_sql("PRAGMA synchronous=FULL")
        database.commit()
        try:
            with database.begin():
                yield database
        finally:
            self._known.clear()
            database.exec_driver_sql("PRAGMA synchronous=NORMAL")
            database.commit()

    async def authenticate(self, key: str) -> Principal:
        """The principal of a key's text. Raises Unauthenticated for one that is unknown, revoked or expired."""
        digest = hashlib.blake2b(key.encode(), key=self._pepper, digest_size=16).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = self._look_up(key)
        if known.expires is not None and known.expires <= self._clock.now():
            raise Unauthenticated("the API key has expired")
        return known.principal

    def _look_up(self, key: str) -> _Known:
        name = key_id_of(key)
        if name is None:
            raise Unauthenticated("this is no API key of the platform")
        query = sa.select(keys, principals.c.project).join(principals).where(keys.c.id == name)
        with self.database.begin():
            row = self.database.execute(query).first()
            if row is None or not matches(key, KeyRecord(id=row.id, salt=row.salt, hash=row.hash)):
                raise Unauthenticated("the API key is not known, or was revoked")
            granted = self.database.scalars(sa.select(grants.c.permission).where(grants.c.principal == row.principal))
            permissions = frozenset(granted)
        if row.permissions is not None:
            permissions &= frozenset(row.permissions)
        return _Known(Principal(name=row.principal, project=row.project, permissions=permissions), row.expires)

    async def authorise(self, principal: Principal, permission: str, project: str) -> None:
        """Raises PermissionDenied unless `principal` sees `project` and holds `permission`; NotFound for no project."""
        if not may(principal.project, principal.permissions, permission, project):
            if not sees(principal.project, project):
                raise PermissionDenied("the project is not yours", project=project)
            raise PermissionDenied(f"this needs the permission {permission}", permission=permission, project=project)
        if project not in self.accounts:
            raise NotFound("no such project", what="project", project=project)

    async def reserve(self, project: str, sandbox_id: str, spec: SandboxSpec) -> None:
        """Hold a sandbox's share of its project's quota; again for the same id does nothing. Raises QuotaExceeded."""
        if sandbox_id in self._held:
            return
        account = self.accounts.get(project)
        if account is None:
            raise NotFound("no such project", what="project", project=project)
        amount = amount_of(spec)
        after = reserve(account, amount, project)
        row = {
            "sandbox_id": sandbox_id, "project": project, "sandboxes": amount.sandboxes, "memory_mb": amount.memory_mb,
            "cpu_milli": amount.cpu_milli, "disk_mb": amount.disk_mb,
        }  # fmt: skip
        try:
            with self.database.begin():
                self.database.execute(_INSERT_RESERVATION, row)
        except sa.exc.OperationalError as error:
            if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise Busy("the database of IAM has no room on its disk", retry_after=5.0, limit="iam") from error
            raise RuntimeFailure(f"the database of IAM cannot be written: {error.orig}") from error
        self.accounts[project] = after
        self._held[sandbox_id] = (project, amount)

    async def release(self, sandbox_id: str) -> None:
        """Give back what `reserve` held for the id; nothing where it holds nothing. What cannot be written down now, on a full
        disk, stays held until it is settled."""
        held = self._held.get(sandbox_id)
        if held is None:
            return
        try:
            with self.database.begin():
                self.database.execute(_DELETE_RESERVATION, {"held": sandbox_id})
        except sa.exc.OperationalError as error:
            _log.warning("the quota of sandbox %s is not given back yet: %s", sandbox_id, error.orig)
            return
        project, amount = self._held.pop(sandbox_id)
        self.accounts[project] = release(self.accounts[project], amount)

    def held(self) -> frozenset[str]:
        """Ids of the sandboxes that hold quota."""
        return frozenset(self._held)

    async def me(self, principal: Principal) -> Me:
        """What the caller is told about itself."""
        return Me(principal=principal.name, project=principal.project, permissions=tuple(sorted(principal.permissions)))


def _negative(amount: Amount) -> Amount:
    return Amount(
        sandboxes=-amount.sandboxes, memory_mb=-amount.memory_mb, cpu_milli=-amount.cpu_milli, disk_mb=-amount.disk_mb
    )


def _plus(amount: Amount, quota: Quota) -> Amount:
    return Amount(
        sandboxes=amount.sandboxes + (quota.sandboxes or 0),
        memory_mb=amount.memory_mb + (quota.memory_mb or 0),
        cpu_milli=amount.cpu_milli + (quota.cpu_milli or 0),
        disk_mb=amount.disk_mb + (quota.disk_mb or 0),
    )
