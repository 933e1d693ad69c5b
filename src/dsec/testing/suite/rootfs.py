"""The images that the suite runs in: a static busybox with all its applets, plain and with a configuration of its own."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dsec.testing.suite.archives import image, layout_files, packed_directory, write_layout

__all__ = ["BOX", "FULL", "FULL_CONFIG", "busybox_layer", "import_images", "make_rootfs"]

BOX, FULL = "box:1", "full:1"
FULL_CONFIG: dict[str, Any] = {
    "Env": ["PATH=/opt/x:/usr/bin:/bin", "A=b c"],
    "WorkingDir": "/w",
    "User": "1234:5678",
    "Entrypoint": ["/bin/false"],
    "Cmd": ["x"],
}


def make_rootfs(root: Path) -> Path:
    """Every applet, a world-writable /tmp, and nothing else. Raises FileNotFoundError without a static busybox."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox: apt-get install busybox-static")
    for folder in ("bin", "proc", "sys", "dev", "tmp", "etc", "root", "var"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy2(busybox, root / "bin/busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in (name for name in listed if name != "busybox"):
        (root / "bin" / applet).symlink_to("busybox")
    (root / "tmp").chmod(0o1777)
    (root / "not-executable").write_text("text")
    (root / "not-executable").chmod(0o644)
    (root / "etc/passwd").write_text("root::0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return root


@cache
def busybox_layer() -> bytes:
    """That root as a layer, for images made on top of it."""
    with tempfile.TemporaryDirectory() as folder:
        return packed_directory(make_rootfs(Path(folder) / "root"))


def import_images(site_import: Callable[[str, Path], object], work: Path) -> None:
    """Gives a platform the two images that every module runs in; `site_import` is its Site.import_image."""
    root = make_rootfs(work / "rootfs")
    site_import(BOX, root)
    layout = write_layout(work / "layout", layout_files(image([packed_directory(root)], run=FULL_CONFIG)))
    site_import(FULL, layout)
    shutil.rmtree(layout)
