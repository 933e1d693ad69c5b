"""Configuration: layers in their order, and nothing undeclared."""

from pathlib import Path

import pytest

from dsec import config
from dsec.model.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_host_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "none.toml")


def test_defaults() -> None:
    loaded = config.load(environ={"PATH": "/bin"})
    assert loaded.config.state == Path("/var/lib/dsec")
    assert loaded.config.server.listen == "127.0.0.1:7380"
    assert {row.origin for row in loaded.explain()} == {"default"}


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[watcher]\ninterval = 2\ndeadline = 20.0\n[server]\nlisten = "127.0.0.1:1"\n')
    environ = {
        "DSEC_CONFIG": str(file),
        "DSEC_WATCHER_INTERVAL": "3.5",
        "DSEC_SERVER_LISTEN": "127.0.0.1:2",
        "DSEC_URL": "http://x",
    }
    loaded = config.load({"server.listen": "127.0.0.1:3", "server.tls": None}, environ)
    found = {row.name: (row.value, row.origin) for row in loaded.explain()}
    assert found["watcher.deadline"] == (20.0, str(file))
    assert found["watcher.interval"] == (3.5, "DSEC_WATCHER_INTERVAL")
    assert found["server.listen"] == ("127.0.0.1:3", "command line")
    assert found["server.tls"] == ("auto", "default")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DSEC_NONSENSE", "1"),
        ("DSEC_SERVER_LISTENS", "x"),
        ("DSEC_WATCHER_INTERVAL", "soon"),
        ("DSEC_SERVER_TLS", "maybe"),
        ("DSEC_WATCHER_INTERVAL", "0"),
        ("DSEC_CONFIG", "/nowhere.toml"),
    ],
)
def test_bad_variables_are_errors(variable: str, value: str) -> None:
    with pytest.raises(InvalidArgument):
        config.load(environ={variable: value})


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "[server]\nlistens = 1",
        "[nothing]\na = 1",
        "[server]\nlisten = 5",
        "[server",
        "[watcher]\ninterval = -1",
    ],
)
def test_bad_files_are_errors(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument):
        config.load(environ={"DSEC_CONFIG": str(file)})


def test_every_setting_says_what_it_means() -> None:
    for row in config.load(environ={}).explain():
        assert len(row.meaning) > 10, row.name


def test_the_reference_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == config.reference(), (
        "run `dsec config reference > docs/configuration.md`"
    )
