"""What this host offers, found out by trying: the mechanisms, their rungs, and the rung that is used."""

import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from dsec import _native
from dsec.kernel.cgroup import GroupLimits, Hybrid, Unified
from dsec.kernel.clock import SystemClock
from dsec.kernel.erofs import ErofsEntry, erofs_image
from dsec.kernel.errors import KernelError, from_kernel, kernel_op
from dsec.kernel.mounts import mount_erofs, umount
from dsec.kernel.namespaces import Namespaces, make_namespaces
from dsec.kernel.network import FabricSettings, NetFabric
from dsec.kernel.pool import Pool
from dsec.kernel.uids import Slots, agent_id, base_id
from dsec.model.network import Allow, NetLimits

__all__ = ["Doctor", "Mechanism", "Rung", "examine", "too_old"]

_NETWORK = (
    "without it a create with network rules is refused: it needs BPF with BTF and clsact, veth, nftables and conntrack by netlink in the kernel, and "
    "nft (apt-get install nftables); while sandboxes are linked the host forwards packets"
)
_KERNEL = (6, 13)
_PYTHON = (3, 11)
_FILES_A_SANDBOX = 3
_DENSE = 4096


class Rung(Struct, frozen=True, kw_only=True):
    """One way to do a thing: whether it works here, and why not, or how."""

    name: str
    ok: bool
    why: str = ""


class Mechanism(Struct, frozen=True, kw_only=True):
    """A thing needed, with its ways, best first. `using` is None where none works. `advice` is for the host's owner."""

    name: str
    using: str | None
    rungs: tuple[Rung, ...]
    needed: bool = True
    advice: str = ""


class Doctor(Struct, frozen=True, kw_only=True):
    """All mechanisms; `backends`: for each kind, "" or why it cannot run; `ok`: containers can run here."""

    mechanisms: tuple[Mechanism, ...]
    backends: dict[str, str]
    ok: bool


class _Unfit(Exception):
    """The host answers, but not as needed."""


@dataclass(frozen=True, slots=True)
class _Try:
    name: str
    attempt: Callable[[], str]


def _rung(this: _Try) -> Rung:
    try:
        return Rung(name=this.name, ok=True, why=this.attempt())
    except (KernelError, _Unfit) as error:
        return Rung(name=this.name, ok=False, why=str(error))


def _mechanism(name: str, *tries: _Try, needed: bool = True, advice: str = "") -> Mechanism:
    rungs = tuple(_rung(this) for this in tries)
    using = next((rung.name for rung in rungs if rung.ok), None)
    return Mechanism(name=name, using=using, rungs=rungs, needed=needed, advice=advice)


def examine(scratch: Path) -> Doctor:
    """Tries everything in a directory of its own below `scratch`, and removes what it made. Needs root; takes about a second."""
    mechanisms = [_kernel(), _python()]
    if os.geteuid() != 0:
        rung = Rung(name="root", ok=False, why="sandboxes are made by root; run this as root")
        mechanisms.append(Mechanism(name="privilege", using=None, rungs=(rung,)))
    else:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=scratch) as made:
            mechanisms += _attempts(Path(made))
    mechanisms += [_seccomp(), _files(), _inotify()]
    missing = [m.name for m in mechanisms if m.needed and m.using is None]
    backends = {
        "container": f"missing: {', '.join(missing)}" if missing else "",
        "microvm": "not built yet",
        "fullvm": "not built yet",
        "fncall": "not built yet",
    }
    return Doctor(mechanisms=tuple(mechanisms), backends=backends, ok=not missing)


def _attempts(work: Path) -> list[Mechanism]:
    slots = Slots(f"doctor {os.getpid()}")
    with_ids = _mechanism("id-ranges", _Try("blocks", lambda: _claim(slots)))
    if with_ids.using is None:
        return [with_ids]
    slot = slots.take("doctor")
    try:
        cell = _Workplace(work, slot)
        try:
            return [
                with_ids,
                _mechanism("namespaces", _Try("user-net-ipc-uts", cell.namespaces)),
                _mechanism("image-loading", _Try("erofs-file", cell.erofs), needed=True),
                _mechanism(
                    "writable-layers", _Try("btrfs-simple-quota", cell.pool), advice="apt-get install btrfs-progs"
                ),
                _mechanism("rootfs", _Try("overlay-idmapped", cell.overlay)),
                _mechanism("cgroups", _Try("v2", cell.unified), _Try("hybrid", cell.hybrid)),
                _mechanism("network", _Try("clsact-nftables", cell.network), needed=False, advice=_NETWORK),
                _mechanism("mandatory-access", _Try("apparmor", _apparmor), needed=False),
            ]
        finally:
            cell.close()
    finally:
        slots.release(slot, "doctor")
        slots.close()


def _claim(slots: Slots) -> str:
    slots.open()
    return "host ids from 16,777,216, 65,537 for each sandbox"


class _Workplace:
    """What attempts leave for later ones, and its removal."""

    def __init__(self, work: Path, slot: int) -> None:
        self._work = work
        self._slot = slot
        self._layer = work / "layer"
        self._made: Namespaces | None = None
        self._mounted = False
        self._pool: Pool | None = None

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        if self._pool is not None:
            for name in self._pool.names():
                self._pool.delete(name)
            self._pool.close()
        if self._mounted:
            umount(str(self._layer))

    def namespaces(self) -> str:
        self._made = make_namespaces(self._slot)
        return "owned by an unprivileged id; nested user namespaces forbidden"

    def erofs(self) -> str:
        self._layer.mkdir()
        image = self._work / "layer.erofs"
        root = ErofsEntry(b"", 1, 0o755, 0, 0, 0, 0, (0, 0), b"", (), 0, 0, 0)
        image.write_bytes(erofs_image([root], bytes(16), 0))
        mount_erofs(str(image), None, str(self._layer))
        self._mounted = True
        return "mounted from a file, without a loop device"

    def pool(self) -> str:
        pool = Pool(self._work)
        pool.open()
        self._pool = pool
        writable = pool.create("quota", 1 << 20)
        return _overfill(writable / "upper" / "file", 4 << 20)

    def overlay(self) -> str:
        if self._made is None or not self._mounted or self._pool is None:
            raise _Unfit("needs namespaces, image-loading and writable-layers")
        writable = self._pool.create("overlay", 1 << 20)
        layers = [str(self._layer)]
        os.close(from_kernel(_native.assemble)(layers, str(writable), self._made.user, base_id(self._slot)))
        return "lower and upper idmapped, given by descriptor"

    def network(self) -> str:
        """A router, a link and a policy on a host of its own, so that nothing of this one is changed."""
        if self._made is None:
            raise _Unfit("needs namespaces")
        sandbox = from_kernel(_native.make_netns)()
        fabric = NetFabric(self._work / "fabric", FabricSettings(), SystemClock(), host=self._made.net)
        try:
            fabric.open()
            fabric.link(self._slot, sandbox)
            fabric.apply(self._slot, [Allow(network="192.0.2.1/32")], NetLimits(), 0)
        finally:
            fabric.close(keep=False)
            os.close(sandbox)
        return "programs at each sandbox's link, maps pinned, refusals and translation by nftables"

    def unified(self) -> str:
        root = Path("/sys/fs/cgroup")
        with kernel_op("read", str(root / "cgroup.controllers")):
            offered = (root / "cgroup.controllers").read_text("ascii").split()
        return self._group(Unified(root, f"dsec-doctor-{os.getpid()}"), f"controllers: {' '.join(offered)}")

    def hybrid(self) -> str:
        cgroups = Hybrid(Path("/sys/fs/cgroup"), f"dsec-doctor-{os.getpid()}")
        return self._group(cgroups, "v1 memory, cpu and pids limit; the v2 tree groups and kills")

    def _group(self, cgroups: Hybrid | Unified, why: str) -> str:
        limits = GroupLimits(memory_bytes=64 << 20, cpu_cores=0.5, pids=16)
        try:
            cgroups.open()
            cgroups.create("doctor", limits, agent_id(self._slot)).close()
            cgroups.usage("doctor")
            cgroups.kill("doctor")
        finally:
            cgroups.remove("doctor")
            cgroups.close()
        return why


def _overfill(path: Path, size: int) -> str:
    """Writes past a limit of less than `size` bytes, and is glad to fail."""
    chunk = bytes(1 << 20)
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(size >> 20):
                file.write(chunk)
            os.fsync(file.fileno())
    except OSError:
        return "a writer is stopped at its limit"
    raise _Unfit("a writer went past its limit")


def too_old(release: str) -> str:
    """Why a kernel of this release cannot run sandboxes; "" for one that is new enough. Nothing is tried."""
    parts = release.replace("-", ".").split(".")
    if (int(parts[0]), int(parts[1])) < _KERNEL:
        return f"this is Linux {release}, and {_KERNEL[0]}.{_KERNEL[1]} is needed"
    return ""


def _kernel() -> Mechanism:
    def version() -> str:
        found = platform.release()
        if why := too_old(found):
            raise _Unfit(why)
        return found

    return _mechanism("kernel", _Try("linux", version))


def _python() -> Mechanism:
    def version() -> str:
        if sys.version_info < _PYTHON:
            raise _Unfit(platform.python_version())
        return platform.python_version()

    return _mechanism("python", _Try("cpython", version))


def _seccomp() -> Mechanism:
    def actions() -> str:
        path = Path("/proc/sys/kernel/seccomp/actions_avail")
        with kernel_op("read", str(path)):
            return path.read_text("ascii").strip()

    return _mechanism("seccomp", _Try("filter", actions))


def _apparmor() -> str:
    path = Path("/sys/kernel/security/apparmor/profiles")
    with kernel_op("read", str(path)):
        path.read_bytes()
    return "there, but not used yet"


def _files() -> Mechanism:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = hard // _FILES_A_SANDBOX
    rung = Rung(name="open-files", ok=True, why=f"{hard} for the server: room for about {room} sandboxes")
    advice = (
        "" if room >= _DENSE else f"raise the hard limit of open files (now {hard}, soft {soft}) for more sandboxes"
    )
    return Mechanism(name="descriptors", using="open-files", rungs=(rung,), needed=False, advice=advice)


def _inotify() -> Mechanism:
    def limits() -> str:
        with kernel_op("read", "inotify limits"):
            base = Path("/proc/sys/fs/inotify")
            instances = int((base / "max_user_instances").read_text("ascii"))
            watches = int((base / "max_user_watches").read_text("ascii"))
        return f"{instances} instances and {watches} watches in each sandbox"

    advice = "fs.inotify.max_user_instances limits each sandbox; raise it for programs that watch many trees"
    return _mechanism("inotify", _Try("per-sandbox", limits), needed=False, advice=advice)
