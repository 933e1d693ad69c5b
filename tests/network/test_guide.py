"""The guide's examples of networks, run as their reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from network.place import IMAGE, Place

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[2]


def test_the_guides_examples_run(place: Place) -> None:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs/sdk.md").read_text(), re.DOTALL)
    examples = [code for code in found if "network_" in code]
    assert examples
    place.node.dsec("image", "tag", IMAGE, "python-3.11")
    env = {**os.environ, "DSEC_URL": place.node.url, "DSEC_API_KEY": place.node.api_key}
    for code in examples:
        with place.internet.host.inside():
            done = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
            )
        assert (done.returncode, done.stderr) == (0, ""), code
    place.node.dsec("image", "remove", "python-3.11")
