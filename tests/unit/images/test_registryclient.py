"""Requests to a registry: what fails in passing is tried again, what does not is not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from dsec.images.registryclient import Access, RegistryClient, parse_reference, read_bounded
from dsec.model.errors import NotFound, Unavailable


@asynccontextmanager
async def answering(*statuses: int) -> AsyncIterator[tuple[RegistryClient, list[bytes]]]:
    """A client of a registry that answers so, the last for ever; and the bodies that it has received."""
    bodies: list[bytes] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        status = statuses[min(len(bodies), len(statuses)) - 1]
        return web.Response(status=status, body=b"fine", headers={"Retry-After": "0"} if status == 429 else {})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = RegistryClient(parse_reference(f"127.0.0.1:{runner.addresses[0][1]}/a/b"), Access())
    try:
        yield client, bodies
    finally:
        await client.close()
        await runner.cleanup()


async def test_what_passes_by_itself_is_tried_again() -> None:
    async with answering(503, 429, 200) as (client, bodies):
        async with client.request("PUT", "blobs/x", body=b"body") as answer:
            assert await read_bounded(answer, 10) == b"fine"
        assert bodies == [b"body"] * 3


async def test_what_does_not_is_not() -> None:
    async with answering(404) as (client, bodies):
        with pytest.raises(NotFound):
            async with client.request("GET", "blobs/x"):
                pass
        assert len(bodies) == 1
    async with answering(418) as (client, bodies):
        with pytest.raises(Unavailable, match="418"):
            async with client.request("GET", "blobs/x"):
                pass
        assert len(bodies) == 1
