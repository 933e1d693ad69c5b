"""The OpenAPI 3.1 document of a table of routes: a pure function of it."""

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from dsec.model.errors import DSecError, InvalidArgument, PermissionDenied, RuntimeFailure, Unauthenticated, Unavailable
from dsec.model.views import Problem
from dsec.web.routes import PROBLEM_JSON, Route

__all__ = ["document"]

_ALWAYS: tuple[type[DSecError], ...] = (InvalidArgument, RuntimeFailure, Unavailable)
_WITH_KEY: tuple[type[DSecError], ...] = (Unauthenticated, PermissionDenied)
_ANY = ("get", "put", "post", "delete", "patch", "head", "options")
_PARAMETER = re.compile(r"\{(\w+)(:rest)?\}")
_REFERENCE = "#/components/schemas/{name}"

Json = dict[str, Any]


def document(routes: Sequence[Route], *, title: str, version: str, description: str) -> Json:
    """The document, ready for JSON. A route without `permission` is one that needs no key."""
    records: list[Any] = [Problem]
    records += [kind for route in routes for kind in (route.query, route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(records, ref_template=_REFERENCE)
    known = iter(schemas)
    problem = next(known)
    paths: dict[str, Json] = {}
    for route in routes:
        query = _resolved(next(known), components) if route.query is not None else {}
        body = next(known) if route.body is not None else None
        answer = next(known) if route.answer is not None else None
        item = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        operation = _operation(route, query, body, answer, problem)
        if route.method == "ANY":
            item.update({method: {**operation, "operationId": f"{route.name}_{method}"} for method in _ANY})
        elif route.method == "WS" and "get" in item:
            item["get"]["x-websocket"] = route.name  # a path that takes both is one operation of the document
        else:
            item["get" if route.method == "WS" else route.method.lower()] = operation
    found = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": description, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": _without_queries(components, routes),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
        "security": [{"key": []}],
    }
    return cast(Json, msgspec.json.decode(msgspec.json.encode(found)))  # defaults in JSON's own types


def _operation(route: Route, query: Json, body: Json | None, answer: Json | None, problem: Json) -> Json:
    operation: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": _parameters(route, query),
        "responses": _responses(route, answer, problem),
    }
    if not operation["parameters"]:
        del operation["parameters"]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    elif route.body_media is not None and route.method != "ANY":
        operation["requestBody"] = {"required": True, "content": {route.body_media: {}}}
    if route.permission is None:
        operation["security"] = []
    else:
        operation["x-permission"] = route.permission
    if route.method == "WS":
        operation["x-websocket"] = True
    return operation


def _parameters(route: Route, query: Json) -> list[Json]:
    required = set(query.get("required", ()))
    found: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name, _ in _PARAMETER.findall(route.path)
    ]
    for name, schema in query.get("properties", {}).items():
        found.append({"name": name, "in": "query", "required": name in required, "schema": schema})
    if route.acts:
        text = "The request's id: the same id of the same sandbox or project is carried out once."
        key = {"type": "string", "minLength": 1, "maxLength": 128}
        found.append({"name": "Idempotency-Key", "in": "header", "required": False, "description": text, "schema": key})
    return found


def _responses(route: Route, answer: Json | None, problem: Json) -> Json:
    status, success = str(route.status), {"description": "Success."}
    if route.method == "WS":
        status, success = "101", {"description": "The connection is a WebSocket now."}
    elif answer is not None:
        success = {"description": "Success.", "content": {route.answer_media: {"schema": answer}}}  # type: ignore[dict-item]
    elif route.answer_media != "application/json":
        success = {"description": "Success.", "content": {route.answer_media: {}}}  # type: ignore[dict-item]
    elif route.status == 200:
        status = "204"
    responses: Json = {status: success}
    errors: dict[int, list[str]] = {}
    for error in (*_ALWAYS, *(_WITH_KEY if route.permission else ()), *route.errors):
        if error.code not in errors.setdefault(error.status, []):
            errors[error.status].append(error.code)
    for number, codes in sorted(errors.items()):
        content = {PROBLEM_JSON: {"schema": problem}}
        responses[str(number)] = {"description": "Problem: " + ", ".join(codes) + ".", "content": content}
    return responses


def _resolved(schema: Json, components: dict[str, Json]) -> Json:
    reference = schema.get("$ref")
    return components[reference.rsplit("/", 1)[1]] if reference else schema


def _without_queries(components: dict[str, Json], routes: Sequence[Route]) -> dict[str, Json]:
    names = {route.query.__name__ for route in routes if route.query is not None}
    names -= {kind.__name__ for route in routes for kind in (route.body, route.answer) if isinstance(kind, type)}
    return {name: schema for name, schema in sorted(components.items()) if name not in names}
