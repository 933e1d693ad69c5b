"""A sandbox of the container backend alone, with a hostile program in its image: no server around it."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.edge.agent import UnixAgent
from dsec.edge.backends.container import Container
from dsec.kernel.clock import SystemClock
from dsec.kernel.mounts import mount_erofs, umount
from dsec.model.plan import Handle, Identity, Limits, Mount, Plan
from security.cell import LIMITS, Cell, Starter, capability_xattr, settings

HERE = Path(__file__).parent
PROGRAMS = ("probe", "hostile", "storm")


@pytest.fixture(scope="session")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A mounted EROFS layer: busybox, the probe plain, set-uid and with a file capability, and a host-like device node."""
    work = tmp_path_factory.mktemp("layer")
    root, image, mounted = work / "root", work / "layer.erofs", work / "mnt"
    for name in ("bin", "etc", "home", "tmp", "srv"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for name in (
        "sh",
        "cat",
        "ls",
        "id",
        "dd",
        "rm",
        "sleep",
        "ping",
        "stat",
        "hostname",
        "nproc",
        "true",
        "find",
        "ip",
        "grep",
        "head",
        "mkdir",
        "readlink",
        "test",
    ):
        (root / "bin" / name).symlink_to("busybox")
    for name in PROGRAMS:
        subprocess.run(["gcc", "-O1", "-static", "-pthread", "-o", root / "bin" / name, HERE / f"{name}.c"], check=True)
    shutil.copy(root / "bin/probe", root / "bin/probe-suid")
    (root / "bin/probe-suid").chmod(0o6755)
    shutil.copy(root / "bin/probe", root / "bin/probe-cap")
    os.setxattr(root / "bin/probe-cap", "security.capability", capability_xattr(10))
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    os.mknod(root / "srv/disk", 0o660 | 0o060000, os.makedev(7, 0))
    (root / "srv/out").symlink_to("/../../../../tmp")
    subprocess.run(["mkfs.erofs", "-x1", image, root], check=True, capture_output=True)
    mounted.mkdir()
    mount_erofs(str(image), None, str(mounted))
    yield str(mounted)
    umount(str(mounted))


@pytest_asyncio.fixture
async def container(tmp_path: Path) -> AsyncIterator[Container]:
    backend = Container(settings(tmp_path), SystemClock(), UnixAgent)
    await backend.open()
    yield backend
    await backend.close()


@pytest_asyncio.fixture
async def start(container: Container, layer: str) -> AsyncIterator[Starter]:
    """Starts a sandbox; every one is stopped in the end."""
    handles: list[Handle] = []

    async def begin(
        name: str = "one",
        *,
        limits: Limits = LIMITS,
        mounts: tuple[Mount, ...] = (),
        identity: Identity | None = None,
        layers: tuple[str, ...] = (),
    ) -> Cell:
        plan = Plan(
            sandbox_id=name,
            layers=tuple(Mount(kind="layer", source=source) for source in (layer, *layers)),
            mounts=mounts,
            limits=limits,
            identity=identity or Identity(hostname="cell"),
        )
        handle = container.reserve(plan)
        handles.append(handle)
        await container.start(plan, handle)
        return Cell(container, handle, plan)

    yield begin
    for handle in handles:
        await container.stop(handle)
