"""What a program inside a sandbox cannot reach: a test for each threat of docs/security.md that a cell answers."""

import fcntl
import os
from pathlib import Path

import pytest

from dsec.kernel.launch import CAPABILITIES, capability_bits
from dsec.kernel.uids import IDS
from security.cell import Starter

pytestmark = pytest.mark.root

POWERS = (
    "mount", "umount", "remount", "fsopen", "open_tree", "pivot", "userns", "mntns", "netns", "blockdev", "chardev",
    "kexec", "module", "bpf", "perf", "iouring", "aio", "packet", "alg", "reboot", "swap", "time", "nofile", "nice", "handle",
)  # fmt: skip
HIDDEN = (
    "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags",
    "/proc/timer_list", "/proc/cmdline", "/proc/sysrq-trigger", "/proc/interrupts", "/sys/firmware", "/sys/kernel/debug", "/sys/module",
    "/sys/fs/cgroup/memory", "/dev/mem", "/dev/kmsg", "/dev/loop-control", "/dev/fuse", "/dev/net/tun",
)  # fmt: skip


async def test_root_inside_is_nobody_outside(start: Starter) -> None:
    cell = await start()
    said = (await cell.shell("cat /proc/self/uid_map /proc/self/gid_map")).split()
    assert said[0] == said[3] == "0"
    assert said[1] == said[4]
    assert int(said[1]) >= 1 << 24
    assert said[2] == said[5] == str(IDS)
    assert await cell.probe("ids") == "0 0 0 0"


async def test_two_sandboxes_share_no_id(start: Starter) -> None:
    maps = {await (await start(name)).shell("cat /proc/self/uid_map") for name in ("one", "two")}
    first, second = sorted(int(said.split()[1]) for said in maps)
    assert second - first > IDS


@pytest.mark.parametrize("user", ["", "user"])
async def test_no_power_over_the_kernel(start: Starter, user: str) -> None:
    cell = await start()
    gained = {power: said for power in POWERS if (said := await cell.probe("try", power, user=user)) == "done"}
    assert gained == {}


async def test_aether_is_out_of_reach(start: Starter) -> None:
    cell = await start()
    for act in ("kill1", "stop1", "ptrace1", "readv1", "join1"):
        assert await cell.probe("try", act) in ("EPERM", "EACCES"), act
    for part in ("environ", "maps", "mem", "stack", "auxv", "exe", "fd/4", "root/etc/passwd"):
        assert await cell.probe("open", f"/proc/1/{part}") in ("EACCES", "EPERM", "ENOENT"), part
    assert (await cell.run("true")).code == 0


async def test_capabilities_are_those_listed(start: Starter) -> None:
    cell = await start()
    bits = f"{capability_bits():016x}"
    said = dict(line.split("=") for line in (await cell.probe("capabilities")).split())
    assert said == {"CapInh": "0" * 16, "CapPrm": bits, "CapEff": bits, "CapBnd": bits, "CapAmb": "0" * 16}
    said = dict(line.split("=") for line in (await cell.probe("capabilities", user="user")).split())
    assert said["CapPrm"] == said["CapEff"] == "0" * 16
    assert said["CapBnd"] == bits
    assert "sys_admin" not in CAPABILITIES


async def test_set_uid_and_file_capabilities_work_inside(start: Starter) -> None:
    cell = await start()
    assert (await cell.run("probe-suid", "ids", user="user")).out == "1000 0 1000 0"
    said = (await cell.run("probe-cap", "capabilities", user="user")).out
    assert f"CapEff={1 << 10:016x}" in said


async def test_nothing_of_the_host_is_to_be_seen(start: Starter) -> None:
    cell = await start()
    for path in HIDDEN:
        assert await cell.probe("open", path) in ("ENOENT", "EACCES", "EPERM", "empty", "EISDIR"), path
    mounts = await cell.shell("cat /proc/self/mountinfo")
    assert "dt-" not in mounts
    assert (await cell.shell("ls /sys/class/net")).split() == ["lo"]
    assert set((await cell.shell("ls /dev")).split()) == {
        "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero",
    }  # fmt: skip
    pids = (await cell.shell("ls /proc | while read n; do case $n in [0-9]*) echo $n;; esac; done")).split()
    assert len(pids) < 8


async def test_kernel_settings_are_read_only(start: Starter) -> None:
    cell = await start()
    for path in (
        "/proc/sys/kernel/panic",
        "/proc/sys/user/max_user_namespaces",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sys/vm/drop_caches",
        "/proc/self/oom_score_adj_",
        "/sys/devices/system/cpu/cpu0/online",
    ):
        assert await cell.probe("write", path) in ("EROFS", "EACCES", "ENOENT"), path


async def test_no_descriptor_of_the_host_comes_in(start: Starter) -> None:
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    far = fcntl.fcntl(secret, fcntl.F_DUPFD, 900)
    try:
        cell = await start()
        listing = await cell.shell("ls -l /proc/self/fd")
        assert "hostname" not in listing
        assert sum("->" in line for line in listing.splitlines()) <= 4
    finally:
        os.close(secret)
        os.close(far)


async def test_a_device_in_the_image_is_not_one(start: Starter) -> None:
    cell = await start()
    assert (await cell.shell("ls -l /srv/disk")).startswith("b")
    assert await cell.probe("open", "/srv/disk") in ("EACCES", "EPERM", "ENXIO")


async def test_the_network_is_the_sandboxs_own(start: Starter) -> None:
    one, two = await start("one"), await start("two")
    names = {
        await cell.shell("readlink /proc/self/ns/net || busybox readlink /proc/self/ns/net") for cell in (one, two)
    }
    assert len(names) == 2
    assert os.readlink("/proc/self/ns/net") not in names
    assert "1 packets received" in await one.shell("ping -c 1 127.0.0.1")


async def test_what_one_writes_another_does_not_see(start: Starter) -> None:
    one, two = await start("one"), await start("two")
    assert await one.shell("echo mine > /etc/passwd; echo x > /dev/shm/x; cat /etc/passwd") == "mine"
    assert "root:" in await two.shell("cat /etc/passwd")
    assert await two.shell("ls /dev/shm") == ""


async def test_the_layer_below_stays_as_it_is(start: Starter, layer: str) -> None:
    before = sorted(os.listdir(layer))
    cell = await start()
    await cell.shell("rm -rf /etc /home /srv; echo x > /new")
    assert sorted(os.listdir(layer)) == before
    assert (Path(layer) / "etc/passwd").exists()
