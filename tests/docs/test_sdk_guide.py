"""docs/sdk.md: its examples run, and its tables say what the code does."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
import dsec.sdk._async.transport as transport
from apifake import KEY, Server, serving_aside
from style.sources import ROOT

GUIDE = (ROOT / "docs/sdk.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    # The fake's commands are processes of this host, whose packages and network an example must not touch or wait for.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apt-get").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with serving_aside(tmp_path) as server:
        yield server


def run_example(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env, timeout=60
    )


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_examples_run(fake: Server, index: int) -> None:
    done = run_example(EXAMPLES[index], {**os.environ, "DSEC_URL": fake.url, "DSEC_API_KEY": KEY})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def rows(heading: str) -> list[list[str]]:
    section = GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_table_of_arguments_is_complete() -> None:
    named = [name for row in rows("Environments") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(dsec.DSecContainerRunArgs.__struct_fields__)
    given = dsec.DSecContainerRunArgs(container_image="x")
    for row in rows("Environments"):
        names, values = re.findall(r"`(\w+)`", row[0]), row[1].split(", ")
        for name, value in zip(names, values, strict=False):
            if re.fullmatch(r"\d+", value):
                assert getattr(given, name) == int(value), name


def test_the_table_of_outcomes_is_complete() -> None:
    named = {name for row in rows("Commands") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == {outcome.value for outcome in dsec.Outcome}


def test_the_table_of_promises_names_every_call_that_is_a_request() -> None:
    cells = " ".join(row[0] for row in rows("What each call promises"))
    named = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", cells)}
    local = {"close", "open", "id", "view", "phases", "files", "detach"}
    same = {
        "get",
        "image",
        "me",
        "attach",
        "processes",
        "sessions",
        "open_session",
        "exists",
        "read_text",
        "write_text",
    }
    kinds = (dsec.DSecClient, dsec.Sandbox, dsec.Process, dsec.Session, dsec.Files)
    calls = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    assert named <= calls
    assert calls - named - local - same == set()


def test_the_figures_are_those_of_the_code() -> None:
    assert "20 s more" in GUIDE and transport.MARGIN == 20
    assert "60 s without a byte" in GUIDE and transport.SILENCE == transport.DEADLINE == 60
    assert "about 0.05, 0.2, 0.8 and 2 s" in GUIDE and transport.REPEATS == (0.05, 0.2, 0.8, 2.0)
    idle, between, count = (value for _, value in transport._KEEPALIVE)
    assert "about 35 s" in GUIDE and idle + between * count == 35


def test_the_stated_python_is_the_one_that_is_required() -> None:
    stated = re.search(r"CPython (\d+\.\d+) and later", GUIDE)
    assert stated is not None and f'requires-python = ">={stated[1]}"' in (ROOT / "pyproject.toml").read_text()
