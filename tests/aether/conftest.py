"""One sandbox of the container backend with three shells in its image: no server around it."""

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from aether.box import Box
from dsec.edge.agent import UnixAgent
from dsec.edge.backends.container import Container
from dsec.kernel.clock import SystemClock
from dsec.kernel.mounts import mount_erofs, umount
from dsec.model.plan import Identity, Limits, Mount, Plan
from security.cell import settings

LIMITS = Limits(
    memory_bytes=256 << 20, cpu_cores=2.0, disk_bytes=64 << 20, pids=256, open_files=1024, shm_bytes=8 << 20
)  # fmt: skip
PASSWD = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"


def copy_program(program: str, root: Path) -> None:
    """A program of the host with its libraries, at the same paths."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for path in [program, *re.findall(r"(/\S+) \(0x", listed)]:
        target = root / path.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


@pytest.fixture(scope="session")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    work = tmp_path_factory.mktemp("shells")
    root, image, mounted = work / "root", work / "layer.erofs", work / "mnt"
    for name in ("bin", "etc", "home/user", "tmp", "root", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    os.chown(root / "home/user", 1000, 1000)
    for name in ("/bin/bash", "/bin/dash"):
        copy_program(name, root)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
        if not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\nextra:x:44:user\n")
    subprocess.run(["mkfs.erofs", "-x1", image, root], check=True, capture_output=True)
    mounted.mkdir()
    mount_erofs(str(image), None, str(mounted))
    yield str(mounted)
    umount(str(mounted))


@pytest_asyncio.fixture
async def box(tmp_path: Path, shells: str) -> AsyncIterator[Box]:
    backend = Container(settings(tmp_path), SystemClock(), UnixAgent)
    await backend.open()
    layer = Mount(kind="layer", source=shells)
    plan = Plan(sandbox_id="b", layers=(layer,), mounts=(), limits=LIMITS, identity=Identity(hostname="box"))
    handle = backend.reserve(plan)
    try:
        await backend.start(plan, handle)
        agent = backend.agent(handle)
        assert isinstance(agent, UnixAgent)
        yield Box(agent, 0)
    finally:
        await backend.stop(handle)
        await backend.close()
