"""What a caller asks for when it creates a sandbox: one record, the same in the SDK, over HTTP and in the journal."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from dsec.model.network import NetLimits, NetworkRules

__all__ = ["BackendKind", "Batch", "MountSpec", "SandboxSpec"]

BackendKind = Literal["container", "microvm", "fullvm", "fncall"]


class MountSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something by name at a path: `volume` (shared, writable unless read_only) or `data` (a data layer, read-only).

    Exactly one of `volume` and `data` is given. `target` is an absolute path in the sandbox.
    """

    target: str
    volume: str | None = None
    data: str | None = None
    read_only: bool = False


class SandboxSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sandbox to be created. Sizes in MiB (2**20 bytes), times in seconds.

    `ttl_running_stop`: idle time after which it is stopped; any call or attached running command resets it; None: never.
    `ttl_absolute`: life time that nothing extends; None: no end. `cpu_cores_limit` may be fractional, and above the
    host's count (CPU is overcommitted). `init_user`: user of commands when a call names none; "" means the image's.
    `network_rules`: None means no network but loopback, and that for good; else only what is named and not False can be reached.
    `network_phases`: instead, rules by the name of a phase; `network_phase` is the first in force, None: the first named.
    `network_group`: sandboxes of one project that name the same group reach each other, by `aliases` too. `job` and `labels` serve list and stop.
    """

    container_image: str
    backend: BackendKind = "container"
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    memory_limit_mb: int = 2048
    cpu_cores_limit: float = 1.0
    disk_limit_mb: int = 4096
    pids_limit: int = 512
    open_files_limit: int = 4096
    shm_size_mb: int = 64
    ttl_running_stop: float | None = 300.0
    ttl_absolute: float | None = None
    network_rules: NetworkRules | None = None
    network_phases: dict[str, NetworkRules] = {}
    network_phase: str | None = None
    network_limits: NetLimits = NetLimits()
    network_group: str | None = None
    aliases: tuple[str, ...] = ()
    init_user: str = ""
    env: dict[str, str] = {}
    cwd: str | None = None
    labels: dict[str, str] = {}
    job: str | None = None
    qos: Literal["ls", "be"] = "be"
    mounts: tuple[MountSpec, ...] = ()
    hostname: str | None = None
    no_new_privileges: bool = False
    project: str | UnsetType = UNSET


class Batch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` sandboxes of one spec, at most `window` of them being created at any moment. `key`: idempotency prefix."""

    spec: SandboxSpec
    count: int
    window: int = 16
    key: str | None = None
