"""Requests out of an OpenAPI document, right and wrong, and a judgement of the answers by the same document."""

import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from jsonschema import Draft202012Validator

from fuzz.draw import Draw

STRINGS = (
    "", "a", "/", "/tmp", "/tmp/f", "true", "sh", "echo", "../..", "\0", "é", "x" * 300, "%2f", "a=b", "0", "-1", "base", "fill",
    "sha256:" + "0" * 64, "root", "9" * 30, "\ud7ff", "🜚", "a\nb", "' OR 1=1 --", "/proc/self/mem", "{}", "*", "K=V", "cat", "env",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    2,
    8,
    9,
    64,
    255,
    256,
    65_535,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 53,
    1 << 63,
    1 << 64,
    10**30,
    -(1 << 63),
)
REALS = (0.0, 0.5, 1e-9, 1e308, -1.0, 1e18, 30.0)
PORTS = ("80", "8000", "0", "65536", "x", "", "٣", "1e3", "00080")
BODIES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff",
    b"[" * 5000,
    b'{"a":' * 1000,
    b"0" * 3000,
    b"\x1f\x8b\x08",
    b'{"argv":["a"],"argv":["b"]}',
)


@dataclass(frozen=True)
class Operation:
    """One operation of the document."""

    path: str
    method: str
    told: dict[str, Any]

    @property
    def socket(self) -> bool:
        return bool(self.told.get("x-websocket"))


@dataclass
class Request:
    """What is sent."""

    operation: Operation
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def target(self) -> str:
        return quote(self.path, safe="/") + ("?" + urlencode(self.query, errors="replace") if self.query else "")


class Document:
    """An OpenAPI document as a source of requests and the judge of answers."""

    def __init__(self, raw: bytes) -> None:
        self.told = json.loads(raw)
        self.operations = [
            Operation(path, method, told)
            for path, item in sorted(self.told["paths"].items())
            for method, told in sorted(item.items())
        ]
        self._validators: dict[str, Draft202012Validator] = {}

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        reference = schema.get("$ref")
        return self.told["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema

    def value(self, schema: dict[str, Any], draw: Draw, depth: int = 0) -> Any:
        """A value of the schema, now and then one that is not."""
        schema = self._resolved(schema)
        if draw.once_in(16) or depth > 4:
            return draw.of((None, True, -1, 1.5, "x", [], {}, [[]], {"a": {}}))
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(draw.of(choices), draw, depth)
        if "enum" in schema:
            return draw.of(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, draw, depth)
        if kind == "array":
            items = schema.get("items") or {"type": "string"}
            if not isinstance(items, dict):
                items = {"type": "string"}
            return [self.value(items, draw, depth + 1) for _ in range(draw.below(4))]
        plain = {
            "string": STRINGS,
            "integer": NUMBERS,
            "number": (*REALS, *NUMBERS),
            "boolean": (False, True),
            "null": (None,),
        }
        return draw.of(plain.get(str(kind), STRINGS))

    def _object(self, schema: dict[str, Any], draw: Draw, depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        found = {
            name: self.value(below, draw, depth + 1)
            for name, below in schema.get("properties", {}).items()
            if draw.once_in(4) or (name in required and not draw.once_in(16))
        }
        if draw.once_in(16) or (not found and "additionalProperties" in schema):
            found[draw.of(STRINGS)] = draw.of(STRINGS)
        return found

    def request(self, operation: Operation, draw: Draw, names: dict[str, tuple[str, ...]]) -> Request:
        """A request of the operation; `names` gives likely values of the path's parameters."""

        def segment(match: re.Match[str]) -> str:
            known = names.get(match[1], ())
            return draw.of((*known * 4, *STRINGS)) if known else draw.of(PORTS if match[1] == "port" else STRINGS)

        made = Request(operation, re.sub(r"\{(\w+)\}", segment, operation.path))
        for parameter in operation.told.get("parameters", ()):
            if parameter["in"] == "path" or not (draw.once_in(3) or (parameter["required"] and not draw.once_in(12))):
                continue
            value = self.value(parameter["schema"], draw)
            for each in value if isinstance(value, list) else [value]:
                text = each if isinstance(each, str) else json.dumps(each)
                if parameter["in"] == "query":
                    made.query.append((parameter["name"], text))
                else:
                    made.headers[parameter["name"]] = re.sub(r"[^ -~]", "?", text)
        content = operation.told.get("requestBody", {}).get("content", {})
        if draw.once_in(12):
            made.body = draw.of(BODIES)
        elif "application/json" in content:
            made.body = json.dumps(self.value(content["application/json"]["schema"], draw)).encode("utf-8", "replace")
        elif content:
            made.body = draw.bytes(draw.number())
        return made

    def judge(self, request: Request, status: int, media: str, body: bytes, proxied: bool = False) -> None:
        """The answer is one that the document tells of, in the form that it tells, and nothing is given away."""
        where = (request.operation.method, request.target, request.body[:200], status, body[:500])
        if proxied:
            return
        assert b"Traceback" not in body and b"has incident" not in body, where
        answers = request.operation.told["responses"]
        if (
            status in (404, 405)
            and media == "application/problem+json"
            and json.loads(body)["code"] in ("not_found", "invalid_argument")
        ):
            return  # a path that its own parameters made another
        assert str(status) in answers, where
        schema = answers[str(status)].get("content", {}).get(media, {}).get("schema")
        if status >= 400:
            problem = json.loads(body)
            assert schema is not None and problem["status"] == status, where
            assert problem["code"] in answers[str(status)]["description"], where
        if schema is not None and media.endswith("json"):
            key = json.dumps(schema)
            if key not in self._validators:
                self._validators[key] = Draft202012Validator({**schema, "components": self.told["components"]})
            for line in body.splitlines() if media == "application/x-ndjson" else [body]:
                self._validators[key].validate(json.loads(line))
