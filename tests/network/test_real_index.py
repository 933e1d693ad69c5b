"""Once against the package index that this machine's pip uses. Not run unless TRY_PACKAGE_INDEX=1: it leaves the machine.

The node is on the machine itself; nothing but the node's mirror and pip asks anybody outside.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec.sync
from dsec import DSecContainerRunArgs, NetworkRule
from dsec.gate.defaults import upstreams
from dsec.testing.node import Node
from network.place import IMAGE, PYTHON

pytestmark = [pytest.mark.root, pytest.mark.slow]

INSTALL = [PYTHON, "-m", "pip", "install", "--quiet", "--no-input", "--retries", "0", "--target", "/tmp/there"]


@pytest.fixture
def client(tmp_path: Path, python_root: Path) -> Iterator[dsec.sync.DSecClient]:
    if os.environ.get("TRY_PACKAGE_INDEX") != "1":
        pytest.skip("the package index is asked only with TRY_PACKAGE_INDEX=1")
    if shutil.which("nft") is None or "pypi" not in upstreams():
        pytest.skip("no pip on this machine says where its index is, or nft is missing")
    with Node(tmp_path / "s", DSEC_NETWORK_ENABLED="true", DSEC_CONTAINER_POOL_BYTES=str(1 << 30)) as node:
        node.dsec("image", "import", IMAGE, str(python_root))
        with dsec.sync.DSecClient(node.url, node.api_key) as made:
            yield made


def test_pip_installs_what_is_allowed_and_fails_fast_without(client: dsec.sync.DSecClient) -> None:
    with client.run_container(DSecContainerRunArgs(container_image=IMAGE, network_rules={"pypi": True})) as box:
        done = box.exec([*INSTALL, "six==1.16.0"], timeout=90)
        if done.exit_code != 0 and any(flow.reason in ("unreachable", "tls") for flow in box.net_log()):
            pytest.skip("the package index cannot be reached from this machine")
        assert done.exit_code == 0, (done.text, done.stderr, box.net_log())
        assert (
            box.exec(
                [PYTHON, "-c", "import sys; sys.path.insert(0, '/tmp/there'); import six; print(six.__version__)"]
            ).text
            == "1.16.0\n"
        )
        box.set_network_rules({"pypi": NetworkRule(before="2021-01-01")})
        late = box.exec([*INSTALL, "--upgrade", "--no-cache-dir", "six==1.16.0"], timeout=90)
        assert late.exit_code != 0 and b"1.15.0" in late.stderr, "1.16.0 was uploaded in May 2021"
        assert box.exec([*INSTALL, "--upgrade", "--no-cache-dir", "six"], timeout=90).exit_code == 0
        shown = box.run_shell("ls /tmp/there", check=True).text
        assert "six-1.15.0.dist-info" in shown
        box.set_network_rules({})
        began = time.monotonic()
        assert box.exec([*INSTALL, "idna"], timeout=60).exit_code != 0
        assert time.monotonic() - began < 20, "refused, not left to time out"
