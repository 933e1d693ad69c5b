"""The edge's durable memory: sandboxes, their events, their handles, and the ordered log of operations (SQLite, WAL).

Every write is one transaction made in the event loop: 20 to 40 us, less than a hop to a thread. A commit reaches the page
cache (synchronous=NORMAL in WAL mode), so it survives the death of this process at any point; a power cut, which may lose
the last ones, ends the sandboxes too. Checkpoints, which do fsync, are made by a second connection in a thread.
"""

import asyncio
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.model.errors import Busy, RuntimeFailure
from dsec.model.layers import Composition
from dsec.model.network import NetworkInForce
from dsec.model.plan import Handle
from dsec.model.spec import SandboxSpec
from dsec.model.views import PreviewView, SandboxEvent
from dsec.rules import lifecycle as table
from dsec.rules.oplog import Operation, Phase

__all__ = ["Journal", "Row", "layer_users", "volume_users"]

SCHEMA_VERSION = 4
_COMPACT_ROWS = 200
_RESERVE = 2 << 20

_log = logging.getLogger("dsec.edge")

_BOOT = "CREATE TABLE boot (one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL, offset REAL NOT NULL);"
_SCHEMA = f"""
{_BOOT}
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE sandboxes (
  id TEXT PRIMARY KEY, project TEXT NOT NULL, created REAL NOT NULL, request_id TEXT, fingerprint BLOB NOT NULL,
  spec BLOB NOT NULL, composition BLOB NOT NULL, handle BLOB, phases BLOB, active REAL, gone REAL
) WITHOUT ROWID;
CREATE INDEX sandboxes_by_age ON sandboxes (created, id);
CREATE INDEX sandboxes_gone ON sandboxes (gone) WHERE gone IS NOT NULL;
CREATE INDEX sandboxes_asked ON sandboxes (project, request_id) WHERE request_id IS NOT NULL;
CREATE TABLE events (sequence INTEGER PRIMARY KEY, sandbox TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX events_of ON events (sandbox, sequence);
CREATE TABLE operations (
  sandbox TEXT NOT NULL, request_id TEXT NOT NULL, sequence INTEGER NOT NULL, kind TEXT NOT NULL, fingerprint BLOB NOT NULL,
  phase TEXT NOT NULL, at REAL NOT NULL, result BLOB, PRIMARY KEY (sandbox, request_id)
) WITHOUT ROWID;
CREATE INDEX operations_kept ON operations (at) WHERE result IS NOT NULL;
"""

_NETWORKS = """
CREATE TABLE networks (sandbox TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE network_groups (number INTEGER PRIMARY KEY AUTOINCREMENT, project TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (project, name));
"""
_PREVIEWS = """
CREATE TABLE previews (id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, port INTEGER NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX previews_of ON previews (sandbox);
"""
# What a file of an earlier version lacks.
_SINCE = {1: _BOOT + _NETWORKS + _PREVIEWS, 2: _NETWORKS + _PREVIEWS, 3: _PREVIEWS}

_EVENT = (
    table.Requested | table.Mounted | table.Started | table.Failed | table.Died | table.StopAsked | table.Expired
    | table.Renewed | table.Killed | table.Unmounted | table.Stuck | table.Woken | table.Lost | table.Observed
)  # fmt: skip

_encode = msgspec.json.Encoder().encode
_event_decoder: msgspec.json.Decoder[table.Event] = msgspec.json.Decoder(_EVENT)
_spec_decoder = msgspec.json.Decoder(SandboxSpec)
_composition_decoder = msgspec.json.Decoder(Composition)
_network_decoder = msgspec.json.Decoder(NetworkInForce)
_handle_decoder = msgspec.json.Decoder(Handle)
_phases_decoder = msgspec.json.Decoder(dict[str, float])


class Row(Struct, frozen=True, kw_only=True):
    """One sandbox as the journal has it. Times are Unix seconds; `active`: its last recorded activity."""

    id: str
    project: str
    created: float
    request_id: str | None
    fingerprint: bytes
    spec: SandboxSpec
    composition: Composition
    handle: Handle | None = None
    phases: dict[str, float] = {}
    active: float | None = None
    gone: float | None = None


_COLUMNS = "id, project, created, request_id, fingerprint, spec, composition, handle, phases, active, gone"


def _row(found: Sequence[object]) -> Row:
    (id_, project, created, request_id, fingerprint, spec, composition, handle, phases, active, gone) = found
    return Row(
        id=str(id_),
        project=str(project),
        created=created,  # type: ignore[arg-type]
        request_id=request_id,  # type: ignore[arg-type]
        fingerprint=fingerprint,  # type: ignore[arg-type]
        spec=_spec_decoder.decode(spec),  # type: ignore[arg-type]
        composition=_composition_decoder.decode(composition),  # type: ignore[arg-type]
        handle=None if handle is None else _handle_decoder.decode(handle),  # type: ignore[arg-type]
        phases={} if phases is None else _phases_decoder.decode(phases),  # type: ignore[arg-type]
        active=active,  # type: ignore[arg-type]
        gone=gone,  # type: ignore[arg-type]
    )


def _preview(found: tuple[str, str, int, float]) -> PreviewView:
    return PreviewView(id=found[0], sandbox_id=found[1], port=found[2], expires=found[3])


@contextmanager
def _typed() -> Iterator[None]:
    """SQLite's errors in the taxonomy. A full disk is Busy: nothing has been done yet, and another node may have room."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise Busy("the edge's journal has no room on its disk", retry_after=5.0, limit="journal") from error
        raise RuntimeFailure(f"the edge's journal cannot be written: {error.sqlite_errorname}") from error
    except sqlite3.DatabaseError as error:
        raise RuntimeFailure("the edge's journal is damaged") from error


class Journal:
    """One journal file. Writers raise Busy when the disk is full and RuntimeFailure when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.resolve().with_suffix(".reserve")
        with _typed():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=True, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=0")
            self._db.execute("PRAGMA cache_size=-8192")
            self._open_schema()
        self._keep_reserve()

    def _open_schema(self) -> None:
        [version] = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}{_NETWORKS}{_PREVIEWS}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        elif version in _SINCE:
            self._db.executescript(f"BEGIN;{_SINCE[version]}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise RuntimeFailure(f"{self._path} has journal version {version}; this edge reads {SCHEMA_VERSION}")

    def close(self) -> None:
        """Closes the file; what was written stays."""
        self._db.close()

    def _keep_reserve(self) -> None:
        """Room set aside on the journal's disk, so that a start on a full one can still record what ends."""
        try:
            with self._reserve.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE)
        except OSError as error:
            _log.warning("no room can be set aside beside the journal: %s", error.strerror)
            self._reserve.unlink(missing_ok=True)

    def next_epoch(self) -> int:
        """The number of this start of the edge: 1, 2, ... On a full disk it takes the room that was set aside."""
        try:
            return self._next_epoch()
        except Busy:
            _log.error("the journal's disk is full; room that was set aside is taken for what ends now")
            self._reserve.unlink(missing_ok=True)
            return self._next_epoch()

    def _next_epoch(self) -> int:
        with _typed():
            self._db.execute("INSERT INTO meta VALUES ('epoch', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1")
            return int(self._db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()[0])

    def boot(self) -> tuple[str, float] | None:
        """The boot of the host in which this journal was last used, and the offset of the edge's time then; None at first."""
        found = self._db.execute("SELECT id, offset FROM boot").fetchone()
        return None if found is None else (str(found[0]), float(found[1]))

    def keep_boot(self, boot: str, offset: float) -> None:
        """Records the boot and the offset that the edge runs with now."""
        if self.boot() != (boot, offset):
            with _typed():
                self._db.execute("INSERT OR REPLACE INTO boot VALUES (1, ?, ?)", (boot, offset))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _typed():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if (
                    self._db.in_transaction
                ):  # SQLite has rolled back by itself after some errors, a full disk among them
                    self._db.execute("ROLLBACK")
                raise

    def ask(self, row: Row, event: table.Event, at: float) -> None:
        """A new sandbox and its first event."""
        values = (
            row.id, row.project, row.created, row.request_id, row.fingerprint, _encode(row.spec), _encode(row.composition),
        )  # fmt: skip
        with self._transaction():
            self._db.execute(f"INSERT INTO sandboxes ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,NULL,NULL,NULL,NULL)", values)
            self._append(row.id, event, at)

    def event(self, sandbox: str, event: table.Event, at: float) -> None:
        """One event."""
        with _typed():
            self._append(sandbox, event, at)

    def owe(self, sandbox: str, handle: Handle) -> None:
        """The handle of a cell that is about to be made: from now on its undo is owed."""
        with _typed():
            self._db.execute("UPDATE sandboxes SET handle = ? WHERE id = ?", (_encode(handle), sandbox))

    def started(self, sandbox: str, event: table.Event, at: float, phases: dict[str, float]) -> None:
        """The event that it runs, and how long each phase took."""
        with self._transaction():
            self._db.execute("UPDATE sandboxes SET phases = ? WHERE id = ?", (_encode(phases), sandbox))
            self._append(sandbox, event, at)

    def ended(self, sandbox: str, event: table.Event, at: float) -> None:
        """The last event: nothing is left of it."""
        with self._transaction():
            self._db.execute("UPDATE sandboxes SET gone = ? WHERE id = ?", (at, sandbox))
            self._append(sandbox, event, at)

    def activity(self, times: Sequence[tuple[float, str]]) -> None:
        """(Unix seconds, sandbox) of last activity, for many at once."""
        with self._transaction():
            self._db.executemany("UPDATE sandboxes SET active = ? WHERE id = ?", times)

    def _append(self, sandbox: str, event: table.Event, at: float) -> None:
        self._db.execute("INSERT INTO events (sandbox, at, body) VALUES (?,?,?)", (sandbox, at, _encode(event)))

    def has_living(self) -> bool:
        """Whether a sandbox is not gone."""
        return self._db.execute("SELECT 1 FROM sandboxes WHERE gone IS NULL LIMIT 1").fetchone() is not None

    def living(self) -> list[tuple[Row, list[tuple[table.Event, float]]]]:
        """All sandboxes that are not gone, oldest first, each with its events."""
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM sandboxes WHERE gone IS NULL ORDER BY created, id").fetchall()
        return [(_row(found), self.events(str(found[0]))) for found in rows]

    def events(self, sandbox: str) -> list[tuple[table.Event, float]]:
        """A sandbox's events in order, with their Unix seconds."""
        found = self._db.execute("SELECT body, at FROM events WHERE sandbox = ? ORDER BY sequence", (sandbox,))
        return [(_event_decoder.decode(body), at) for body, at in found]

    def set_network(self, sandbox: str, network: NetworkInForce) -> None:
        """What is in force for a sandbox from now on."""
        with _typed():
            self._db.execute(
                "INSERT INTO networks VALUES (?,?) ON CONFLICT (sandbox) DO UPDATE SET body = excluded.body",
                (sandbox, _encode(network)),
            )

    def network(self, sandbox: str) -> NetworkInForce | None:
        """What was last in force for a sandbox; None for one that never had a network."""
        found = self._db.execute("SELECT body FROM networks WHERE sandbox = ?", (sandbox,)).fetchone()
        return None if found is None else _network_decoder.decode(found[0])

    def group_number(self, project: str, name: str) -> int:
        """The number of a project's group, the same one for ever: never 0, never another group's."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO network_groups (project, name) VALUES (?,?)", (project, name))
            found = self._db.execute(
                "SELECT number FROM network_groups WHERE project = ? AND name = ?", (project, name)
            ).fetchone()
        return int(found[0])

    def keep_preview(self, preview: PreviewView, now: float) -> None:
        """A link; those of its sandbox that have expired at `now` are forgotten."""
        with _typed():
            self._db.execute("DELETE FROM previews WHERE sandbox = ? AND expires <= ?", (preview.sandbox_id, now))
            values = (preview.id, preview.sandbox_id, preview.port, preview.expires)
            self._db.execute("INSERT INTO previews VALUES (?,?,?,?)", values)

    def preview(self, preview: str, now: float) -> PreviewView | None:
        """A link that has not expired at `now`."""
        found = self._db.execute("SELECT * FROM previews WHERE id = ? AND expires > ?", (preview, now)).fetchone()
        return None if found is None else _preview(found)

    def previews(self, sandbox: str, now: float) -> list[PreviewView]:
        """The links of a sandbox that have not expired at `now`."""
        found = self._db.execute(
            "SELECT * FROM previews WHERE sandbox = ? AND expires > ? ORDER BY expires, id", (sandbox, now)
        )
        return [_preview(each) for each in found]

    def revoke_preview(self, sandbox: str, preview: str) -> None:
        """Forgets a link of a sandbox, if there is one."""
        with _typed():
            self._db.execute("DELETE FROM previews WHERE sandbox = ? AND id = ?", (sandbox, preview))

    def row(self, sandbox: str) -> Row | None:
        """One sandbox, living or gone; None for one not known, or forgotten."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()
        return None if found is None else _row(found)

    def asked(self, project: str, request_id: str) -> Row | None:
        """The newest sandbox that `request_id` of `project` asked for."""
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM sandboxes WHERE project = ? AND request_id = ? ORDER BY created DESC LIMIT 1",
            (project, request_id),
        ).fetchone()
        return None if found is None else _row(found)

    def page(self, before: tuple[float, str] | None, limit: int) -> list[Row]:
        """Sandboxes, newest first, older than (created, id) `before`."""
        where, values = ("", ()) if before is None else ("WHERE (created, id) < (?, ?)", before)
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM sandboxes {where} ORDER BY created DESC, id DESC LIMIT ?", (*values, limit)
        )
        return [_row(each) for each in found]

    def story(self, sandbox: str, limit: int) -> list[SandboxEvent]:
        """What happened to a sandbox and what was done in it, oldest first, at most `limit` of the newest."""
        events = self._db.execute(
            "SELECT at, body FROM events WHERE sandbox = ? ORDER BY sequence DESC LIMIT ?", (sandbox, limit)
        ).fetchall()
        told = []
        for at, body in reversed(events):
            fields = msgspec.json.decode(body)
            told.append(SandboxEvent(at=at, event=fields.pop("type"), fields=fields))
        operations = self._db.execute(
            "SELECT at, kind, request_id, sequence, phase FROM operations WHERE sandbox = ? ORDER BY sequence DESC LIMIT ?",
            (sandbox, limit),
        )
        for at, kind, request_id, sequence, phase in operations:
            told.append(
                SandboxEvent(at=at, event=kind, fields={"request_id": request_id, "sequence": sequence, "phase": phase})
            )
        told.sort(key=lambda each: each.at)
        return told[-limit:]

    def operation(self, sandbox: str, request_id: str) -> Operation | None:
        """What is recorded under a request_id."""
        found = self._db.execute(
            "SELECT sequence, request_id, kind, fingerprint, phase, at, result IS NOT NULL FROM operations"
            " WHERE sandbox = ? AND request_id = ?",
            (sandbox, request_id),
        ).fetchone()
        if found is None:
            return None
        sequence, name, kind, fingerprint, phase, at, kept = found
        return Operation(sequence, name, kind, fingerprint, Phase(phase), at, bool(kept))

    def last_sequence(self, sandbox: str) -> int:
        """The highest sequence number of a sandbox's operations, 0 without one."""
        found = self._db.execute("SELECT max(sequence) FROM operations WHERE sandbox = ?", (sandbox,)).fetchone()
        return int(found[0] or 0)

    def begin(self, sandbox: str, operation: Operation) -> bool:
        """Records an operation before it acts; False, and nothing recorded, where its request_id is known already."""
        values = (
            sandbox, operation.request_id, operation.sequence, operation.kind, operation.fingerprint, operation.phase,
            operation.at,
        )  # fmt: skip
        with _typed():
            try:
                self._db.execute("INSERT INTO operations VALUES (?,?,?,?,?,?,?,NULL)", values)
            except sqlite3.IntegrityError:
                return False
        return True

    def finish(self, ends: Sequence[tuple[Phase, float, bytes | None, str, str]]) -> None:
        """Records how operations ended: phase, Unix seconds, result, sandbox, request_id; all of them or none."""
        statement = "UPDATE operations SET phase = ?, at = ?, result = ? WHERE sandbox = ? AND request_id = ?"
        if len(ends) == 1:
            with _typed():
                self._db.execute(statement, ends[0])
            return
        with self._transaction():
            self._db.executemany(statement, ends)

    def withdraw(self, sandbox: str, request_id: str) -> None:
        """Forgets an operation that did not act at all, so that it may be asked for again."""
        with _typed():
            self._db.execute("DELETE FROM operations WHERE sandbox = ? AND request_id = ?", (sandbox, request_id))

    def result(self, sandbox: str, request_id: str) -> bytes | None:
        """The recorded result of an operation."""
        found = self._db.execute(
            "SELECT result FROM operations WHERE sandbox = ? AND request_id = ?", (sandbox, request_id)
        ).fetchone()
        return None if found is None else found[0]

    def compact(self, *, gone_before: float, results_before: float) -> int:
        """Forgets some sandboxes gone before then and some results recorded before then; how many rows it took, at most a few
        hundred, so that the loop is not held up; call it again while it is not 0."""
        with self._transaction():
            old = self._db.execute(
                "SELECT id FROM sandboxes WHERE gone < ? ORDER BY gone LIMIT ?", (gone_before, _COMPACT_ROWS)
            ).fetchall()
            for name in ("events", "operations", "networks", "previews"):
                self._db.executemany(f"DELETE FROM {name} WHERE sandbox = ?", old)
            self._db.executemany("DELETE FROM sandboxes WHERE id = ?", old)
            stale = self._db.execute(
                "SELECT sandbox, request_id FROM operations WHERE result IS NOT NULL AND at < ? LIMIT ?",
                (results_before, _COMPACT_ROWS),
            ).fetchall()
            self._db.executemany("UPDATE operations SET result = NULL WHERE sandbox = ? AND request_id = ?", stale)
        return len(old) + len(stale)

    async def checkpoint(self) -> None:
        """Moves the write-ahead log into the file, in a thread, so that the log stays small; sets room aside again."""
        await asyncio.to_thread(self._checkpoint)
        if not self._reserve.exists():
            self._keep_reserve()

    def _checkpoint(self) -> None:
        with _typed():
            db = sqlite3.connect(self._path, isolation_level=None, timeout=5.0)
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            finally:
                db.close()


def volume_users(path: Path) -> Counter[str]:
    """How many sandboxes of which something is left use each volume, by the journal at `path`, which another process may be
    writing. Raises RuntimeFailure."""
    specs = (_spec_decoder.decode(spec) for (spec,) in _of_living(path, "spec"))
    return Counter(volume for spec in specs for volume in {each.volume for each in spec.mounts if each.volume})


def layer_users(path: Path) -> Counter[str]:
    """How many sandboxes of which something is left read each layer (by digest) as part of their root; as `volume_users`."""
    compositions = (_composition_decoder.decode(found) for (found,) in _of_living(path, "composition"))
    return Counter(digest for composition in compositions for digest in composition.layers)


def _of_living(path: Path, column: str) -> list[tuple[bytes]]:
    if not path.exists():
        return []
    with _typed(), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as db:
        return db.execute(f"SELECT {column} FROM sandboxes WHERE gone IS NULL").fetchall()
