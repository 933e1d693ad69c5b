"""`{"pypi": ...}` as users write it: pip in a real sandbox, a real node, and an index of the fake internet behind its mirror."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import NetworkRule
from dsec.testing.netservices import Record
from dsec.testing.packageindex import PackageIndex
from network.place import PYTHON, Place

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.leaves("the connection that the gate keeps open to the fake index until the module ends"),
]
ADDRESS = "203.0.113.80"


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, python_root: Path) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("mirror")
    services = folder / "services.toml"
    services.write_text('[pypi]\nupstream = "http://index.test/simple"\n')
    with Place(folder, python_root, DSEC_NETWORK_SERVICES=str(services)) as made:
        web = made.internet.web([ADDRESS], ["index.test"])
        web.only_pages = True
        made.internet.dns.answer("index.test", Record("A", ADDRESS))
        index = PackageIndex(web, "index.test")
        for version, at in (("1.0", "2024-01-01"), ("2.0", "2025-01-01")):
            index.add_wheel("tool", version, at)
        yield made


INSTALL = f"{PYTHON} -m pip install --quiet --no-cache-dir --retries 0 --target /tmp/t tool"
VERSION = f"{PYTHON} -c 'import sys; sys.path.insert(0, \"/tmp/t\"); import tool; print(tool.VERSION)'"


@pytest.mark.parametrize(("rule", "version"), [(True, "2.0"), (NetworkRule(before="2024-06-01"), "1.0")])
def test_pip_finds_the_mirror_by_itself(place: Place, rule: bool | NetworkRule, version: str) -> None:
    with place.box({"pypi": rule}) as box:
        done = box.run_shell(INSTALL, timeout=60)
        assert done.exit_code == 0, done.stderr
        assert box.run_shell(VERSION, check=True).text.strip() == version
        assert (
            box.run_shell(f"wget -T 3 -O- http://{ADDRESS}/simple/tool/").exit_code != 0
        )  # the index itself stays closed


def test_without_the_service_pip_fails_fast(place: Place) -> None:
    with place.box({}) as box:
        assert box.run_shell(INSTALL, timeout=30).exit_code not in (0, None)
