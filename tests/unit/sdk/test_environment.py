"""Where a client finds its server and key."""

import os
from pathlib import Path

import pytest

import dsec
from dsec.sdk import environment
from dsec.sdk.environment import Endpoint, find_endpoint


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DSEC_")]:
        if name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_CA_FILE", "DSEC_CREDENTIALS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(environment, "_STATE_DIRECTORY", tmp_path / "state")


def stored(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_arguments_win_over_variables_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored(tmp_path / "state/credentials.json", '{"url": "http://file:1", "api_key": "f", "ca_file": "/ca"}')
    assert find_endpoint() == Endpoint(url="http://file:1", api_key="f", ca_file="/ca")
    stored(tmp_path / "config/dsec/credentials.json", '{"url": "http://user:1/", "api_key": "u"}')
    assert find_endpoint() == Endpoint(url="http://user:1", api_key="u")
    monkeypatch.setenv("DSEC_URL", "http://env:1/")
    monkeypatch.setenv("DSEC_API_KEY", "e")
    assert find_endpoint() == Endpoint(url="http://env:1", api_key="e")
    assert find_endpoint("https://arg", "a", "/mine") == Endpoint(url="https://arg", api_key="a", ca_file="/mine")


def test_the_files_key_goes_to_the_files_server_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSEC_CREDENTIALS", str(tmp_path / "named"))
    stored(tmp_path / "named", '{"url": "http://mine:1", "api_key": "secret"}')
    assert find_endpoint("http://mine:1/").api_key == "secret"
    with pytest.raises(dsec.Unauthenticated):
        find_endpoint("http://other:1")


def test_no_key_and_bad_values_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(dsec.Unauthenticated, match="DSEC_API_KEY"):
        find_endpoint()
    with pytest.raises(dsec.InvalidArgument, match="ftp"):
        find_endpoint("ftp://x", "k")
    monkeypatch.setenv("DSEC_CREDENTIALS", str(tmp_path / "named"))
    stored(tmp_path / "named", "not json")
    with pytest.raises(dsec.InvalidArgument, match="named"):
        find_endpoint()


async def test_a_missing_ca_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(dsec.InvalidArgument, match="no-ca"):
        await dsec.DSecClient("https://x", "k", ca_file=str(tmp_path / "no-ca")).open()
