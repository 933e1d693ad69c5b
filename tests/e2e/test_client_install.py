"""A client-only install: pure Python, no root, no Rust, from a wheel without the native parts, in a fresh environment."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DSEC_", "PYTHON"))}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that are under version control, so without what `./dev build` makes."""
    source = tmp_path_factory.mktemp("source")
    files = run("git", "-C", ROOT, "ls-files", "-z", "src", "pyproject.toml", "README.md").stdout.split("\0")
    for name in filter(None, files):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, source)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that has the wheel and the client's dependencies alone."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=True)
    done = run(home / "bin/pip", "install", "-q", wheel)
    assert done.returncode == 0, done.stderr
    return home / "bin/python"


@pytest.mark.slow
def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = packed.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert not [name for name in names if name.endswith((".so", "/aether"))]
    assert "dsec/sync.py" in names
    assert "Requires-Python: >=3.11" in metadata


@pytest.mark.slow
def test_the_client_works_without_the_parts_of_a_node(python: Path) -> None:
    here = python.parent
    code = "import dsec, dsec.sync; print([getattr(dsec, n).__name__ for n in dsec.__all__][:2])"
    done = run(python, "-c", code, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    for absent in ("starlette", "uvicorn", "sqlalchemy", "zstandard"):
        assert run(python, "-c", f"import {absent}", cwd="/").returncode != 0
    done = run(here / "dsec", "--help", cwd="/")
    assert done.returncode == 0 and "exec" in done.stdout
    for command in ("run", "exec", "shell", "cp", "ps", "logs", "inspect", "stop"):
        assert run(here / "dsec", command, "--help", cwd="/").returncode == 0
    done = run(here / "dsec", "image", "list", cwd="/")
    assert done.returncode == 1 and "dsec[node]" in done.stderr and "Traceback" not in done.stderr
    done = run(here / "dsec", "ps", "--url", "http://127.0.0.1:1", cwd="/")
    assert done.returncode == 1 and "Unauthenticated" in done.stderr
