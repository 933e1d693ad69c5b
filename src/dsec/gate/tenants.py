"""The sandboxes that the gate serves: who speaks is told by the source address, which the fabric lets nobody forge."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from dsec.gate.limits import Bucket
from dsec.model.network import Address, Flow, Policy

__all__ = ["Tenant", "Tenants"]

_OWN = 16
"""Of each kind that a sandbox may have under way whatever the others have."""

OnFlow = Callable[[int, Flow, float], None]
"""Slot, flow (without its times) and its length in seconds."""


class Tenant:
    """One sandbox: its policy at this moment, what it holds open, and what it has used of its limits."""

    def __init__(self, address: Address, policy: Policy, on_flow: OnFlow) -> None:
        self.address = address
        self.policy = policy
        self.queries: Bucket | None = None
        self.answers: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self.names: OrderedDict[str, float] = OrderedDict()
        self.under_way: dict[str, int] = {}
        self._unlogged = 0
        self._log = Bucket(50, 200)
        self._on_flow = on_flow
        self._held: dict[asyncio.Task[Any], Callable[[Policy], bool]] = {}

    def log(self, flow: Flow, seconds: float = 0.0) -> None:
        """Reports a flow. Of a flood only the number is told, as a refusal `unlogged` with the number for its name."""
        if not self._log.take(asyncio.get_running_loop().time()):
            self._unlogged += 1
            return
        if self._unlogged:
            self._on_flow(
                self.address.slot, Flow(at=0, verdict="refused", reason="unlogged", name=str(self._unlogged)), 0.0
            )
            self._unlogged = 0
        self._on_flow(self.address.slot, flow, seconds)

    @contextmanager
    def held(self, allowed: Callable[[Policy], bool]) -> Iterator[None]:
        """The current task is cut within this context when a new policy does not satisfy `allowed`. Raises CancelledError then."""
        task = asyncio.current_task()
        assert task is not None
        outer = self._held.get(task)
        self._held[task] = allowed
        try:
            yield
        finally:
            del self._held[task]
            if outer is not None:
                self._held[task] = outer

    def judge(self, policy: Policy) -> list[asyncio.Task[Any]]:
        """Takes a new policy; cuts what it does not allow, and answers the tasks that are ending."""
        self.policy = policy
        self.answers.clear()
        return self._cut([task for task, allowed in self._held.items() if not allowed(policy)])

    def leave(self) -> list[asyncio.Task[Any]]:
        """Cuts all."""
        self.policy = Policy()
        return self._cut(list(self._held))

    @staticmethod
    def _cut(tasks: list[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
        for task in tasks:
            task.cancel()
        return tasks


class Tenants:
    """All of them, and the tasks that serve them, within one task group."""

    def __init__(
        self, group: asyncio.TaskGroup, on_flow: OnFlow, most: int, on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._group = group
        self._on_flow = on_flow
        self._on_failure = on_failure
        self._most = most
        self._tasks = 0
        self._by_slot: dict[int, Tenant] = {}
        self._by_address: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._by_slot)

    def at(self, source: str) -> Tenant | None:
        """Who speaks from this address."""
        return self._by_address.get(source)

    def peer(self, tenant: Tenant, alias: str) -> list[Tenant]:
        """Members of the tenant's group that carry the alias."""
        group = tenant.policy.group
        if not group:
            return []
        return [
            other for other in self._by_slot.values() if other.policy.group == group and alias in other.policy.aliases
        ]

    async def set(self, address: Address, policy: Policy) -> None:
        """Puts a policy in force; when it returns, connections that it does not allow are closed."""
        tenant = self._by_slot.get(address.slot)
        if tenant is not None and tenant.address == address:
            await _ended(tenant.judge(policy))
            return
        await self.drop(address.slot)
        tenant = Tenant(address, policy, self._on_flow)
        self._by_slot[address.slot] = tenant
        self._by_address[address.v4] = self._by_address[address.v6] = tenant

    async def drop(self, slot: int) -> None:
        """Forgets a sandbox and closes what it holds; any number of times."""
        tenant = self._by_slot.pop(slot, None)
        if tenant is None:
            return
        del self._by_address[tenant.address.v4], self._by_address[tenant.address.v6]
        await _ended(tenant.leave())

    def serve(self, tenant: Tenant, kind: str, most: int, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Runs `work` for the tenant unless `most` of this kind, or too many of all, are under way: then those who have few are served still.
        A failure is reported, and ends it alone."""
        count = tenant.under_way.get(kind, 0)
        if count >= most or (self._tasks >= self._most and count >= _OWN):
            return False
        tenant.under_way[kind] = count + 1
        self._tasks += 1

        async def guarded() -> None:
            try:
                await work()
            except OSError:
                pass  # either side went away
            except Exception as error:  # noqa: BLE001 - the others go on; the failure is reported
                self._on_failure(kind, error)

        def done(_: asyncio.Task[None]) -> None:
            tenant.under_way[kind] -= 1
            self._tasks -= 1

        self._group.create_task(guarded()).add_done_callback(done)
        return True


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
