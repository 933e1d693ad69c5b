"""Honest fakes of the fabric and the gate: they keep what they were told, so that a test can see what is in force.

They outlive an edge as the kernel's maps do: give the same fabric to the next one.
"""

import os
from collections.abc import Sequence
from errno import EIO, ENOENT

from dsec.kernel.errors import KernelError
from dsec.model.errors import Unavailable
from dsec.model.network import Address, Allow, Flow, NameRule, NetLimits, NetworkAnswer, Policy
from dsec.ports.network import OnAnswer, OnFlow, SlotFlow
from dsec.rules.netpolicy import rule_for

__all__ = ["FakeFabric", "FakeGate"]


class FakeFabric:
    """Implements ports.network.Fabric. `failures`: calls of `apply` that will fail, leaving nothing allowed."""

    gateway_v4 = "100.96.0.1"
    gateway_v6 = "fd5e:c000::1"

    def __init__(self) -> None:
        self.views: dict[int, tuple[Allow, ...]] = {}
        self.permits: dict[int, list[Allow]] = {}
        self.groups: dict[int, int] = {}
        self.limits: dict[int, NetLimits] = {}
        self.failures = 0
        self.broken = ""
        self._events: list[SlotFlow] = []
        self._ended: list[SlotFlow] = []
        self._pipe = (-1, -1)

    def open(self) -> None:
        """Fails where `broken` says so."""
        if self.broken:
            raise KernelError("bpf", self.broken, EIO)
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self, keep: bool) -> None:
        """What is linked stays where it is to be kept."""
        for fd in self._pipe:
            if fd >= 0:
                os.close(fd)
        self._pipe = (-1, -1)
        if not keep:
            self.views.clear()

    def prepare(self, slot: int, netns: int) -> None:
        """Nothing: `link` makes it then."""

    def link(self, slot: int, netns: int) -> None:
        """Nothing is allowed yet."""
        self.views[slot] = ()

    def adopt(self, slot: int) -> bool:
        """True where it is linked."""
        return slot in self.views

    def linked(self) -> frozenset[int]:
        """All slots that are there."""
        return frozenset(self.views)

    def cut(self, slot: int) -> None:
        """Forgets a slot."""
        for kept in (self.views, self.permits, self.groups, self.limits):
            kept.pop(slot, None)

    def unlink(self, *slots: int) -> None:
        """The same."""
        for slot in slots:
            self.cut(slot)

    def address(self, slot: int) -> Address:
        """By the slot's number."""
        return Address(slot=slot, v4=f"100.96.1.{slot}", v6=f"fd5e:c000:1::{slot:x}")

    def apply(
        self,
        slot: int,
        allows: Sequence[Allow],
        limits: NetLimits,
        group: int,
        answers: Sequence[tuple[Allow, float]] = (),
    ) -> None:
        """Fails closed as planted."""
        if slot not in self.views:
            raise KernelError("apply", str(slot), ENOENT)
        if self.failures:
            self.failures -= 1
            self.views[slot], self.permits[slot] = (), []
            raise KernelError("bpf", "map full", EIO)
        self.views[slot], self.permits[slot] = tuple(allows), [allow for allow, _ in answers]
        self.groups[slot], self.limits[slot] = group, limits

    def permit(self, slot: int, allows: Sequence[Allow], seconds: float) -> None:
        """Adds for ever: this fake has no clock."""
        self.permits.setdefault(slot, []).extend(allows)

    def allowed(self, slot: int) -> tuple[Allow, ...]:
        """What is in force."""
        return (*self.views[slot], *self.permits.get(slot, ()))

    def tell(self, slot: int, flow: Flow, *, ended: bool = False) -> None:
        """A flow that the next drain or sweep gives."""
        (self._ended if ended else self._events).append(SlotFlow(slot, flow))

    def events_fd(self) -> int:
        """Never readable: tests read the log, which drains."""
        return self._pipe[0]

    def drain(self) -> list[SlotFlow]:
        """What was told."""
        found, self._events = self._events, []
        return found

    def lost(self) -> int:
        """None are."""
        return 0

    def sweep(self) -> list[SlotFlow]:
        """What was told as ended."""
        found, self._ended = self._ended, []
        return found

    def socket(self, family: int, kind: int, port: int, transparent: bool) -> int:
        """There is none."""
        raise KernelError("socket", str(port), ENOENT)


class FakeGate:
    """Implements ports.network.Gate. `failures`: calls of `set_policy` that will fail."""

    on_answer: OnAnswer
    on_flow: OnFlow

    def __init__(self) -> None:
        self.policies: dict[int, Policy] = {}
        self.failures = 0

    async def open(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Its memory ends with it."""
        self.policies.clear()

    async def set_policy(self, slot: int, address: Address, policy: Policy) -> None:
        """Fails as planted, and then answers nothing for the slot."""
        if self.failures:
            self.failures -= 1
            self.policies.pop(slot, None)
            raise Unavailable("planted", what="gate")
        self.policies[slot] = policy

    async def drop(self, slot: int) -> None:
        """Forgets."""
        self.policies.pop(slot, None)

    async def resolve(self, slot: int, name: str, addresses: Sequence[str], rule: NameRule | None = None) -> bool:
        """As if the sandbox had asked for `name`: True where its answer was sent. `rule`: of a policy that is no more."""
        found = rule or (rule_for(self.policies[slot], name) if slot in self.policies else None)
        if found is None:
            return False
        await self.on_answer(slot, NetworkAnswer(name=name, rule=found, addresses=tuple(addresses), seconds=30.0))
        return True
