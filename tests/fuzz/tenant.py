"""A sandbox without a node around it, and what sits at its aether's socket and keeps to no protocol."""

import asyncio
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from aether.box import Box, request
from dsec.edge.agent import UnixAgent, UnixChannel
from dsec.edge.backends.container import Container
from dsec.kernel.clock import SystemClock
from dsec.kernel.mounts import mount_erofs, umount
from dsec.model import aether as wire
from dsec.model.plan import Identity, Limits, Mount, Plan
from e2e.site_of_one import make_rootfs
from fuzz.draw import Draw
from security.cell import settings

LIMITS = Limits(
    memory_bytes=256 << 20, cpu_cores=1.0, disk_bytes=32 << 20, pids=128, open_files=1024, shm_bytes=8 << 20
)
SEEDS = Path(__file__).parent / "corpus/messages"
HELD_MOST = 24
FIELDS: dict[str, tuple[object, ...]] = {
    "argv": (("true",), ("sh", "-c", "echo a; sleep 1000"), ("cat",), (), ("",), ("\0",), ("x" * 5000,), ("yes",)),
    "env": (("PATH=/bin",), ("A",), ("",), ("A=\0",), ("A=" + "x" * 70_000,)),
    "cwd": ("/", "", "/none", "../..", "/proc/self/fd/3", "\0"),
    "user": ("", "root", "0", "4294967295", "99999999999", ":", "a:b:c", "nobody:nobody", "-1"),
    "path": ("/", "/tmp/f", "", "/proc/self/mem", "/dev/zero", "/proc/1/fd/0", "/tmp/../..", "\0", "/" + "d/" * 3000, "relative"),
    "source": ("/", "/tmp/f", "", "/none"), "target": ("/", "/tmp/g", "", "/proc"), "shell": ("", "/bin/sh", "/none", "sh"),
    "command": ("true", "exit 3", "cat", "'", "\0", "exec 8>&-", "echo $((", "kill -9 $$", "sleep 1000"),
    "process_id": ("p", "q", "", "x" * 300, "\0"), "session_id": ("s", "t", ""),
}  # fmt: skip
NUMBERS = (0, 1, 2, 9, 64, 65, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


@dataclass
class Sandbox:
    """A sandbox, a command in it that has to go on, and connections that were left open."""

    box: Box
    pid: int
    steady: UnixChannel
    path: str
    held: list[socket.socket] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator[Self]:
        mounted = layer_of(make_rootfs(folder / "rootfs"), folder)
        backend = Container(settings(folder), SystemClock(), UnixAgent)
        try:
            await backend.open()
            layer = Mount(kind="layer", source=str(mounted))
            plan = Plan(sandbox_id="b", layers=(layer,), mounts=(), limits=LIMITS, identity=Identity(hostname="box"))
            handle = backend.reserve(plan)
            try:
                await backend.start(plan, handle)
                agent = backend.agent(handle)
                assert isinstance(agent, UnixAgent)
                async with await agent.begin(request(["cat"], stdin=True, timeout_ms=None)) as steady:
                    assert isinstance(await steady.receive(), wire.StartedReply)
                    [alive] = backend._alive.values()
                    box = cls(Box(agent, alive.pid), alive.pid, steady, agent._path)
                    yield box
                    for each in box.held:
                        each.close()
            finally:
                await backend.stop(handle)
                await backend.close()
        finally:
            umount(str(mounted))

    async def check(self) -> None:
        """The same aether answers, what was running goes on, and what was begun here can be ended."""
        for each in self.held:
            each.close()
        self.held.clear()
        await self.steady.send(b"still here\n")
        said = await self.steady.receive()
        assert said == (wire.FRAME_STDOUT, b"still here\n"), said
        listed = await self.box.agent.call(wire.ListProcessesRequest())
        assert isinstance(listed, wire.ProcessesReply)
        for process in listed.items:
            if process.argv != ("cat",) or process.ended is not None or not process.process_id.startswith("p0"):
                await self.box.agent.call(wire.ForgetRequest(process_id=process.process_id))
        sessions = await self.box.agent.call(wire.ListSessionsRequest())
        assert isinstance(sessions, wire.SessionsReply)
        for session in sessions.items:
            await self.box.agent.call(wire.CloseSessionRequest(session_id=session.session_id))
        ran = await self.box.sh("echo ok")
        assert (ran.code, ran.out) == (0, b"ok\n"), ran


def layer_of(root: Path, folder: Path) -> Path:
    """A mounted layer with what `root` holds."""
    mounted, image = folder / "mounted", folder / "layer.erofs"
    subprocess.run(["mkfs.erofs", "-x1", image, root], check=True, capture_output=True)
    mounted.mkdir()
    mount_erofs(str(image), None, str(mounted))
    return mounted


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<IB", len(payload) + 1, kind) + payload


def message(draw: Draw, seeds: list[bytes]) -> bytes:
    """A request with values of the kinds that hurt, perhaps spoilt on top."""
    told = msgspec.msgpack.decode(draw.of(seeds))
    for name, value in told.items():
        if name != "request" and not draw.once_in(3):
            if name in FIELDS:
                told[name] = draw.of(FIELDS[name])
            elif isinstance(value, bool):
                told[name] = draw.once_in(2)
            elif isinstance(value, int):
                told[name] = draw.of(NUMBERS)
    if told.get("process_id") == "p0":
        told["process_id"] = "p"
    raw = msgspec.msgpack.encode(told)
    if draw.once_in(4):
        at = draw.below(len(raw))
        raw = raw[:at] + draw.bytes(3) + raw[at + draw.below(4) :]
    return raw


_seeds: list[bytes] = []


async def hostile_frames(box: Sandbox, draw: Draw) -> None:
    """One connection: a request, input, nonsense; read a little or nothing; closed, cut, half closed or left open."""
    if not _seeds:
        _seeds.extend(path.read_bytes() for path in sorted(SEEDS.glob("*request")))
    data = frame(0, message(draw, _seeds)) if not draw.once_in(8) else draw.bytes(40)
    while draw and len(data) < 1 << 18:
        kind = draw.below(6)
        part = draw.bytes(draw.number()) * (1 + draw.below(200) * draw.once_in(6))
        data += frame(kind, part) if not draw.once_in(12) else part
    end = draw.below(4)
    loop = asyncio.get_running_loop()
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        dialled.connect(box.path)
        for at in range(0, len(data), 4096):
            dialled.send(data[at : at + 4096])
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        end = 0  # it does not take more, or has closed: both are its right
    if end == 1:
        dialled.shutdown(socket.SHUT_WR)
    if end == 2 and len(box.held) < HELD_MOST:
        box.held.append(dialled)
        return
    try:
        async with asyncio.timeout(0.05):
            await loop.sock_recv(dialled, 1 << 16)
    except (TimeoutError, ConnectionResetError):
        pass
    dialled.close()
