"""Remembers what a node was asked and what it answered, and holds it to that after it was killed and came back.

Every operation carries a request_id, and every command leaves a mark in its sandbox: so a second run of one shows. A sandbox
also has a process that counts without end; who reads it notes how far he came, and must find the next byte there afterwards.
"""

import asyncio
import hashlib
import itertools
import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import dsec
from dsec.model.errors import DSecError, Interrupted, NotFound, SandboxLost
from dsec.model.outcome import End, ExecResult
from dsec.model.views import SandboxState
from dsec.sdk._async.process import Process

__all__ = ["Faults", "Subject", "Witness"]

PATIENCE = 20.0
COUNT = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.02; done"
MARKS = "/tmp/marks"
ENDS_BY_TIME = (End.IDLE, End.EXPIRED)


class Faults(AssertionError):
    """What the node did otherwise than it had said; one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class Subject:
    """One sandbox: what was asked of it, and what was acknowledged. `whole`: all of its creation
    was. `busy`: somebody works in it. `ends`: Unix seconds at which its time is over."""

    def __init__(self, key: str, args: dsec.DSecContainerRunArgs) -> None:
        self.key = key
        self.args = args
        self.box: dsec.Sandbox | None = None
        self.whole = self.busy = self.stopping = False
        self.ends: float | None = None
        self.counter = ""
        self.offset = 0
        self.pids: dict[str, int | None] = {}
        self.ended: set[str] = set()
        self.commands: dict[str, ExecResult | None] = {}
        self.files: dict[str, tuple[bytes, bool]] = {}


def counted(start: int, length: int) -> bytes:
    """Bytes `start` to `start + length` of what the counter writes."""
    first, digits, at = 0, 1, 0
    while start >= at + (many := 10**digits - first) * (digits + 1):
        at += many * (digits + 1)
        first, digits = 10**digits, digits + 1
    number = first + (start - at) // (digits + 1)
    skipped = (start - at) % (digits + 1)
    made = bytearray()
    while len(made) < skipped + length:
        made += b"%d\n" % number
        number += 1
    return bytes(made[skipped : skipped + length])


class Witness:
    """Of the node on `state`. `seed`: of all that is drawn. `now`: Unix seconds. Any operation raises what the SDK raises;
    what it had asked is remembered."""

    def __init__(self, state: Path, image: str, seed: int, now: Callable[[], float]) -> None:
        self.state = state
        self.random = random.Random(seed)
        self.subjects: dict[str, Subject] = {}
        self.jobs: list[str] = []
        self._image = image
        self._now = now
        self._names = itertools.count()
        self._seed = seed
        self._faults: list[str] = []

    def name(self, kind: str) -> str:
        """A request_id."""
        return f"{kind}-{self._seed}-{next(self._names)}"

    # -- asking ------------------------------------------------------------------------------------------------------

    async def create(self, client: dsec.DSecClient, **more: object) -> Subject:
        """A sandbox with a counter in it. `more`: arguments of it, `ttl_absolute` for one whose time ends."""
        key = self.name("box")
        args = dsec.DSecContainerRunArgs(container_image=self._image, memory_limit_mb=64, job=key, **more)  # type: ignore[arg-type]
        subject = self.subjects[key] = Subject(key, args)
        await self._made(subject, client)
        return subject

    async def _made(self, subject: Subject, client: dsec.DSecClient) -> None:
        box = await client.run_container(subject.args, request_id=subject.key)
        subject.box = box
        subject.ends = (await box.info()).absolute_deadline
        if not subject.counter:
            subject.counter = self.name("count")
            await self.start(subject, COUNT, subject.counter)
        subject.whole = True

    async def rejoin(self, client: dsec.DSecClient) -> None:
        """Goes on with another client."""
        for subject in self.subjects.values():
            if subject.box is not None:
                subject.box = await client.get(subject.box.id)

    def box(self, subject: Subject) -> dsec.Sandbox:
        """Its sandbox, which was acknowledged."""
        if subject.box is None:
            raise RuntimeError("not acknowledged")
        return subject.box

    async def run(self, subject: Subject) -> None:
        """A command that marks its sandbox."""
        key = self.name("run")
        subject.commands[key] = None
        subject.commands[key] = await self._command(subject, key)

    async def _command(self, subject: Subject, key: str) -> ExecResult:
        return await self.box(subject).run_shell(f"echo {key} >> {MARKS}; echo {key}", request_id=key)

    async def start(self, subject: Subject, command: str, key: str) -> Process:
        """A process that is there until it is ended."""
        subject.pids[key] = None
        process = await self.box(subject).start(["/bin/sh", "-c", command], request_id=key)
        subject.pids[key] = process.view.pid
        return process

    async def end(self, subject: Subject, key: str) -> None:
        """Ends a started process."""
        subject.ended.add(key)
        await (await self.box(subject).attach(key)).stop()

    async def write(self, subject: Subject) -> None:
        """A file's content, the first or another one."""
        path = f"/tmp/file-{self.random.randrange(3)}"
        data = self.random.randbytes(self.random.choice((10, 3000, 200_000)))
        before = subject.files.get(path, (b"", False))
        subject.files[path] = (data, False)
        subject.files[path + " before"] = before
        await self.box(subject).files.write(path, data, request_id=self.name("write"))
        subject.files[path] = (data, True)

    async def stop(self, subject: Subject) -> None:
        """Ends a sandbox."""
        subject.stopping = True
        await self.box(subject).stop()
        del self.subjects[subject.key]

    async def settled(self, client: dsec.DSecClient) -> None:
        """Waits until what the kernel has, IAM holds and the journal tells is what the server says. Raises Faults."""
        self._faults = []
        await self._until("the kernel, IAM and the journal agree", lambda: self._agree(client))
        if self._faults:
            raise Faults(self._faults)

    async def read(self, subject: Subject) -> None:
        """Reads the counter on, until cancelled. Raises Faults for a byte that is not the next."""
        process = await self.box(subject).attach(subject.counter, subject.offset)
        async with aclosing(process.stream()) as pieces:
            async for piece in pieces:
                if piece.lost or piece.offset != subject.offset:
                    raise Faults(
                        [f"{subject.key}: wanted byte {subject.offset}, got {piece.offset} (lost {piece.lost})"]
                    )
                if piece.data != counted(subject.offset, len(piece.data)):
                    raise Faults([f"{subject.key}: at {subject.offset} came {piece.data[:40]!r}"])
                subject.offset += len(piece.data)

    # -- holding it to that ------------------------------------------------------------------------------------------

    async def verify(self, client: dsec.DSecClient) -> None:
        """After the node has come back. Raises Faults."""
        self._faults = []
        await self.rejoin(client)
        for job in self.jobs:  # begun and not acknowledged
            await client.stop_many(job=job)
        self.jobs.clear()
        await asyncio.gather(*(self._verify(client, subject) for subject in list(self.subjects.values())))
        await self._until("the kernel, IAM and the journal agree", lambda: self._agree(client))
        if self._faults:
            raise Faults(self._faults)

    async def _verify(self, client: dsec.DSecClient, subject: Subject) -> None:
        subject.busy = False
        try:
            if not subject.whole or subject.stopping:
                await self._settle(client, subject)
            elif self._over(subject):
                await self._until(f"{subject.key}: ends by its time", lambda: self._ended(subject))
            else:
                await self._lives(subject)
        except SandboxLost as error:
            if not self._over(subject):  # else `_agree` looks how it ended
                self._faults.append(f"{subject.key}: {error!r}")
        except (DSecError, Faults) as error:
            self._faults.append(f"{subject.key}: {error!r}")

    def _over(self, subject: Subject) -> bool:
        return subject.ends is not None and self._now() >= subject.ends

    async def _settle(self, client: dsec.DSecClient, subject: Subject) -> None:
        """A creation or a stop whose answer never came: asked again, it comes to one end."""
        if subject.stopping:
            await self.stop(subject)
            return
        await self._made(subject, client)
        living = await client.sandboxes(job=subject.key, state="running")
        if [box.id for box in living] != [self.box(subject).id] and not self._over(subject):
            self._faults.append(f"{subject.key}: {len(living)} sandboxes of one creation")
        if not self._over(subject):
            await self._lives(subject)

    async def _ended(self, subject: Subject) -> str:
        view = await self.box(subject).info()
        if view.state is not SandboxState.GONE:
            return f"it is {view.state}"
        if view.end is None or view.end.end not in ENDS_BY_TIME:
            self._faults.append(f"{subject.key}: its time was over, but it ended by {view.end}")
        self.subjects.pop(subject.key, None)
        return ""

    async def _lives(self, subject: Subject) -> None:
        box = self.box(subject)
        view = await box.info()
        if view.state is not SandboxState.RUNNING:
            raise SandboxLost(f"it is {view.state}: {view.end}")
        await self._processes(subject)
        await self._commands(subject)
        await self._files(subject)
        await self._goes_on(subject)

    async def _processes(self, subject: Subject) -> None:
        found = {process.id: process for process in await self.box(subject).processes()}
        for key, pid in list(subject.pids.items()):
            there = found.get(key)
            if key in subject.ended:
                continue
            if pid is None:
                await self._started(subject, key)
            elif there is None or there.pid != pid or not there.running:
                self._faults.append(f"{subject.key}: process {key} was {pid}, now {there}")

    async def _started(self, subject: Subject, key: str) -> None:
        """A start without an answer: asked again, it is the one process, or it is known that nobody knows."""
        command = COUNT if key == subject.counter else "sleep 1000"
        try:
            await self.start(subject, command, key)
        except Interrupted:
            if key in {process.id for process in await self.box(subject).processes()}:
                self._faults.append(f"{subject.key}: process {key} runs, but its start is told as interrupted")
            del subject.pids[key]
            if key == subject.counter:
                subject.counter = self.name("count")
                await self.start(subject, COUNT, subject.counter)

    async def _commands(self, subject: Subject) -> None:
        for key, known in list(subject.commands.items()):
            try:
                again = await self._command(subject, key)
            except Interrupted:
                if known is not None:
                    self._faults.append(f"{subject.key}: the acknowledged {key} is told as interrupted")
                continue
            if known is not None and again != known:
                self._faults.append(f"{subject.key}: {key} was {known}, is {again}")
            subject.commands[key] = again
        if not subject.commands:
            return
        marks = (await self.box(subject).run_shell(f"cat {MARKS} || true")).text.split()
        for key, known in list(subject.commands.items()):
            ran = marks.count(key)
            if ran > 1 or (known is not None and ran != 1):
                self._faults.append(f"{subject.key}: {key} ran {ran} times")
        subject.commands = dict(list(subject.commands.items())[-5:])

    async def _files(self, subject: Subject) -> None:
        for path, (data, acknowledged) in list(subject.files.items()):
            if path.endswith(" before"):
                continue
            try:
                found = await self.box(subject).files.read(path)
            except NotFound:
                found = b""
            before, _ = subject.files.get(path + " before", (b"", False))
            if found != data and (acknowledged or found != before):
                self._faults.append(f"{subject.key}: {path} has {len(found)} bytes of neither content")
            subject.files[path] = (found, bool(found))

    async def _goes_on(self, subject: Subject) -> None:
        """The counter is read on from the byte where reading broke off."""
        wanted = subject.offset + 1
        reading = asyncio.get_running_loop().create_task(self.read(subject))
        try:
            async with asyncio.timeout(PATIENCE):
                while subject.offset < wanted and not reading.done():
                    await asyncio.wait((reading,), timeout=0.01)
        except TimeoutError:
            self._faults.append(f"{subject.key}: the counter stands at {subject.offset}")
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _until(self, what: str, look: Callable[[], Awaitable[str]]) -> None:
        """Looks again until there is nothing to object to."""
        said = ""
        try:
            async with asyncio.timeout(PATIENCE):
                while said := await look():  # noqa: ASYNC110 - ends by time and undoing are nobody's to announce
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self._faults.append(f"{what}: not after {PATIENCE:.0f} s: {said}")

    async def _agree(self, client: dsec.DSecClient) -> str:
        """What the kernel has, IAM holds and the journal tells is what the server says; else the difference."""
        for state in (SandboxState.STARTING, SandboxState.STOPPING):
            if moving := await client.sandboxes(state=state):
                return f"{len(moving)} are {state}"
        for subject in [each for each in self.subjects.values() if self._over(each)]:
            if said := await self._ended(subject):
                return f"{subject.key}: {said}"
        living = {box.id for box in await client.sandboxes(state=SandboxState.RUNNING)}
        ours = {subject.box.id for subject in self.subjects.values() if subject.box is not None}
        kept = self.traces() | {"asked for": ours}
        wrong = [f"{name}: {len(ids - living)} too many, {len(living - ids)} missing" for name, ids in kept.items()]
        return ", ".join(text for text in wrong if not text.endswith(": 0 too many, 0 missing"))

    def traces(self) -> dict[str, set[str]]:
        """Names of sandboxes in each place that keeps something of them."""
        found = self.in_kernel()
        found["reservations"] = _column(self.state / "iam.db", "SELECT sandbox_id FROM reservations")
        found["journal"] = _column(self.state / "journal.db", "SELECT id FROM sandboxes WHERE gone IS NULL")
        return found

    def in_kernel(self) -> dict[str, set[str]]:
        """Those of the kernel."""
        node = "dsec-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        found = {"subvolumes": _names(self.state / "pool/cells"), "sockets": _names(self.state / "run")}
        for tree in Path("/sys/fs/cgroup").glob(
            f"**/{node}" if (Path("/sys/fs/cgroup/cgroup.controllers")).exists() else f"*/{node}"
        ):
            found[str(tree)] = {entry.name for entry in tree.iterdir() if entry.is_dir()} - {"agents"}
        return found


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _column(path: Path, query: str) -> set[str]:
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
    try:
        return {row[0] for row in database.execute(query)}
    finally:
        database.close()
