"""Where clients get packages from: read out of configurations that the tests write, and out of what is installed."""

from pathlib import Path
from urllib.parse import urlsplit

from dsec.gate.defaults import _apt, _cargo, pip_index, upstreams


def test_pips_own_order_decides() -> None:
    lines = [
        "global.index-url='https://global.test/simple'",
        "install.index-url='https://install.test/simple'",
        "global.cert='/x'",
    ]
    assert pip_index(lines) == "https://install.test/simple"
    assert pip_index([*lines, ":env:.index-url='https://env.test/simple'"]) == "https://env.test/simple"
    assert pip_index(["global.cert='/x'", ""]) is None


def test_sources_of_apt_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://off.test/debian x main\ndeb [arch=amd64] http://one.test/debian x main\n"
    )
    (tmp_path / "sources.list.d/d.sources").write_text(
        "Types: deb\nURIs: https://two.test/debian http://three.test:8080/d\n# URIs: http://off.test\n"
    )
    found = _apt(tmp_path)
    assert found is not None
    assert found.hosts == ("one.test", "three.test", "two.test")
    assert _apt(tmp_path / "none") is None


def test_cargos_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[source.crates-io]\nreplace-with = "m"\n[source.m]\nregistry = "sparse+https://crates.test/index/"\n'
    )
    folder = tmp_path / "registry/index/crates.test-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"dl": "https://files.test/crates"}')
    found = _cargo(tmp_path)
    assert found is not None
    assert (found.index, found.hosts) == ("https://crates.test/index/", ("crates.test", "files.test"))


def test_what_is_installed_here_says_where_it_gets_packages_from() -> None:
    found = upstreams()
    assert "pypi" in found  # pip is what these tests were installed with
    for name, upstream in found.items():
        assert upstream.hosts, name
        assert name == "debian" or urlsplit(upstream.index).scheme in ("http", "https")
