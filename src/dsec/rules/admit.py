"""May this sandbox start on this node? A request is malformed, can never be served here, must wait, or is admitted.

Memory rule: the memory limits of all admitted sandboxes together stay within `memory_overcommit` times the host's memory,
and a create is turned away while the host has less than `memory_reserve_bytes` really available. CPU is overcommitted
without a limit (a limit is a ceiling, not a reservation); so is disk, whose pool says by itself when it is full.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from dsec.model.errors import Busy, InvalidArgument, Unsupported
from dsec.model.plan import Capabilities
from dsec.model.spec import MountSpec, SandboxSpec
from dsec.rules.netrules import check_network, wants_network

__all__ = ["MIB", "NO_NETWORK", "Committed", "Room", "admit", "check", "memory_of"]

MIB = 1 << 20
_DAYS_30 = 30 * 86400.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_TEXT_MAX = 256
_MAP_MAX = 64
_ENV_BYTES_MAX = 128 * 1024
_TOOLKITS_MAX = 64
NO_NETWORK = "no network rule can be enforced here"


class Room(Struct, frozen=True, kw_only=True):
    """What a node has for sandboxes. Bytes and counts."""

    memory_bytes: int
    memory_overcommit: float = 32.0
    memory_reserve_bytes: int = 256 * MIB
    sandboxes: int = 3200
    retry_after: float = 1.0


class Committed(Struct, frozen=True, kw_only=True):
    """What admitted sandboxes may use together, and what the host really has free now."""

    sandboxes: int
    memory_bytes: int
    memory_available: int


def memory_of(spec: SandboxSpec) -> int:
    """Bytes that a sandbox is counted with."""
    return spec.memory_limit_mb * MIB


def check(spec: SandboxSpec) -> None:
    """Raises InvalidArgument naming the first field with an impossible value."""
    if not spec.container_image:
        raise InvalidArgument("an image name is needed", field="container_image")
    _check_sizes(spec)
    for field, value in (("ttl_running_stop", spec.ttl_running_stop), ("ttl_absolute", spec.ttl_absolute)):
        if value is not None and not 0 < value <= _DAYS_30:
            raise InvalidArgument("more than 0 s, at most 30 days, or null for none", field=field)
    for field, texts in (("labels", spec.labels), ("env", spec.env)):
        _check_map(field, texts)
    if spec.hostname is not None and not _NAME.match(spec.hostname):
        raise InvalidArgument("1 to 63 of a-z, 0-9 and inner hyphens", field="hostname")
    if spec.cwd is not None and (not spec.cwd.startswith("/") or "\0" in spec.cwd):
        raise InvalidArgument("an absolute path", field="cwd")
    for field, text in (("job", spec.job or ""), ("init_user", spec.init_user)):
        if len(text) > _TEXT_MAX or not text.isprintable():
            raise InvalidArgument(f"at most {_TEXT_MAX} printable characters", field=field)
    if len(spec.toolkits) > _TOOLKITS_MAX:
        raise InvalidArgument(f"at most {_TOOLKITS_MAX}", field="toolkits")
    for index, mount in enumerate(spec.mounts):
        _check_mount(f"mounts[{index}]", mount)
    check_network(spec)


def _check_sizes(spec: SandboxSpec) -> None:
    sizes: tuple[tuple[str, float, float, float], ...] = (
        ("memory_limit_mb", spec.memory_limit_mb, 16, 1 << 24),
        ("cpu_cores_limit", spec.cpu_cores_limit, 0.01, 4096),
        ("disk_limit_mb", spec.disk_limit_mb, 1, 1 << 30),
        ("pids_limit", spec.pids_limit, 4, 1 << 20),
        ("open_files_limit", spec.open_files_limit, 16, 1 << 20),
        ("shm_size_mb", spec.shm_size_mb, 1, 1 << 20),  # 0 would mean no bound to tmpfs,
    )
    for field, value, least, most in sizes:
        if not least <= value <= most:
            raise InvalidArgument(f"{least} to {most}, not {value}", field=field)


def _check_map(field: str, texts: Mapping[str, str]) -> None:
    size = 0
    for key, value in texts.items():
        size += len(key) + len(value) + 2
        if not key or "\0" in key or "\0" in value or (field == "env" and "=" in key):
            raise InvalidArgument("names are not empty and hold no `=`, nothing holds NUL", field=f"{field}.{key[:64]}")
    if field == "labels" and (
        len(texts) > _MAP_MAX or any(len(k) > _TEXT_MAX or len(v) > _TEXT_MAX for k, v in texts.items())
    ):
        raise InvalidArgument(f"at most {_MAP_MAX} labels of at most {_TEXT_MAX} characters", field="labels")
    if size > _ENV_BYTES_MAX:
        raise InvalidArgument(f"at most {_ENV_BYTES_MAX} bytes together", field=field)


def _check_mount(field: str, mount: MountSpec) -> None:
    if (mount.volume is None) == (mount.data is None):
        raise InvalidArgument("exactly one of `volume` and `data`", field=field)
    parts = mount.target.split("/")
    if parts[0] or not any(parts) or ".." in parts or "." in parts or "\0" in mount.target:
        raise InvalidArgument("an absolute path other than / without . and ..", field=f"{field}.target")


def admit(spec: SandboxSpec, backends: Mapping[str, Capabilities], room: Room, committed: Committed) -> None:
    """Raises Unsupported where this node can never start `spec`, Busy where it cannot now."""
    offered = backends.get(spec.backend)
    if offered is None or not offered.available:
        why = "; ".join(offered.why_not.values()) if offered else "no such backend on this node"
        raise Unsupported(f"the {spec.backend} backend is not available: {why}", feature=f"backend.{spec.backend}")
    wanted = wants_network(spec)
    if wanted is not None and not offered.network:
        raise Unsupported(f"{wanted}: {offered.why_not.get('network', NO_NETWORK)}", feature=wanted)
    most = int(room.memory_bytes * room.memory_overcommit)
    memory = memory_of(spec)
    if memory > most:
        raise Unsupported(f"this node admits at most {most // MIB} MiB", feature="memory_limit_mb")
    if committed.sandboxes >= room.sandboxes:
        raise Busy(f"the node has its {room.sandboxes} sandboxes", retry_after=room.retry_after, limit="sandboxes")
    if committed.memory_bytes + memory > most:
        raise Busy(
            "the memory limits of the node's sandboxes leave no room", retry_after=room.retry_after, limit="memory"
        )
    if committed.memory_available < room.memory_reserve_bytes:
        raise Busy("the node is short of memory", retry_after=room.retry_after, limit="memory_available")
