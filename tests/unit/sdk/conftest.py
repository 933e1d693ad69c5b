"""A fake server and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
import dsec.sdk._async.transport as transport
from apifake import KEY, Server, serving


@pytest.fixture(autouse=True)
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REPEATS", (0.001, 0.001, 0.001))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as made:
        yield made


@pytest.fixture
async def client(server: Server) -> AsyncIterator[dsec.DSecClient]:
    async with dsec.DSecClient(server.url, KEY) as made:
        yield made


@pytest.fixture
async def box(client: dsec.DSecClient) -> dsec.Sandbox:
    return await client.run_container(dsec.DSecContainerRunArgs(container_image="python-3.11"))
