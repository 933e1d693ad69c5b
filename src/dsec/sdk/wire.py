"""How an answer that is not a success, or none at all, becomes an error of the taxonomy. No I/O."""

import re

import msgspec

from dsec.model.errors import BY_CODE, DSecError, InvalidArgument, RuntimeFailure, Unavailable, error_from_code
from dsec.model.views import Problem

__all__ = ["check_request_id", "error_from_close", "error_from_problem", "error_from_response", "error_from_status"]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BY_STATUS = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    409: "conflict",
    410: "sandbox_lost",
    413: "too_large",
    422: "unsupported",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
}
_decoder = msgspec.json.Decoder(Problem)


def check_request_id(request_id: str) -> str:
    """The id itself. Raises InvalidArgument unless it is 1 to 128 visible ASCII characters: it travels in a header."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument("request_id must be 1 to 128 visible ASCII characters", field="request_id")
    return request_id


def error_from_problem(problem: Problem) -> DSecError:
    """The error that a problem document stands for."""
    fields = {name: value for name, value in problem.fields.items() if name != "detail"}
    return error_from_code(problem.code, problem.detail or problem.title, fields)


def error_from_status(status: int, detail: str) -> DSecError:
    """The error for an answer that has a status and no problem document, such as a proxy's or a refused WebSocket's."""
    code = _BY_STATUS.get(status)
    if code is None:
        return RuntimeFailure(f"HTTP status {status}: {detail}", http_status=status)
    return BY_CODE[code](f"HTTP status {status}: {detail}", http_status=status)


def error_from_response(status: int, content: bytes) -> DSecError:
    """The error for an answer of 300 or more."""
    try:
        return error_from_problem(_decoder.decode(content))
    except (msgspec.MsgspecError, RecursionError):
        if 300 <= status < 400:
            return Unavailable(f"HTTP status {status}: the URL names a server that redirects, not a DSec server")
        return error_from_status(status, content[:200].decode("utf-8", "replace"))


def error_from_close(code: int | None, reason: str, what: str) -> DSecError:
    """The error for a WebSocket that closed too early: codes from 4400 are 4000 and an HTTP status."""
    if code is not None and 4400 <= code < 4600:
        return error_from_status(code - 4000, reason or what)
    return Unavailable(f"{what} broke (close code {code})")
