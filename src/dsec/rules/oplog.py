"""The ordered log's decisions: what a request is to the operations recorded under its request_id."""

from enum import StrEnum

from msgspec import Struct

from dsec.model.errors import Conflict, Interrupted

__all__ = ["Decision", "Operation", "Phase", "Retention", "decide"]


class Phase(StrEnum):
    """begun: acting, or acting when the edge died; ended: `result` is known; cancelled: given up with its caller."""

    BEGUN = "begun"
    ENDED = "ended"
    CANCELLED = "cancelled"


class Operation(Struct, frozen=True):
    """One recorded operation. `kept`: its result can still be had. `at`: Unix seconds of its last change."""

    sequence: int
    request_id: str
    kind: str
    fingerprint: bytes
    phase: Phase
    at: float
    kept: bool = False


class Retention(Struct, frozen=True):
    """`stream_bytes` of each output stream are kept for a repeat, for `seconds` after the end."""

    stream_bytes: int = 64 * 1024
    seconds: float = 3600.0


class Decision(StrEnum):
    """run: nobody asked before; wait: it is running for someone else; replay: give the recorded result."""

    RUN = "run"
    WAIT = "wait"
    REPLAY = "replay"


def decide(
    known: Operation | None, kind: str, fingerprint: bytes, *, running: bool, now: float, retention: Retention
) -> Decision:
    """What to do with a request. `running`: this edge is carrying out the known operation now.

    Raises Conflict for another request under the same id, and for a repeat whose result is no longer kept or whose operation
    was cancelled with its first caller; Interrupted where the edge restarted during it, so that nobody knows its result.
    Nothing is ever run twice.
    """
    if known is None:
        return Decision.RUN
    if known.kind != kind or known.fingerprint != fingerprint:
        raise Conflict(
            "this request_id belongs to another request", request_id=known.request_id, sequence=known.sequence
        )
    if running:
        return Decision.WAIT
    if known.phase is Phase.CANCELLED:
        raise Conflict(
            "the first request was cancelled; it is not run again", request_id=known.request_id, state="cancelled"
        )
    if known.phase is Phase.BEGUN:
        raise Interrupted(
            "the edge restarted during the first request; it is not run again and its result is unknown",
            request_id=known.request_id,
            state="interrupted",
        )
    if not known.kept or now >= known.at + retention.seconds:
        raise Conflict(
            "the result is no longer kept; it is not run again", request_id=known.request_id, state="forgotten"
        )
    return Decision.REPLAY
