"""A route as data: what the dispatcher serves and what the OpenAPI document says come from the same record."""

from typing import Any, Literal

from msgspec import Struct

from dsec.model.errors import DSecError

__all__ = ["NDJSON", "OCTETS", "PROBLEM_JSON", "TAR", "Method", "Route"]

Method = Literal["GET", "POST", "PUT", "DELETE", "ANY", "WS"]

OCTETS = "application/octet-stream"
NDJSON = "application/x-ndjson"
TAR = "application/x-tar"
PROBLEM_JSON = "application/problem+json"


class Route(Struct, frozen=True, kw_only=True):
    """One operation of an HTTP API.

    `name`: the operation id, and the handler's name. `method`: ANY is every HTTP method, WS a WebSocket. `path`: a template;
    `{name}` is one segment, `{name:rest}` all that is left (it may be empty). `query`: a record whose fields are the query's,
    tuple fields may be repeated. `body`: the JSON body's type; `body_media`: instead, a body that the handler streams.
    `body_limit`: bytes of a JSON body. `answer`: type of the JSON answer, None where the answer is not JSON or empty;
    `answer_media`: its media type. `status`: of success. `errors`: besides those any route may raise. `permission`: what the
    caller needs. `acts`: takes an `Idempotency-Key` (request_id). `tag`: group in the OpenAPI document.
    """

    name: str
    method: Method
    path: str
    summary: str
    query: type[Struct] | None = None
    body: type[Any] | None = None
    body_media: str | None = None
    body_limit: int = 1 << 20
    answer: Any = None
    answer_media: str = "application/json"
    status: int = 200
    errors: tuple[type[DSecError], ...] = ()
    permission: str | None = None
    acts: bool = False
    tag: str = "sandboxes"
