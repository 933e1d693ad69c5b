"""The tables of IAM: SQLAlchemy Core, so that one node keeps them in SQLite and a cluster can in PostgreSQL."""

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from dsec.model.errors import RuntimeFailure

__all__ = [
    "SCHEMA_VERSION", "grants", "keys", "metadata", "open_database", "principals", "projects", "quotas", "reservations",
]  # fmt: skip

SCHEMA_VERSION = 1

metadata = sa.MetaData()

schema = sa.Table("schema", metadata, sa.Column("version", sa.Integer, primary_key=True))

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),
)

quotas = sa.Table(
    "quotas",
    metadata,
    sa.Column("project", sa.Text, sa.ForeignKey("projects.path", ondelete="CASCADE"), primary_key=True),
    sa.Column("sandboxes", sa.Integer),
    sa.Column("memory_mb", sa.Integer),
    sa.Column("cpu_milli", sa.Integer),
    sa.Column("disk_mb", sa.Integer),
)

principals = sa.Table(
    "principals",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, sa.ForeignKey("projects.path"), nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)

grants = sa.Table(
    "grants",
    metadata,
    sa.Column("principal", sa.Text, sa.ForeignKey("principals.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("permission", sa.Text, primary_key=True),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("principal", sa.Text, sa.ForeignKey("principals.name", ondelete="CASCADE"), nullable=False),
    sa.Column("salt", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("permissions", sa.JSON(none_as_null=True)),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float),
    sa.Column("note", sa.Text, nullable=False),
)

reservations = sa.Table(
    "reservations",
    metadata,
    sa.Column("sandbox_id", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, sa.ForeignKey("projects.path"), nullable=False),
    sa.Column("sandboxes", sa.Integer, nullable=False),
    sa.Column("memory_mb", sa.Integer, nullable=False),
    sa.Column("cpu_milli", sa.Integer, nullable=False),
    sa.Column("disk_mb", sa.Integer, nullable=False),
)


def _prepare(connection: sa.engine.interfaces.DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def open_database(path: Path) -> sa.Connection:
    """The connection to IAM's database at `path`, made if it is not there. Raises RuntimeFailure for a newer schema."""
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=StaticPool)
    sa.event.listen(engine, "connect", _prepare)
    connection = engine.connect()
    with connection.begin():
        metadata.create_all(connection)
        version = connection.scalar(sa.select(schema.c.version))
        if version is None:
            connection.execute(schema.insert().values(version=SCHEMA_VERSION))
    path.chmod(0o600)
    if version not in (None, SCHEMA_VERSION):
        connection.close()
        engine.dispose()
        raise RuntimeFailure(f"{path} has schema {version}, this version knows {SCHEMA_VERSION}: use a newer dsec")
    return connection
