"""The smallest root that all contenders share: a static busybox and its applets."""

import random
import shutil
from pathlib import Path

__all__ = ["make_rootfs", "make_source"]

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


def make_source(root: Path, files: int, seed: int = 7) -> int:
    """A tree like a source checkout: many small files of words that compress, a few large ones; its bytes."""
    chance, size = random.Random(seed), 0
    words = [chance.randbytes(chance.randint(2, 9)).hex() for _ in range(2000)]
    for number in range(files):
        folder = root / f"src/p{number % 97}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = chance.choices(words, k=chance.choice((60, 200, 700, 3000)))
        size += (folder / f"m{number}.py").write_text("\n".join(lines))
    return size
