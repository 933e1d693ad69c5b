"""One HTTP request under way: its route, parameters, query and body, already checked against the route's types."""

import re
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from dsec.model.errors import InvalidArgument, TooLarge
from dsec.ports.cluster import Principal, Receive, Scope
from dsec.web.routes import Route

__all__ = ["Call", "ClientGone", "QueryReader", "invalid", "read_body"]

Q = TypeVar("Q")
B = TypeVar("B")

REQUEST_ID_MAX = 128
_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_FIELD = re.compile(r"field `([^`]*)`")


class ClientGone(Exception):
    """The client closed the connection before the request was answered; nobody is left to tell."""


class Call(Generic[Q, B]):
    """What a handler gets. `params`: the path's. `query`, `body`: records of the route's types, None where it has none.

    `request_id`: the client's `Idempotency-Key`, None without one. `chunks` streams the body of a route with `body_media`.
    """

    __slots__ = ("body", "body_ended", "params", "principal", "query", "receive", "request_id", "route", "scope")

    def __init__(self, route: Route, scope: Scope, receive: Receive, params: dict[str, str]) -> None:
        self.route = route
        self.scope = scope
        self.receive = receive
        self.params = params
        self.principal: Principal | None = scope.get("dsec.principal")
        self.query: Q = None  # type: ignore[assignment]
        self.body: B = None  # type: ignore[assignment]
        self.request_id: str | None = None
        self.body_ended = False

    def header(self, name: bytes) -> str | None:
        """The first header `name` (lower case), None without one. Bytes that are not ASCII read as Latin-1."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body in pieces, as it arrives. Raises ClientGone when the client stops before its end."""
        while not self.body_ended:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.body_ended = not message.get("more_body", False)
            data = message.get("body", b"")
            if data:
                yield data


async def read_body(call: Call[Any, Any], limit: int) -> bytes:
    """The whole body. Raises TooLarge above `limit` bytes, before reading more than that, and ClientGone when it is cut."""
    declared = call.header(b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise TooLarge(f"the body has {declared} bytes; this operation takes {limit}", limit=limit)
    parts: list[bytes] = []
    size = 0
    async for part in call.chunks():
        size += len(part)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes", limit=limit)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def invalid(error: Exception, where: str) -> InvalidArgument:
    """A decoder's complaint as InvalidArgument whose `field` is the path of the value in the body or query."""
    text = str(error)
    at = _AT.search(text)
    field = _FIELD.search(text)
    names = [name for name in (at.group(1) if at else "", field.group(1) if field else "") if name]
    return InvalidArgument(text.replace(" - at `$`", ""), field=".".join(names) or where)


class QueryReader:
    """Reads a query string into a record of one type; built once a route."""

    __slots__ = ("_empty", "_many", "_type")

    def __init__(self, type_: type[Struct]) -> None:
        self._type = type_
        self._many = {
            field.name
            for field in msgspec.structs.fields(type_)
            if getattr(field.type, "__origin__", None) in (tuple, list)
        }
        self._empty: Struct | None = None
        if all(not field.required for field in msgspec.structs.fields(type_)):
            self._empty = type_()

    def read(self, raw: bytes) -> Struct:
        """The record. Raises InvalidArgument naming the field that is missing, unknown, repeated or of the wrong type."""
        if not raw and self._empty is not None:
            return self._empty
        values: dict[str, Any] = {}
        try:
            pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, max_num_fields=256)
        except ValueError as error:
            raise InvalidArgument("the query string is malformed", field="query") from error
        for name, value in pairs:
            if name in self._many:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise InvalidArgument(f"`{name}` is given twice", field=name)
            else:
                values[name] = value
        try:
            return msgspec.convert(values, self._type, strict=False)
        except msgspec.ValidationError as error:
            raise invalid(error, "query") from error
