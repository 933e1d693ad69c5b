"""Projects, principals, keys and quotas as callers see them."""

from msgspec import Struct

__all__ = [
    "Amount", "KeyCreated", "KeySpec", "KeyView", "PrincipalSpec", "PrincipalView", "ProjectSpec", "ProjectView", "Quota",
]  # fmt: skip


class Amount(Struct, frozen=True, kw_only=True):
    """How much of a node's goods: a count, MiB, thousandths of a core, MiB."""

    sandboxes: int = 0
    memory_mb: int = 0
    cpu_milli: int = 0
    disk_mb: int = 0


class Quota(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that a project and those below it may hold, in the units of Amount. None: no bound (below root only)."""

    sandboxes: int | None = None
    memory_mb: int | None = None
    cpu_milli: int | None = None
    disk_mb: int | None = None


class ProjectSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project to be created, or a quota to be set. `quota` is taken out of the parent's and comes back with removal."""

    path: str
    quota: Quota = Quota()


class ProjectView(Struct, frozen=True, kw_only=True):
    """A project. `used`: held by its own sandboxes. `delegated`: given to its subprojects."""

    path: str
    quota: Quota
    used: Amount
    delegated: Amount


class PrincipalSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person, service or agent to be created in `project` with `permissions`, none that its creator does not hold."""

    name: str
    project: str
    permissions: tuple[str, ...]


class PrincipalView(Struct, frozen=True, kw_only=True):
    """A principal. `created`: Unix seconds."""

    name: str
    project: str
    permissions: tuple[str, ...]
    created: float


class KeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to be made for `principal` (None: the caller). `permissions` None: all of the principal's, also later ones.

    `ttl`: seconds until the key ends by itself; None: it does not.
    """

    principal: str | None = None
    permissions: tuple[str, ...] | None = None
    ttl: float | None = None
    note: str = ""


class KeyView(Struct, frozen=True, kw_only=True):
    """A key without its secret. Times are Unix seconds."""

    id: str
    principal: str
    permissions: tuple[str, ...] | None
    created: float
    expires: float | None
    note: str


class KeyCreated(Struct, frozen=True, kw_only=True):
    """A new key. `text` is what a client sends; it is shown this once and stored nowhere."""

    key: KeyView
    text: str
