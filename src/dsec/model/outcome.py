"""How a command and a sandbox can end: the same words everywhere."""

from enum import StrEnum

from msgspec import Struct

__all__ = ["End", "ExecResult", "Outcome", "SandboxEnd", "is_infra_end"]


class Outcome(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_LIMIT = "disk_limit"
    PIDS_LIMIT = "pids_limit"
    OUTPUT_LIMIT = "output_limit"
    POLICY = "policy"


class End(StrEnum):
    """How a sandbox ended: by the caller or its own limits (task), or by the platform (infra)."""

    STOPPED = "stopped"
    IDLE = "idle"
    EXPIRED = "expired"
    OUT_OF_MEMORY = "out_of_memory"
    POLICY = "policy"
    NODE_LOST = "node_lost"
    IMAGE = "image"
    RUNTIME = "runtime"
    CAPACITY = "capacity"
    INTERNAL = "internal"


_INFRA = frozenset({End.NODE_LOST, End.IMAGE, End.RUNTIME, End.CAPACITY, End.INTERNAL})


def is_infra_end(end: End) -> bool:
    """True where the platform, not the task, ended the sandbox: mask the rollout, do not score it zero."""
    return end in _INFRA


class SandboxEnd(Struct, frozen=True, kw_only=True):
    """How a sandbox ended and, for a person, why. `at`: Unix time in seconds. `incident`: id in the server's log."""

    end: End
    reason: str = ""
    at: float
    incident: str | None = None


class ExecResult(Struct, frozen=True, kw_only=True):
    """An ended command. `exit_code` is None unless it exited by itself (outcome exited, or a limit that made it fail); `signal` is
    the number of the signal that ended it.

    stdout and stderr hold at most the output limit: its first half and its last half, `truncated` says that the middle
    is missing, and the totals count all bytes written. `duration` in seconds. `limit`: the limit reached, if one was
    (bytes for memory, output and disk; a count for pids; seconds for timeout). `infra`: it failed, and meanwhile the platform could not
    read some of the image for it: mask it, do not score it.
    """

    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    stdout_bytes_total: int = 0
    stderr_bytes_total: int = 0
    duration: float = 0.0
    limit: float | None = None
    request_id: str = ""
    process_id: str = ""
    infra: bool = False

    @property
    def text(self) -> str:
        """stdout as UTF-8; bytes that are not UTF-8 read as U+FFFD, so this never raises."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """True where the command exited with code 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0
