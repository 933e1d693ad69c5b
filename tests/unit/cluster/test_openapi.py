"""The one OpenAPI document of the platform: all that is served is in it, and all that is in it is served."""

import re
from pathlib import Path
from typing import Any

from openapi_spec_validator import validate

from dsec.cluster.routes import ROUTES
from dsec.edge.routes import ROUTES as EDGE_ROUTES
from dsec.rules.access import PERMISSIONS
from unit.cluster.fakes import FakeEdge, platform

METHODS = ("get", "put", "post", "delete", "patch", "head", "options")


async def served(folder: Path) -> dict[str, Any]:
    async with (
        platform(folder, FakeEdge(1), edge_routes=EDGE_ROUTES) as world,
        world.client("none") as client,
        client.get("/openapi.json") as answer,
    ):
        found: dict[str, Any] = await answer.json()
        return found


async def test_the_document_is_valid_and_whole(tmp_path: Path) -> None:
    document = await served(tmp_path)
    validate(document)
    told = {(path, method) for path, item in document["paths"].items() for method in item}
    wanted = set()
    for route in (*ROUTES, *EDGE_ROUTES):
        path = re.sub(r":rest\}", "}", route.path)
        methods = METHODS if route.method == "ANY" else ("get",) if route.method == "WS" else (route.method.lower(),)
        wanted |= {(path, method) for method in methods}
    assert told == wanted


async def test_the_document_tells_of_itself(tmp_path: Path) -> None:
    responses = (await served(tmp_path))["paths"]["/openapi.json"]["get"]["responses"]
    assert "application/json" in responses["200"]["content"] and "204" not in responses


async def test_every_operation_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = [op["operationId"] for item in (await served(tmp_path))["paths"].values() for op in item.values()]
    assert len(names) == len(set(names))


async def test_each_told_path_is_served(tmp_path: Path) -> None:
    """A path of the document never answers that there is no such path: the key is asked for first, or it is answered."""
    document = await served(tmp_path)
    async with platform(tmp_path / "more", FakeEdge(1)) as world, world.client("none") as client:
        for path, item in document["paths"].items():
            for method, operation in item.items():
                url = re.sub(r"\{\w+\}", "x", path)
                async with client.request(method.upper(), url) as answer:
                    expected = {401} if operation.get("security") != [] else {200, 503}
                    if path.startswith("/p/"):
                        expected = {404}  # "x" is no link
                    assert answer.status in expected, (method, path)


def test_permissions_of_routes_exist() -> None:
    named = {route.permission for route in (*ROUTES, *EDGE_ROUTES)} - {None, "any"}
    assert named <= set(PERMISSIONS)
