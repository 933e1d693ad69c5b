"""The README's first sandbox runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.testing.node import Node
from style.sources import ROOT


@pytest.mark.root
def test_first_sandbox(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    with Node(tmp_path / "s") as node:
        make = next(line for line in text.splitlines() if "mkdir -p rootfs" in line)
        subprocess.run(["sh", "-ec", make], cwd=tmp_path, check=True)
        node.dsec("image", "import", "tiny:1", str(tmp_path / "rootfs"))
        environ = {**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.api_key}
        done = subprocess.run(
            [sys.executable, "-c", blocks[0]], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0 hello from \S+\s*", done.stdout)
