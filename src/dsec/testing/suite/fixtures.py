"""The fixtures of the suite. A folder of one's own may import them all and give another `site`."""

import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from dsec.testing.suite.backends import BACKENDS, BackendUnderTest
from dsec.testing.suite.boxes import Box, Boxes
from dsec.testing.suite.callers import Caller
from dsec.testing.suite.plain import OverHttp
from dsec.testing.suite.sdk import OverSdk
from dsec.testing.suite.sites import Foreign, Site, needs

__all__ = [
    "SURFACES", "backend", "box", "boxes", "caller", "mortal", "pytest_collection_modifyitems", "pytest_generate_tests",
    "site", "surface",
]  # fmt: skip

SURFACES: dict[str, Callable[[str, str], Caller]] = {"sdk": OverSdk, "http": OverHttp}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once a backend that was asked for."""
    if "backend" in metafunc.fixturenames:
        named = metafunc.config.getoption("--dsec-backend", default=None) or ["container"]
        metafunc.parametrize("backend", named, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is costly runs over HTTP among the slow ones only."""
    for item in items:
        call: Any = getattr(item, "callspec", None)
        if item.get_closest_marker("costly") and call is not None and call.params.get("surface") == "http":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    """The backend that a test runs on."""
    if request.param not in BACKENDS:
        pytest.fail(f"the suite knows no backend {request.param}: {', '.join(BACKENDS)}", pytrace=False)
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """The platform: what --dsec-site names, else an address and a key."""
    named = request.config.getoption("--dsec-site", default=None)
    if named:
        module, _, name = named.partition(":")
        with getattr(importlib.import_module(module), name)() as found:
            yield found
        return
    url, key = (request.config.getoption(option, default=None) for option in ("--dsec-url", "--dsec-key"))
    if not url or not key:
        pytest.fail("which platform? give --dsec-url and --dsec-key, or --dsec-site", pytrace=False)
    yield Foreign(url, key)


@pytest.fixture
def mortal(site: Site) -> Site:
    """A platform whose server the test may kill."""
    needs(site, "kill")
    return site


@pytest.fixture(params=sorted(SURFACES, reverse=True))
def surface(request: pytest.FixtureRequest) -> str:
    """By which way the test comes in."""
    return str(request.param)


@pytest_asyncio.fixture
async def caller(site: Site, surface: str) -> AsyncIterator[Caller]:
    """A client of that surface."""
    found: Caller = SURFACES[surface](site.url, site.key)
    await found.open()
    yield found
    await found.close()


@pytest_asyncio.fixture
async def boxes(caller: Caller, backend: BackendUnderTest) -> AsyncIterator[Boxes]:
    """Makes sandboxes and stops them at the end."""
    found = Boxes(caller, backend.name)
    yield found
    await found.close()


@pytest_asyncio.fixture
async def box(boxes: Boxes) -> Box:
    """A small sandbox of the plain image."""
    return await boxes.make()
