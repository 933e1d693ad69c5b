"""What security tests do with one sandbox."""

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import dsec
from dsec.edge.backends.container import Container
from dsec.edge.backends.settings import ContainerSettings
from dsec.kernel.seccomp import command_filter
from dsec.model.aether import FRAME_STDERR, FRAME_STDOUT, EndedReply, ExecRequest, FailedReply
from dsec.model.plan import Handle, Limits, Plan
from dsec.testing.leaks import CGROUPS

__all__ = ["LIMITS", "Cell", "Ran", "Starter", "capability_xattr", "groups_of", "settings"]

LIMITS = Limits(
    memory_bytes=128 << 20, cpu_cores=1.0, disk_bytes=24 << 20, pids=64, open_files=256, shm_bytes=8 << 20
)  # fmt: skip
ENVIRONMENT = ("PATH=/bin", "HOME=/")


def settings(state: Path) -> ContainerSettings:
    """A node with a small pool and nothing made ahead, so that tests see only what they ask for."""
    program = Path(dsec.__file__).parent / "_bin" / "aether"
    return ContainerSettings(
        state=state,
        program=program,
        filter=command_filter(),
        pool_bytes=512 << 20,
        ahead_low=0,
        ahead_high=0,
        workers=2,
    )


def capability_xattr(number: int) -> bytes:
    """security.capability, version 2: capability `number`, permitted and effective."""
    return struct.pack("<IIIII", 0x02000001, 1 << number, 0, 0, 0)


def groups_of(backend: Container, name: str) -> list[str]:
    """Every cgroup directory of the sandbox, in all hierarchies."""
    return [str(path) for path in CGROUPS.glob(f"*/dsec-*/{name}")] + [
        str(path) for path in CGROUPS.glob(f"dsec-*/{name}")
    ]


@dataclass(frozen=True)
class Ran:
    """An ended command."""

    outcome: str
    code: int | None
    out: str


@dataclass(frozen=True)
class Cell:
    """A running sandbox."""

    backend: Container
    handle: Handle
    plan: Plan

    async def run(self, *argv: str, user: str = "", timeout_ms: int = 20_000, output_limit: int = 1 << 16) -> Ran:
        """Runs a command to its end; its output is both streams together."""
        request = ExecRequest(
            process_id=f"p{id(argv)}-{len(argv)}",
            argv=argv,
            env=ENVIRONMENT,
            cwd="/",
            make_cwd=False,
            user=user,
            stdin=False,
            pty=None,
            timeout_ms=timeout_ms,
            output_limit=output_limit,
            keep=False,
            open_files=self.plan.limits.open_files,
            stream=True,
        )
        out = bytearray()
        async with await self.backend.agent(self.handle).begin(request) as channel:
            async for frame in channel.frames():
                if isinstance(frame, tuple) and frame[0] in (FRAME_STDOUT, FRAME_STDERR):
                    out += frame[1]
                elif isinstance(frame, EndedReply):
                    return Ran(frame.outcome, frame.exit_code, out.decode(errors="replace").strip())
                elif isinstance(frame, FailedReply):
                    raise AssertionError(f"{frame.code}: {frame.detail}")
        raise AssertionError("the channel ended before the command")

    async def probe(self, *words: str, user: str = "") -> str:
        """What the hostile program says."""
        return (await self.run("probe", *words, user=user)).out

    async def shell(self, text: str, user: str = "") -> str:
        return (await self.run("sh", "-c", text, user=user)).out


Starter = Callable[..., Awaitable[Cell]]
