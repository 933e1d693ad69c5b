"""The smallest root that all contenders share: a static busybox and its applets."""

import shutil
from pathlib import Path

__all__ = ["make_rootfs"]

APPLETS = ("sh", "true", "sleep", "cat", "echo", "ls", "mkdir", "rm", "hostname")


def make_rootfs(root: Path) -> Path:
    """Fill `root`. Raises FileNotFoundError where busybox-static is not installed."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox: apt-get install busybox-static")
    for folder in ("bin", "proc", "sys", "dev", "tmp", "etc", "root", "var"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy2(busybox, root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return root
