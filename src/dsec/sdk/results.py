"""What `check=True` means."""

from collections.abc import Sequence

from dsec.model.errors import CommandFailed
from dsec.model.outcome import ExecResult

__all__ = ["checked"]


def checked(result: ExecResult, check: bool, command: str | Sequence[str]) -> ExecResult:
    """The result; raises CommandFailed with `.result` where `check` is set and the command did not exit with 0."""
    if not check or result.ok:
        return result
    shown = command if isinstance(command, str) else " ".join(command)
    if len(shown) > 200:
        shown = shown[:200] + "..."
    ending = f"exit code {result.exit_code}" if result.exit_code is not None else f"signal {result.signal}"
    error = CommandFailed(
        f"{shown!r} ended with outcome {result.outcome.value}, {ending}",
        outcome=result.outcome.value,
        exit_code=result.exit_code,
        signal=result.signal,
        request_id=result.request_id,
    )
    error.result = result
    raise error
