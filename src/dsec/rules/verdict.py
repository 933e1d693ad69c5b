"""Which of its limits, if any, ended a command. The rules, in this order, for a command that did not exit with 0:

timeout: aether's clock ended it. out_of_memory: it was ended by SIGKILL (or its shell says so: exit code 137), and the kernel
counted an out-of-memory kill in the sandbox meanwhile. pids_limit: the kernel refused a fork at the pids limit meanwhile.
disk_limit: less than DISK_SLACK bytes of the disk limit are left at its end. Else exited or signalled.
"""

from msgspec import Struct

from dsec.model.outcome import Outcome
from dsec.model.plan import Usage

__all__ = ["DISK_SLACK", "Counters", "verdict"]

DISK_SLACK = 1 << 20
_SIGKILL = 9
_SHELL_SIGKILL = 128 + _SIGKILL


class Counters(Struct, frozen=True):
    """The sandbox's counts when the command began."""

    oom_kills: int
    pids_refused: int


def verdict(
    outcome: Outcome, exit_code: int | None, signal: int | None, before: Counters, usage: Usage, pids_limit: int
) -> tuple[Outcome, float | None]:
    """The outcome and the limit that it names, None for none."""
    if outcome not in (Outcome.EXITED, Outcome.SIGNALLED) or exit_code == 0:
        return outcome, None
    killed = signal == _SIGKILL or exit_code == _SHELL_SIGKILL
    if killed and usage.oom_kills > before.oom_kills:
        return Outcome.OUT_OF_MEMORY, float(usage.memory_limit_bytes)
    if usage.pids_refused > before.pids_refused:
        return Outcome.PIDS_LIMIT, float(pids_limit)
    if (
        usage.disk_bytes is not None
        and usage.disk_limit_bytes
        and usage.disk_limit_bytes - usage.disk_bytes < DISK_SLACK
    ):
        return Outcome.DISK_LIMIT, float(usage.disk_limit_bytes)
    return outcome, None
