"""The main job, reduced: three packages, eight rollouts, everything real."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from style.sources import ROOT

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


def test_rollouts_earn_what_they_should(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "examples.swe", "--rollouts", "8", "--tasks", "idna", "inflection", "parse",
         "--state", str(tmp_path / "s"), "--json", str(results)],
        cwd=ROOT, capture_output=True, text=True, timeout=580, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rollouts = json.loads(results.read_text())["rollouts"]
    assert len(rollouts) == 8 and all(rollout["expected"] for rollout in rollouts)
    assert {rollout["kind"] for rollout in rollouts} == {"fix", "wrong", "tamper"}
    assert all(rollout["peak_memory_bytes"] > 0 and rollout["image_bytes_read"] > 0 for rollout in rollouts)
    assert "8 of 8 rollouts as expected" in done.stdout
