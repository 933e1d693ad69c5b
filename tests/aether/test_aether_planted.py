"""The sandbox's programs, libraries and accounts are its own to break: the platform runs none of them for its own work."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from aether.box import Box, request
from dsec.model import aether as wire

pytestmark = pytest.mark.root

# Says in /tmp/canary that it ran, without any library: as a preloaded object, an account module, or the loader itself.
CANARY = r"""
static long call(long n, long a, long b, long c) {
    __asm__ volatile("syscall" : "+a"(n) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return n;
}
static void say(void) {
    long file = call(2, (long)"/tmp/canary", 02101, 0666); /* open: create, append, write */
    call(1, file, (long)"ran\n", 4);
}
__attribute__((constructor)) static void loaded(void) { say(); }
void _start(void) { say(); call(60, 0, 0, 0); }
"""
PROGRAMS = (
    "/bin/sh",
    "/bin/bash",
    "/bin/dash",
    "/bin/ls",
    "/bin/cat",
    "/bin/tar",
    "/bin/rm",
    "/bin/stat",
    "/usr/bin/env",
    "/bin/mount",
)


def compiled(folder: Path, *flags: str) -> bytes:
    (folder / "canary.c").write_text(CANARY)
    subprocess.run(["gcc", "-O1", "-nostdlib", *flags, "-o", folder / "canary", folder / "canary.c"], check=True)
    return (folder / "canary").read_bytes()


async def plant(box: Box, folder: Path) -> None:
    """Everything that a program run in the platform's name would go through."""
    program, library = compiled(folder, "-static"), compiled(folder, "-shared", "-fPIC")
    await box.write("/tmp/canary.so", library, mode=0o755)
    loaders = [name.decode() for name in (await box.sh("find /lib /lib64 /usr/lib -name '*.so*'")).out.split()]
    assert loaders
    for path in ("/lib/libnss_canary.so.2", "/usr/lib/libnss_canary.so.2"):
        await box.write(path, library, mode=0o755, make_parents=True)
    for path, text in {
        "/etc/nsswitch.conf": "passwd: canary\ngroup: canary\n", "/etc/ld.so.preload": "/tmp/canary.so\n",
        "/etc/profile": "echo ran >> /tmp/canary\n", "/root/.profile": "echo ran >> /tmp/canary\n",
        "/etc/passwd": "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n", "/etc/environment": "LD_PRELOAD=/tmp/canary.so\n",
    }.items():  # fmt: skip
        await box.write(path, text.encode())
    for path in [*PROGRAMS, *loaders]:
        await box.run("/bin/busybox", "rm", "-f", path)
        await box.write(path, program, mode=0o755)


async def platform(box: Box) -> None:
    """What the platform does by itself: no program of the sandbox has a part in it."""
    reply = await box.agent.call(wire.HelloRequest(version=wire.VERSION))
    assert isinstance(reply, wire.HelloReply)
    await box.write("/tmp/d/f", b"data", make_parents=True, user="agent")
    assert await box.read("/tmp/d/f", user="agent") == b"data"
    assert [item.path for item in await box.list("/tmp/d")] == ["/tmp/d/f"]
    with tarfile.open(fileobj=io.BytesIO(await box.tree("/tmp/d"))) as archive:
        assert any(name.endswith("f") for name in archive.getnames())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    assert isinstance(await box.put_tree("/tmp/d", buffer.getvalue()), wire.WrittenReply)
    for message in (
        wire.FileStatRequest(path="/tmp/d/f", user="agent", follow=True),
        wire.FileMkdirRequest(path="/tmp/d/e/g", user="", mode=0o755, parents=True),
        wire.FileMoveRequest(source="/tmp/d/f", target="/tmp/d/h", user="", replace=False),
        wire.FileRemoveRequest(path="/tmp/d", user="", recursive=True),
    ):
        async with await box.agent.begin(message) as channel:
            assert not isinstance(await channel.receive(), wire.FailedReply), message


async def test_planted_programs_do_not_run_in_the_platforms_name(box: Box, tmp_path: Path) -> None:
    await plant(box, tmp_path)
    await platform(box)
    assert await box.refusal(wire.FileStatRequest(path="/tmp/canary", user="", follow=True)) == ("not_found", "file")
    assert (await box.run("/bin/busybox", "true")).code == 0
    assert (await box.run("/bin/busybox", "id", "-u", user="agent")).out == b"1000\n"
    assert await box.refusal(request(["/bin/busybox", "true"], user="daemon")) == ("not_found", "user")
    assert await box.refusal(wire.FileStatRequest(path="/tmp/canary", user="", follow=True)) == ("not_found", "file")
    assert (await box.run("/bin/ls")).code == 0  # the sandbox's own request: it runs what is there
    assert await box.read("/tmp/canary") == b"ran\n"
    shell = wire.OpenSessionRequest(session_id="s", shell="", env=(), cwd="/", user="", open_files=64)
    assert (await box.refusal(shell))[0] in ("unsupported", "runtime_failure")
    await platform(box)


async def test_without_any_program_the_platform_works(box: Box) -> None:
    await box.run("/bin/busybox", "rm", "-rf", "/bin", "/lib", "/lib64", "/usr", "/etc", "/root")
    await box.write("/etc/passwd", b"agent:x:1000:1000::/tmp:/bin/sh\n", make_parents=True)
    await platform(box)
    assert await box.refusal(request(["ls"])) == ("command_not_found", "command")
    shell = wire.OpenSessionRequest(session_id="s", shell="", env=(), cwd="/", user="", open_files=64)
    assert (await box.refusal(shell))[0] == "command_not_found"


@pytest.mark.parametrize(
    "text", [b"", b"\0" * 100, b"agent:" * 10000, b"agent:x:-1:4294967296::/:\n" * 1000, b"\xff\xfe:\n"]
)
async def test_a_broken_passwd_is_no_user_and_no_harm(box: Box, text: bytes) -> None:
    await box.write("/etc/passwd", text)
    assert (await box.refusal(request(["/bin/busybox", "true"], user="agent")))[0] in ("not_found", "invalid_argument")
    assert (await box.run("/bin/busybox", "true")).code == 0
