"""Errors on the wire, in one place: problem documents (RFC 9457). No class names, no tracebacks."""

import logging
import os
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM

import msgspec

from dsec.model.errors import Busy, DSecError, InfraError, RuntimeFailure, Unavailable
from dsec.model.views import Problem
from dsec.ports.clock import Clock

__all__ = ["encode_problem", "failure", "problem_of", "retry_after"]

_log = logging.getLogger("dsec.web")
_encoder = msgspec.json.Encoder()
_LACKS = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})


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


def failure(error: Exception, clock: Clock, where: str) -> InfraError:
    """An exception that nobody foresaw: logged with its traceback under a new incident id, told by that id alone.

    Unavailable where the host has no descriptors or memory for the server now: that is no fault of the program's.
    """
    lack = getattr(error, "errno", None)
    if lack in _LACKS:
        _log.warning("%s: %s", where, error)
        return Unavailable(f"the server has no room for this now: {os.strerror(lack)}", what="server")
    incident = clock.random(8).hex()
    _log.error("incident %s in %s", incident, where, exc_info=error)
    return RuntimeFailure(f"the platform failed; its log has incident {incident}", incident=incident)
