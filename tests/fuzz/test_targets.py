"""Every fuzz target holds for a little while, from a fixed seed: `./dev fuzz` is the same for longer."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.__main__ import GUIDED, LIVE, RUST
from style.sources import ROOT

RUNS = {
    "tar": 200, "raw_tar": 1000, "layers": 100, "unpack": 200, "imports": 40, "parts": 500, "dockerfile": 400, "patterns": 400, "download": 40, "upload": 30, "replies": 300, "api": 15,
    "proxy": 15, "aether": 400, "node": 300, "bytes": 300,
}  # fmt: skip


def held(target: str, found: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    words = ["--runs", str(RUNS[target]), "--seed", "1", "--found", str(found)]
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", target, *words], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(done.stdout.splitlines()[1].split()[1]) >= RUNS[target], done.stdout


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine")
@pytest.mark.parametrize("target", GUIDED)
def test_in_process(target: str, tmp_path: Path) -> None:
    held(target, tmp_path)


@pytest.mark.root
def test_aether(tmp_path: Path) -> None:
    held("aether", tmp_path)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("target", ["node", "bytes"])
def test_a_whole_node(target: str, tmp_path: Path) -> None:
    held(target, tmp_path)


def test_every_target_is_run_here_or_by_cargo() -> None:
    assert {*GUIDED, *LIVE} == set(RUNS)
    listed = (ROOT / "crates/fuzz/src/lib.rs").read_text()
    assert all(f'("{target}", ' in listed for target in RUST)
    assert f"(&str, Target); {len(RUST)}]" in listed


def test_what_breaks_a_promise_is_told(tmp_path: Path) -> None:
    """A target that always fails makes the run fail, with the input that did it kept."""
    (tmp_path / "broken.py").write_text("def broken(data):\n    assert not data.startswith(b'x')\n")
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed/one").write_bytes(b"xyz")
    script = (
        "import sys, fuzz.guided as g; g.TARGETS['broken'] = ('broken', ()); import fuzz, importlib.util as u; "
        f"spec = u.spec_from_file_location('fuzz.broken', {str(tmp_path / 'broken.py')!r}); m = u.module_from_spec(spec); "
        "spec.loader.exec_module(m); sys.modules['fuzz.broken'] = m; "
        f"sys.argv = ['g', 'broken', '-runs=1', '-artifact_prefix={tmp_path}/', {str(tmp_path / 'seed')!r}]; g.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode != 0 and "AssertionError" in done.stdout + done.stderr
    assert [path.read_bytes() for path in tmp_path.glob("crash-*")] == [b"xyz"]
