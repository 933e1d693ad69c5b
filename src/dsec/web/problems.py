"""Errors on the wire, in one place: problem documents (RFC 9457). No class names, no tracebacks."""

import logging

import msgspec

from dsec.model.errors import Busy, DSecError, RuntimeFailure
from dsec.model.views import Problem
from dsec.ports.clock import Clock

__all__ = ["encode_problem", "failure", "problem_of", "retry_after"]

_log = logging.getLogger("dsec.web")
_encoder = msgspec.json.Encoder()


def problem_of(error: DSecError, status: int | None = None) -> Problem:
    """`error` as a record. `status` overrides the taxonomy's (405 for a method that a path does not have)."""
    return Problem(
        type=f"urn:dsec:error:{error.code}",
        title=error.sentence,
        status=status or error.status,
        code=error.code,
        detail=error.detail,
        retryable=error.retryable,
        fields=error.fields,
    )


def encode_problem(problem: Problem) -> bytes:
    """The document's bytes."""
    return _encoder.encode(problem)


def retry_after(error: DSecError) -> int | None:
    """Whole seconds for a `Retry-After` header, from Busy's `retry_after` field rounded up; None where there is none."""
    seconds = error.fields.get("retry_after") if isinstance(error, Busy) else None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return None
    return max(1, -int(-seconds // 1))


def failure(error: Exception, clock: Clock, where: str) -> RuntimeFailure:
    """An exception that nobody foresaw: logged with its traceback under a new incident id, told by that id alone."""
    incident = clock.random(8).hex()
    _log.error("incident %s in %s", incident, where, exc_info=error)
    return RuntimeFailure(f"the platform failed; its log has incident {incident}", incident=incident)
