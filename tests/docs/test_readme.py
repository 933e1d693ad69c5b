"""The README's first sandbox runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.rootfs import make_rootfs
from dsec.testing.node import Node
from style.sources import ROOT


@pytest.mark.root
def test_first_sandbox(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    with Node(tmp_path / "s") as node:
        node.dsec("image", "import", "tiny:1", str(make_rootfs(tmp_path / "rootfs")))
        environ = {**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.api_key}
        done = subprocess.run(
            [sys.executable, "-c", blocks[0]], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0 hello from \S+\s*", done.stdout)
