"""Sandboxes as containers of our own launcher: cgroups, namespaces and an overlay on the node's pool."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from errno import EBUSY, ENODEV, ESRCH
from threading import Lock
from typing import TypeVar

from dsec.edge.backends.cell import cell_plan, end_all, is_first, on_cpus
from dsec.edge.backends.changes import frozen_changes
from dsec.edge.backends.handle import HANDLE_VERSION, CellState, encode, failure_of, opened
from dsec.edge.backends.kills import Kills
from dsec.edge.backends.settings import ContainerSettings
from dsec.kernel.cgroup import Cgroups, GroupLimits, choose_cgroups
from dsec.kernel.errors import KernelError, kernel_op
from dsec.kernel.launch import Launched, Launcher
from dsec.kernel.namespaces import NamespacePool
from dsec.kernel.pool import Pool
from dsec.kernel.services import node_name
from dsec.kernel.sights import Sights
from dsec.kernel.uids import Slots, agent_id, slot_of_agent
from dsec.model.aether import VERSION, HelloReply, HelloRequest
from dsec.model.errors import DSecError
from dsec.model.network import Link
from dsec.model.outcome import End
from dsec.model.plan import Aftermath, Capabilities, Handle, Life, Plan, Usage
from dsec.ports.agent import Agent
from dsec.ports.backend import BackendFailure, Started, TellKills
from dsec.ports.clock import Clock
from dsec.ports.network import Fabric

__all__ = ["Container"]

_T = TypeVar("_T")
_BACKLOG = 512
_LOOK = 5.0
"""Seconds between two looks at whether the pool can be written."""

_log = logging.getLogger("dsec.edge")


class _Alive:
    """A sandbox whose aether runs: the descriptor that says when it ends, and what was learned then."""

    def __init__(self, pid: int, pidfd: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.ended: asyncio.Future[tuple[End, str]] = loop.create_future()
        self.dead = asyncio.Event()


class Container:
    """Backend of kind `container`. `connect`: makes the agent's client of a socket path. `fabric`: links sandboxes; opened and
    closed by who gives it."""

    def __init__(
        self, settings: ContainerSettings, clock: Clock, connect: Callable[[str], Agent], fabric: Fabric | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._connect = connect
        self._fabric = fabric
        self._run = settings.state / "run"
        self._groups: Cgroups = choose_cgroups(node_name(settings.state))
        self._kills = Kills(self._groups, clock)
        self._pool = Pool(
            settings.state, device=settings.pool_device, size=settings.pool_bytes, reserve=settings.pool_reserve
        )
        self._slots = Slots(str(settings.state))
        self._namespaces = NamespacePool(self._slots, low=settings.ahead_low, high=settings.ahead_high, linker=fabric)
        # In the pool, so that a mount of them names no directory of the host.
        self._sights = Sights(self._pool.root / "sights")
        self._launcher: Launcher | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._run_fd = -1
        self._alive: dict[str, _Alive] = {}
        self._starting: dict[str, asyncio.Future[None]] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._mending = Lock()
        self._frozen = 0

    @property
    def pool(self) -> Pool:
        """The node's pool; volumes are in it too."""
        return self._pool

    @property
    def namespaces_ready(self) -> int:
        """Sets of namespaces that the next creates find ready."""
        return self._namespaces.ready

    @property
    def namespaces_failing(self) -> bool:
        """No namespaces could be made ahead when that was last tried."""
        return self._namespaces.failure is not None

    @property
    def offers(self) -> Capabilities:
        later = "not built yet for containers"
        return Capabilities(
            backend="container",
            available=True,
            network=self._fabric is not None,
            why_not={
                "pause": later,
                "snapshot": later,
                "fork": later,
                "show": "a container has no screen",
            },
        )

    async def open(self) -> None:
        """Makes what all sandboxes of this node share. Raises BackendFailure."""
        self._workers = ThreadPoolExecutor(self._settings.workers, thread_name_prefix="dsec-cell")
        await self._work(self._open)
        try:
            self._kills.open()
        except KernelError as error:
            raise failure_of(error, Aftermath.UNTOUCHED) from error
        self._look_at_pool()

    def _open(self) -> None:
        with kernel_op("mkdir", str(self._run)):
            self._run.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._run_fd = os.open(self._run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._groups.open()
        if self._pool.broken():
            end_all(self._groups, self._settings.stop_seconds)
            self._pool.mend()
        self._pool.open()
        self._pool.thaw_all()
        self._slots.open()
        for name in self._groups.names():
            # Sandboxes that outlived their server keep their ids, whether or not a journal still knows them.
            owner = self._groups.owner(name)
            slot = None if owner is None else slot_of_agent(owner)
            if slot is not None:
                self._slots.hold(slot, name)
        self._launcher = Launcher(self._settings.program, self._settings.filter, self._groups.agent_tasks)
        self._launcher.open(self._run)
        self._sights.open()
        self._namespaces.open()

    async def close(self) -> None:
        """Lets go of everything but the sandboxes that still run, which a later server adopts. Raises BackendFailure."""
        loop = asyncio.get_running_loop()
        if self._next_look is not None:
            self._next_look.cancel()
        for alive in self._alive.values():
            loop.remove_reader(alive.pidfd)
            os.close(alive.pidfd)
        running = bool(self._alive)
        self._alive.clear()
        self._kills.close()
        await self._work(self._close, running)
        if self._workers is not None:
            self._workers.shutdown()

    def _close(self, running: bool) -> None:
        self._namespaces.close()
        if self._launcher is not None:
            self._launcher.close()
        self._sights.close()
        self._groups.close()
        self._slots.close()
        if not running:
            self._pool.close()
        if self._run_fd >= 0:
            os.close(self._run_fd)
            self._run_fd = -1

    def reserve(self, plan: Plan) -> Handle:
        """Claims a slot of ids, and with it a set of namespaces if one is ready."""
        try:
            full = self._pool.shortage(self._settings.reserve_mb << 20)
            if full:
                raise BackendFailure(full, aftermath=Aftermath.UNTOUCHED, end=End.CAPACITY)
            slot = self._namespaces.take_slot(plan.sandbox_id, linked=plan.link is not None)
        except KernelError as error:
            raise failure_of(error, Aftermath.UNTOUCHED) from error
        state = CellState(HANDLE_VERSION, plan.sandbox_id, slot, plan.link is not None)
        return Handle(backend="container", state=encode(state))

    def slot(self, handle: Handle) -> int | None:
        state = opened(handle)
        return state.slot if state.linked else None

    async def start(self, plan: Plan, handle: Handle) -> Started:
        state = opened(handle)
        loop = asyncio.get_running_loop()
        started = loop.create_future()
        self._starting[state.name] = started
        try:
            # A cancelled start still finishes, so that stop() finds the whole of it.
            phases = await asyncio.shield(self._begin(plan, state, loop, started))
            begun = self._clock.monotonic()
            await self._greet(handle)
            phases["agent"] = self._clock.monotonic() - begun
        except BackendFailure as failure:
            raise await self._undone(handle, failure) from failure
        return Started(phases)

    def _begin(
        self, plan: Plan, state: CellState, loop: asyncio.AbstractEventLoop, started: asyncio.Future[None]
    ) -> asyncio.Future[dict[str, float]]:
        if self._workers is None:
            raise BackendFailure("the backend is not open", aftermath=Aftermath.UNTOUCHED, end=End.INTERNAL)
        job = loop.run_in_executor(self._workers, self._start, plan, state)
        answer: asyncio.Future[dict[str, float]] = loop.create_future()

        def finished(done: asyncio.Future[tuple[Launched, dict[str, float]]]) -> None:
            error = done.exception()
            if error is None:
                launched, phases = done.result()
                self._watch(state.name, launched.pid, launched.pidfd)
                answer.set_result(phases)
            elif isinstance(error, KernelError):
                answer.set_exception(failure_of(error, Aftermath.BROKEN))
            else:
                answer.set_exception(error)
            self._starting.pop(state.name, None)
            started.set_result(None)

        job.add_done_callback(finished)
        return answer

    def _start(self, plan: Plan, state: CellState) -> tuple[Launched, dict[str, float]]:
        """Everything up to a running aether, in a worker thread. What fails midway is left for stop()."""
        now, name, launcher = self._clock.monotonic, state.name, self._launcher
        if launcher is None:
            raise KernelError("launch", "not open", ESRCH)
        begun = now()
        namespaces = self._namespaces.namespaces(state.slot, name)
        try:
            joined = now()
            if plan.link is not None:
                self._link(plan.link, state.slot, namespaces.net)
            wired = now()
            limits = GroupLimits(plan.limits.memory_bytes, plan.limits.cpu_cores, plan.limits.pids, plan.identity.qos)
            groups = self._groups.create(name, limits, agent_id(state.slot))
            try:
                self._kills.watch(name)
                grouped = now()
                writable = self._pool.create(name, plan.limits.disk_bytes)
                written = now()
                with self._listen(name) as listener:
                    views = self._sights.of(plan.limits.memory_bytes, plan.limits.cpu_cores)
                    cell = cell_plan(plan, writable, views, listener.fileno(), self._addresses(state))
                    with on_cpus(state.slot, plan.limits.cpu_cores, self._settings.cpu_affinity):
                        launched = launcher.launch(cell, namespaces, groups)
            finally:
                groups.close()
        finally:
            namespaces.close()
        phases = {
            "namespaces": joined - begun,
            "groups": grouped - wired,
            "rootfs": written - grouped + launched.rootfs,
            "launch": now() - written - launched.rootfs,
        }
        if plan.link is not None:
            phases["link"] = wired - joined
        return launched, phases

    def _look_at_pool(self) -> None:
        """Ends all sandboxes of a pool that became read-only: nothing that they write is kept, and while they run it stays so."""
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(_LOOK, self._look_at_pool)
        if not self._pool.broken():
            return
        for alive in self._alive.values():
            if not alive.ended.done():
                alive.ended.set_result((End.CAPACITY, "the disk under the pool of writable layers was full"))
        if not self._alive and not self._starting and self._workers is not None:
            self._workers.submit(self._mend).add_done_callback(_told)

    def _mend(self) -> None:
        with self._mending:
            if self._alive or self._starting:
                raise KernelError("mount", str(self._pool.root), EBUSY)
            self._pool.mend()
            self._sights.open()

    def _link(self, link: Link, slot: int, netns: int) -> None:
        """A device for the sandbox and its policy, before any of its processes exists."""
        if self._fabric is None:
            raise KernelError("link", "no fabric", ENODEV)
        self._fabric.link(slot, netns)
        self._fabric.apply(slot, link.policy.allows, link.policy.limits, link.group)

    def _addresses(self, state: CellState) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A linked sandbox's own addresses, and those of its resolver."""
        if self._fabric is None or not state.linked:
            return (), ()
        own = self._fabric.address(state.slot)
        return (own.v4, own.v6), (self._fabric.gateway_v4, self._fabric.gateway_v6)

    def _listen(self, name: str) -> socket.socket:
        with kernel_op("bind", name):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                listener.bind(self._address(name))
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
        return listener

    def _address(self, name: str) -> str:
        # Through a descriptor of the directory, since a socket's path ends at 107 bytes.
        return f"/proc/self/fd/{self._run_fd}/{name}"

    async def _greet(self, handle: Handle) -> None:
        try:
            async with asyncio.timeout(self._settings.answer_seconds):
                reply = await self.agent(handle).call(HelloRequest(version=VERSION))
        except (DSecError, OSError, TimeoutError) as error:
            detail = f"aether did not answer: {error or type(error).__name__}"
            raise BackendFailure(detail, aftermath=Aftermath.BROKEN, end=End.RUNTIME) from error
        if not isinstance(reply, HelloReply) or reply.version != VERSION:
            raise BackendFailure("aether speaks another version", aftermath=Aftermath.BROKEN, end=End.RUNTIME)

    async def _undone(self, handle: Handle, failure: BackendFailure) -> BackendFailure:
        try:
            await self.stop(handle)
        except BackendFailure as worse:
            detail = f"{failure.detail}; then: {worse.detail}"
            return BackendFailure(detail, aftermath=Aftermath.BROKEN, end=failure.end)
        return BackendFailure(failure.detail, aftermath=Aftermath.UNDONE, end=failure.end)

    async def adopt(self, handle: Handle) -> Life:
        state = opened(handle)
        if state.name in self._alive:
            return Life.ALIVE
        found = await self._work(self._find, state)
        held = self._namespaces.hold(state.slot, state.name)
        if found is not None and held and self._socket_exists(state.name):
            self._watch(state.name, *found)
            await self._work(self._kills.watch, state.name)
            return Life.ALIVE
        if found is not None:
            os.close(found[1])
        if found is None and not self._leftovers(state.name):
            self._namespaces.give_back(state.slot, state.name, linked=state.linked)
            return Life.GONE
        return Life.BROKEN

    def _find(self, state: CellState) -> tuple[int, int] | None:
        """Pid and descriptor of the sandbox's aether, asked of the kernel."""
        for pid in self._groups.processes(state.name):
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            # Still in the group after the descriptor was opened: the number was not taken by another meanwhile.
            if is_first(pid) and pid in self._groups.processes(state.name):
                return pid, pidfd
            os.close(pidfd)
        return None

    def _socket_exists(self, name: str) -> bool:
        return (self._run / name).is_socket()

    def _leftovers(self, name: str) -> bool:
        return self._groups.owner(name) is not None or self._pool.exists(name) or self._socket_exists(name)

    def agent(self, handle: Handle) -> Agent:
        return self._connect(self._address(opened(handle).name))

    async def wait_end(self, handle: Handle) -> tuple[End, str]:
        alive = self._alive.get(opened(handle).name)
        if alive is None:
            return End.RUNTIME, "the sandbox does not run"
        return await asyncio.shield(alive.ended)

    def _watch(self, name: str, pid: int, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        alive = self._alive[name] = _Alive(pid, pidfd, loop)
        loop.add_reader(pidfd, self._ended, name, alive)

    def _ended(self, name: str, alive: _Alive) -> None:
        asyncio.get_running_loop().remove_reader(alive.pidfd)
        alive.dead.set()
        how = "its process is gone"
        # An adopted sandbox is not our child: its status went to whoever reaps on this host.
        with suppress(ChildProcessError):
            status = os.waitid(os.P_PIDFD, alive.pidfd, os.WEXITED | os.WNOHANG)
            if status is not None:
                how = f"status {status.si_status}" if status.si_code == os.CLD_EXITED else f"signal {status.si_status}"
        if not alive.ended.done():
            alive.ended.set_result((End.RUNTIME, f"aether ended: {how}"))

    def tell_kills(self, handle: Handle, tell: TellKills) -> None:
        self._kills.tell(opened(handle).name, tell)

    async def stop(self, handle: Handle) -> None:
        state = opened(handle)
        starting = self._starting.get(state.name)
        if starting is not None:
            await asyncio.shield(starting)
        alive = self._alive.get(state.name)
        try:
            if alive is None and (found := self._find(state)) is not None:
                self._watch(state.name, *found)
                alive = self._alive[state.name]
            if alive is not None:
                await self._kill(state, alive)
            self._kills.last(state.name)
            await self._work(self._remove, state)
        except KernelError as error:
            raise failure_of(error, Aftermath.BROKEN) from error
        self._namespaces.give_back(state.slot, state.name, linked=state.linked)

    async def _kill(self, state: CellState, alive: _Alive) -> None:
        if not alive.ended.done():
            alive.ended.set_result((End.STOPPED, "stopped"))
        if not alive.dead.is_set():
            self._groups.kill(state.name)
            # The first process of a PID namespace takes all others with it, whatever their groups.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(alive.pidfd, signal.SIGKILL)
            try:
                async with asyncio.timeout(self._settings.stop_seconds):
                    await alive.dead.wait()
            except TimeoutError as error:
                detail = f"process {alive.pid} does not end"
                raise BackendFailure(detail, aftermath=Aftermath.BROKEN, end=End.RUNTIME) from error
        if self._alive.get(state.name) is alive:
            del self._alive[state.name]
            os.close(alive.pidfd)

    def _remove(self, state: CellState) -> None:
        if state.linked and self._fabric is not None:
            self._fabric.cut(state.slot)
        self._groups.remove(state.name)
        try:
            self._pool.delete(state.name)
        except KernelError:
            if not self._pool.broken():
                raise
            self._mend()
            self._pool.delete(state.name)
        with kernel_op("unlink", state.name), suppress(FileNotFoundError):
            os.unlink(self._run / state.name)

    async def usage(self, handle: Handle) -> Usage:
        name = opened(handle).name
        return await self._work(self._usage, name)

    def _usage(self, name: str) -> Usage:
        groups, disk = self._groups.usage(name), self._pool.used(name)
        return Usage(
            memory_bytes=groups.memory,
            memory_peak_bytes=groups.memory_peak,
            memory_limit_bytes=groups.memory_limit,
            cpu_seconds=groups.cpu_seconds,
            pids=groups.pids,
            disk_bytes=disk[0] if disk else None,
            disk_limit_bytes=disk[1] if disk else None,
            oom_kills=groups.oom_kills,
            pids_refused=groups.pids_refused,
        )

    def changes(self, handle: Handle) -> AbstractAsyncContextManager[str]:
        if self._workers is None:
            raise BackendFailure("the backend is not open", aftermath=Aftermath.UNTOUCHED, end=End.INTERNAL)
        name = opened(handle).name
        self._frozen += 1
        return frozen_changes(self._pool, name, f"{name}.{self._frozen}", self._workers)

    async def _work(self, job: Callable[..., _T], *args: object) -> _T:
        if self._workers is None:
            raise BackendFailure("the backend is not open", aftermath=Aftermath.UNTOUCHED, end=End.INTERNAL)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, job, *args)
        except KernelError as error:
            raise failure_of(error, Aftermath.BROKEN) from error


def _told(done: Future[None]) -> None:
    error = done.exception()
    if error is None:
        _log.warning("the pool of writable layers was mounted anew")
    else:
        _log.error("the pool of writable layers is read-only and cannot be mounted anew: %s", error)
