"""A node as a person has it: a state directory, the command line on it, and a look at what is left of it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from dsec.sync import DSecClient

__all__ = ["BUSYBOX", "Site", "make_rootfs"]

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

    def url(self) -> str:
        return str(json.loads((self.state / "credentials.json").read_text())["url"])

    def client(self) -> DSecClient:
        kept = json.loads((self.state / "credentials.json").read_text())
        return DSecClient(kept["url"], kept["api_key"])

    def gauges(self) -> dict[str, float]:
        """What /metrics says."""
        kept = json.loads((self.state / "credentials.json").read_text())
        request = urllib.request.Request(
            kept["url"] + "/metrics", headers={"authorization": f"Bearer {kept['api_key']}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def left(self) -> list[str]:
        """Mounts, groups and loop devices of this state directory, once the kernel had a moment to take them away."""
        for _ in range(100):
            found = self._left()
            if not found:
                break
            time.sleep(0.05)
        return found

    def _left(self) -> list[str]:
        node = "dsec-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.state) in line]
        roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        groups = [str(path) for root in roots for pattern in (node, f"*/{node}") for path in root.glob(pattern)]
        return mounts + groups + [str(path) for path in Path("/sys/block").glob("loop*") if self._backs(path)]

    def _backs(self, loop: Path) -> bool:
        try:
            return str(self.state) in (loop / "loop/backing_file").read_text()
        except OSError:
            return False


def make_rootfs(root: Path) -> Path:
    """The smallest root filesystem that commands can run in."""
    for name in ("bin", "proc", "sys", "dev", "tmp", "etc", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy(str(BUSYBOX), root / "bin/busybox")
    for applet in ("sh", "sleep", "echo", "cat", "ls", "true", "id", "ps", "kill"):
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root
