"""`dsec up` and `dsec down` as a person runs them: a sandbox outlives a killed server, and nothing outlives `dsec down`."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from dsec.sync import DSecClient

pytestmark = pytest.mark.root

BUSYBOX = shutil.which("busybox")


class Site:
    """A state directory and the command line on it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"

    def dsec(self, *arguments: str, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")} | more
        environ["DSEC_CREDENTIALS"] = str(self.state / "credentials.json")
        environ["DSEC_CONTAINER_POOL_BYTES"] = str(1 << 30)
        done = subprocess.run(
            [sys.executable, "-m", "dsec", *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def up(self, *more: str) -> str:
        return self.dsec("up", "--detach", "--state", str(self.state), "--listen", "127.0.0.1:0", *more).stderr

    def down(self, *more: str) -> str:
        return self.dsec("down", "--state", str(self.state), *more).stderr

    def pid(self) -> int:
        return int((self.state / "server.lock").read_text())

    def client(self) -> DSecClient:
        kept = json.loads((self.state / "credentials.json").read_text())
        return DSecClient(kept["url"], kept["api_key"])

    def left(self) -> list[str]:
        """Mounts, groups and processes of this state directory."""
        node = "dsec-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.state) in line]
        groups = [
            str(path) for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") for path in Path(root).glob(f"*/{node}")
        ]
        groups += [str(path) for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") for path in Path(root).glob(node)]
        loops = [
            str(path)
            for path in Path("/sys/block").glob("loop*/loop/backing_file")
            if str(self.state) in path.read_text()
        ]
        return mounts + groups + loops


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    site = Site(tmp_path)
    root = tmp_path / "rootfs"
    for name in ("bin", "proc", "sys", "dev", "tmp", "etc", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for applet in ("sh", "sleep", "echo", "cat", "ls", "true", "id", "ps", "kill"):
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    site.dsec("image", "import", "--state", str(site.state), "busybox", str(root))
    yield site
    site.down()
    assert site.left() == []


def test_a_sandbox_outlives_a_killed_server_and_nothing_outlives_down(site: Site) -> None:
    said = site.up()
    assert "listening on http://127.0.0.1:" in said
    with site.client() as client:
        box = client.run_container(dsec.DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64))
        assert box.run_shell("echo hello world").text == "hello world\n"
        kept = box.start(["/bin/sleep", "1000"])
        box.files.write("/tmp/x", b"kept")
        sandbox_id, process_id = box.id, kept.id
    os.kill(site.pid(), signal.SIGKILL)
    site.up()
    with site.client() as client:
        box = client.get(sandbox_id)
        assert box.files.read("/tmp/x") == b"kept"
        assert [process.running for process in box.processes() if process.id == process_id] == [True]
        assert box.run_shell("echo again").text == "again\n"
    assert "stopped 1 sandbox" in site.down()
    assert site.left() == []


def test_keep_sandboxes(site: Site) -> None:
    site.up()
    with site.client() as client:
        sandbox_id = client.run_container(dsec.DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64)).id
    assert "server stopped" in site.down("--keep-sandboxes")
    site.up()
    with site.client() as client:
        assert client.get(sandbox_id).run_shell("echo here").text == "here\n"
        client.get(sandbox_id).stop()
    assert "stopped 0 sandboxes" in site.down()


def test_one_server_a_state(site: Site) -> None:
    site.up()
    second = site.dsec("up", "--state", str(site.state), "--listen", "127.0.0.1:0", check=False)
    assert second.returncode != 0
    assert str(site.pid()) in second.stderr


def test_plain_http_beyond_loopback_is_refused(site: Site) -> None:
    refused = site.dsec("up", "--state", str(site.state), "--listen", "0.0.0.0:0", check=False, DSEC_SERVER_TLS="off")
    assert refused.returncode != 0
    assert "TLS" in refused.stderr


def test_tls_with_an_own_certificate(site: Site) -> None:
    site.dsec("up", "--detach", "--state", str(site.state), "--listen", "127.0.0.1:0", DSEC_SERVER_TLS="on")
    kept = json.loads((site.state / "credentials.json").read_text())
    assert kept["url"].startswith("https://127.0.0.1:")
    with DSecClient(kept["url"], kept["api_key"], ca_file=kept["ca_file"]) as client:
        assert client.me().principal == "root"
    with pytest.raises(dsec.Unavailable), DSecClient(kept["url"], kept["api_key"]) as client:
        client.me()
