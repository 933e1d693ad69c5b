"""Settings of the container backend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsec.model.settings import check_positive, setting

__all__ = ["ContainerOptions", "ContainerSettings", "PoolOptions"]


@dataclass(frozen=True)
class PoolOptions:
    """Settings of the pool of writable layers."""

    pool_device: str | None = setting(
        None, "block device of the pool of writable layers; none: a sparse file in the state"
    )
    pool_bytes: int | None = setting(
        None, "bytes of the pool's file; none: nine tenths of what is free when it is made"
    )
    pool_reserve: bool = setting(
        False,
        "the pool's file takes all of its room when the node starts, so that nothing else can fill the disk under it",
    )
    reserve_mb: int = setting(
        64, "MiB that the pool, and the file system under its file, must have free for a create to be admitted"
    )


@dataclass(frozen=True)
class ContainerOptions(PoolOptions):
    """Settings of the container backend."""

    ahead_low: int = setting(16, "sets of namespaces kept ready; below this more are made")
    ahead_high: int = setting(48, "sets of namespaces kept ready at most")
    cpu_affinity: Literal["none", "limit"] = setting(
        "none",
        "limit: a sandbox is tied to as many CPUs as its limit, rounded up, so that programs that ask the kernel see these",
    )
    workers: int = setting(4, "threads for what blocks in the kernel")
    answer_seconds: float = setting(10.0, "seconds that a new sandbox's aether has to answer")
    stop_seconds: float = setting(20.0, "seconds that a killed sandbox has to end")

    def __post_init__(self) -> None:
        check_positive(self, "workers", "answer_seconds", "stop_seconds")


@dataclass(frozen=True, kw_only=True)
class ContainerSettings(ContainerOptions):
    """The options, and what the node gives: `state`, its directory; `program`, the static aether binary; `filter`, the
    seccomp program of every command."""

    state: Path
    program: Path
    filter: bytes
