"""crun and runc by hand: a bundle with an overlay on a shared root, `run -d`, `exec`, `delete`.

The runtime's commands come from a worker process with a mount namespace of its own, where the empty v2 cgroup tree of a hybrid
host is hidden: crun refuses such a host otherwise. The host's own mounts are not touched.
"""

import asyncio
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["Oci"]

CLONE_NEWNS, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 0x4000, 1 << 18, 2
UNIFIED = "/sys/fs/cgroup/unified"
GROUPS_SECONDS = 10.0
OPEN_FILES = 4096  # as a sandbox of ours has


class Oci:
    """A contender that drives `program` ("crun" or "runc") in a worker process; `rootfs` is the shared lower root."""

    def __init__(self, program: str, rootfs: Path) -> None:
        self.name = program
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.oci", program, str(rootfs)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    async def _ask(self, *words: object) -> Any:
        return await asyncio.to_thread(self._talk, json.dumps(words))

    def _talk(self, line: str) -> Any:
        if self._worker.stdin is None or self._worker.stdout is None:
            raise RuntimeError(f"{self.name}: no pipe to its worker")
        self._worker.stdin.write(line + "\n")
        self._worker.stdin.flush()
        answer = json.loads(self._worker.stdout.readline() or '{"error": "the worker has ended"}')
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["value"]

    async def create(self) -> tuple[float, float]:
        made, stopped = await self._ask("create")
        return made, stopped

    async def burst(self, count: int, at_once: int) -> float:
        return float(await self._ask("burst", count, at_once))

    async def open(self, sandboxes: int) -> None:
        await self._ask("open", sandboxes)

    async def exec(self) -> float:
        return float(await self._ask("exec"))

    async def rate(self, count: int, at_once: int) -> float:
        return float(await self._ask("rate", count, at_once))

    async def attack(self, argv: list[str], cores: float, memory_mb: int, pids: int) -> None:
        """A container more, with limits, whose process is `argv`; its output goes to nobody."""
        await self._ask("attack", argv, cores, memory_mb, pids)

    async def relent(self) -> None:
        """Ends what `attack` began."""
        await self._ask("relent")

    async def close(self) -> None:
        try:
            await self._ask("close")
        finally:
            if self._worker.stdin is not None:
                self._worker.stdin.close()
            await asyncio.to_thread(self._worker.wait, 30)


class Runtime:
    """The worker's side."""

    def __init__(self, program: str, rootfs: str) -> None:
        self._program = shutil.which(program) or program
        self._rootfs = rootfs
        self._folder = Path(tempfile.mkdtemp(prefix=f"bench-{program}-"))
        self._numbers = itertools.count(1)
        self._open: list[str] = []
        self._attackers: list[str] = []
        subprocess.run([self._program, "spec"], cwd=self._folder, check=True, timeout=30)
        self._spec = json.loads((self._folder / "config.json").read_text())
        self._spec["process"].update(terminal=False, args=["/bin/sleep", "3600"])
        self._spec["root"] = {"path": "rootfs", "readonly": False}

    def _call(self, *words: str) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, stream) for stream in (0, 1)]
        pid = os.posix_spawn(
            self._program,
            [self._program, "--root", str(self._folder / "run"), *words],
            os.environ,
            file_actions=actions,
        )
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(null)
        if status != 0:
            raise RuntimeError(f"{' '.join(words)}: exit {status}")

    def _make(self, argv: list[str] | None = None, resources: dict[str, Any] | None = None) -> str:
        """A container that runs `argv`, or waits for commands, on an overlay of its own."""
        name = f"dsecbench-{os.getpid()}-{next(self._numbers)}"
        bundle = self._folder / name
        for part in ("rootfs", "upper", "work"):
            (bundle / part).mkdir(parents=True)
        options = f"lowerdir={self._rootfs},upperdir={bundle}/upper,workdir={bundle}/work"
        mount("overlay", str(bundle / "rootfs"), "overlay", 0, options)
        linux = {**self._spec["linux"], "cgroupsPath": f"/{name}"}
        if resources is not None:
            linux["resources"] = {**linux.get("resources", {}), **resources}
        spec = {**self._spec, "linux": linux}
        if argv is not None:
            files = {"type": "RLIMIT_NOFILE", "soft": OPEN_FILES, "hard": OPEN_FILES}
            spec["process"] = {**spec["process"], "args": argv, "rlimits": [files]}
        (bundle / "config.json").write_text(json.dumps(spec))
        self._call("run", "-d", "-b", str(bundle), name)
        return name

    def _remove(self, name: str) -> None:
        self._call("delete", "-f", name)
        remove_groups(name)
        unmount(str(self._folder / name / "rootfs"))
        shutil.rmtree(self._folder / name)

    def create(self) -> tuple[float, float]:
        begin = time.perf_counter()
        name = self._make()
        self._call("exec", name, "/bin/true")
        made = time.perf_counter()
        self._remove(name)
        return (made - begin) * 1000, (time.perf_counter() - made) * 1000

    def burst(self, count: int, at_once: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda _: self.create(), range(count)))
        return count / (time.perf_counter() - begin)

    def open(self, sandboxes: int) -> None:
        self._open += [self._make() for _ in range(sandboxes)]

    def exec(self, number: int = 0) -> float:
        begin = time.perf_counter()
        self._call("exec", self._open[number % len(self._open)], "/bin/true")
        return (time.perf_counter() - begin) * 1000

    def rate(self, count: int, at_once: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self.exec, range(count)))
        return count / (time.perf_counter() - begin)

    def attack(self, argv: list[str], cores: float, memory_mb: int, pids: int) -> None:
        resources = {
            "cpu": {"quota": int(cores * 100_000), "period": 100_000},
            "memory": {"limit": memory_mb << 20},
            "pids": {"limit": pids},
        }
        self._attackers.append(self._make(argv, resources))

    def relent(self) -> None:
        while self._attackers:
            self._remove(self._attackers.pop())

    def close(self) -> None:
        self.relent()
        while self._open:
            self._remove(self._open.pop())

    def end(self) -> None:
        """Remove all, also what a failure left."""
        for folder in self._folder.glob("dsecbench-*"):
            subprocess.run(
                [self._program, "--root", str(self._folder / "run"), "delete", "-f", folder.name],
                check=False,
                timeout=30,
            )
            if os.path.ismount(folder / "rootfs"):
                unmount(str(folder / "rootfs"))
        shutil.rmtree(self._folder)


def remove_groups(name: str) -> None:
    """What the runtime leaves of a container's groups while its last processes end."""
    deadline = time.monotonic() + GROUPS_SECONDS
    for group in Path("/sys/fs/cgroup").glob(f"*/{name}"):
        while str(group.parent) != UNIFIED:  # hidden from the runtime: what lies there is no group
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # the kernel announces no such moment
                continue
            break


libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    checked(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def unmount(target: str) -> None:
    checked(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def main(program: str, rootfs: str) -> None:
    checked(libc.unshare(CLONE_NEWNS), "unshare")
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    if os.path.ismount(UNIFIED):
        unmount(UNIFIED)
    runtime = Runtime(program, rootfs)
    try:
        for line in sys.stdin:
            word, *arguments = json.loads(line)
            try:
                answer = {"value": getattr(runtime, word)(*arguments)}
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        runtime.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
