"""The command group: what it offers, and what it says of parts that are not installed."""

import importlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import dsec.cli as cli
from dsec.cli.answers import exit_status, shown
from dsec.cli.cp import place, remote
from dsec.model.errors import InvalidArgument
from dsec.model.outcome import Outcome


def test_help_names_every_command_without_loading_one() -> None:
    code = (
        "import sys; sys.argv = ['dsec', '--help']\nfrom dsec.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    code += "print('loaded', [n for n in sys.modules if n.startswith('dsec.cli.') and n != 'dsec.cli.answers'])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in out for name in [*cli.CLIENT, *cli.NODE])
    assert "loaded []" in out


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("uvicorn", "pip install 'dsec[node]'"),
        ("dsec._core", "./dev build"),
        ("dsec.cli.up", "not part of this version"),
    ],
)
def test_a_command_whose_parts_are_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str, said: str
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    for argv in (["up"], ["up", "--listen", "x", "--help"]):
        done = CliRunner().invoke(cli._verbs, argv)
        assert done.exit_code == 1 and said in done.output and "up" in done.output


@pytest.mark.parametrize("name", cli.CLIENT)
def test_client_commands_take_json_and_have_help(name: str) -> None:
    command: click.Command = importlib.import_module(f"dsec.cli.{name.replace('-', '_')}").command
    verbs = command.commands.values() if isinstance(command, click.Group) else [command]
    for verb in verbs:
        assert verb.help and "--json" in {option for param in verb.params for option in param.opts}


def test_unknown_commands_are_refused() -> None:
    assert CliRunner().invoke(cli._verbs, ["no-such"]).exit_code == 2


@pytest.mark.parametrize(
    ("outcome", "code", "number", "status"),
    [
        (Outcome.EXITED, 0, None, 0),
        (Outcome.EXITED, 124, None, 124),
        (Outcome.SIGNALLED, None, 15, 143),
        (Outcome.TIMEOUT, None, 9, 124),
        (Outcome.OUT_OF_MEMORY, None, 9, 137),
        (Outcome.PIDS_LIMIT, 2, None, 2),
        (Outcome.OUTPUT_LIMIT, None, None, 137),
        (None, None, None, 125),
    ],
)
def test_exit_statuses(outcome: Outcome | None, code: int | None, number: int | None, status: int) -> None:
    assert exit_status(outcome, code, number) == status


def test_where_a_copy_goes() -> None:
    assert place("src", "/w", False, True) == "/w"
    assert place("src/", "/w", True, True) == "/w/src"
    assert place("src/.", "/w", True, True) == "/w"
    assert place("a/f", "/w/", True, False) == "/w/f"
    assert place("a/f", "/w/g", False, False) == "/w/g"
    with pytest.raises(InvalidArgument):
        place("a/f", "/w/", False, False)


def test_what_is_remote() -> None:
    name = "s" + "a" * 31
    assert remote(f"{name}:/w x") == (name, "/w x") and remote(f"{name}:") == (name, ".")
    assert remote(f"./{name}:/w") is None and remote("C:/x") is None and remote("/a:b") is None


def test_terminal_text_is_made_safe() -> None:
    assert shown("a\x1b[31m\udcff\n é") == "a\\x1b[31m\\udcff\\n é"
