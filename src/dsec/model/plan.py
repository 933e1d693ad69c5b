"""What passes between lifecycle and a backend: values, and no mechanism's name (house, "Four backends, one interface")."""

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from dsec.model.network import Link
from dsec.model.spec import BackendKind

__all__ = [
    "Aftermath", "Capabilities", "Handle", "Identity", "Life", "Limits", "Mount", "Plan", "Usage",
]  # fmt: skip


class Mount(Struct, frozen=True, kw_only=True):
    """Something to be seen in the sandbox.

    layer: part of the root (`target` ""), or a data layer at `target`; `source` is its directory on the node where it is
    mounted, `images` its image files for a backend that takes block devices. volume: `source` is its directory on the node.
    """

    kind: Literal["layer", "volume"]
    source: str
    target: str = ""
    read_only: bool = True
    digest: str = ""
    images: tuple[str, ...] = ()


class Limits(Struct, frozen=True, kw_only=True):
    """Bytes, cores and counts that a sandbox may use; every field is enforced by the backend or refused."""

    memory_bytes: int
    cpu_cores: float
    disk_bytes: int
    pids: int
    open_files: int
    shm_bytes: int


class Identity(Struct, frozen=True, kw_only=True):
    """Who the sandbox is to its own programs."""

    hostname: str
    no_new_privileges: bool = False
    qos: Literal["ls", "be"] = "be"


class Plan(Struct, frozen=True, kw_only=True):
    """All that a backend needs to start one sandbox. `layers`: lowest first. `mounts`: volumes and data layers. `link`: its network beside
    the loopback, None for none."""

    sandbox_id: str
    layers: tuple[Mount, ...]
    mounts: tuple[Mount, ...]
    limits: Limits
    identity: Identity
    link: Link | None = None


class Handle(Struct, frozen=True, kw_only=True):
    """What only its maker opens: `state` is versioned bytes of the backend named."""

    backend: BackendKind
    state: bytes


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a backend offers on this host; read by rules.admit alone. `why_not`: reason for each capability refused by name."""

    backend: BackendKind
    available: bool
    can_pause: bool = False
    can_snapshot: bool = False
    can_fork: bool = False
    can_show: bool = False
    network: bool = False
    why_not: dict[str, str] = {}


class Life(StrEnum):
    """What the kernel says of a handle after a restart: alive, gone (nothing left), or broken (something left)."""

    ALIVE = "alive"
    GONE = "gone"
    BROKEN = "broken"


class Aftermath(StrEnum):
    """What a failure left behind: nothing was begun, all was undone, or something remains that stop() must remove."""

    UNTOUCHED = "untouched"
    UNDONE = "undone"
    BROKEN = "broken"


class Usage(Struct, frozen=True, kw_only=True):
    """What a sandbox uses now; bytes, seconds and counts. Peaks, `oom_kills` and `pids_refused` (forks refused at the
    pids limit) are since its start. None: this host cannot say. `image_bytes_read`: of its layers, what has been read and is in the
    node's memory; sandboxes share it."""

    memory_bytes: int
    memory_peak_bytes: int
    memory_limit_bytes: int
    cpu_seconds: float
    pids: int
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    image_bytes_read: int | None = None
    oom_kills: int = 0
    pids_refused: int = 0
