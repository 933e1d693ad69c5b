"""The networks of an edge's sandboxes: given at the start, switched while they run, taken over after a restart, and logged.

Whatever fails, fails closed: the sandbox then reaches nothing, its view says why, and a later switch may open it again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.edge.journal import Journal
from dsec.edge.network.member import Member
from dsec.edge.network.settings import NetworkSettings
from dsec.edge.resident import Resident
from dsec.edge.tasks import TaskSet
from dsec.kernel.errors import KernelError
from dsec.model.errors import DSecError, InvalidArgument, PermissionDenied, Unavailable, Unsupported
from dsec.model.network import (
    Address,
    Flow,
    Link,
    NetCounts,
    NetworkAnswer,
    NetworkChange,
    NetworkInForce,
    NetworkView,
    Policy,
    Service,
)
from dsec.model.spec import SandboxSpec
from dsec.ports.clock import Clock
from dsec.ports.network import Fabric, Gate, SlotFlow
from dsec.rules.environ import surroundings
from dsec.rules.netpolicy import FORBIDDEN, GUARDED, Grounds, answer_allows
from dsec.rules.netrules import compiled, environment, first_rules, linked, phase_rules

__all__ = ["NetworkParts", "Networks"]

_log = logging.getLogger("dsec.edge")
_R = TypeVar("_R")
_THREADS = 4
_POLICIES_MAX = 256
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class NetworkParts(Struct, frozen=True, kw_only=True):
    """What networks stand on. `fabric` None: this host has none, for the reason `why_not`. `credentials`: names that the gate holds.
    `ranges`: the sandboxes' own prefixes."""

    fabric: Fabric | None
    gate: Gate | None
    services: Mapping[str, Service]
    settings: NetworkSettings
    credentials: frozenset[str] = frozenset()
    ranges: tuple[str, ...] = ()
    why_not: str = "this node was built without a network"


class Networks:
    """One node's. `why_not`: why no sandbox can be linked, "" once `open` has succeeded."""

    def __init__(self, parts: NetworkParts, journal: Journal, clock: Clock, tasks: TaskSet) -> None:
        self._on = parts
        self._journal = journal
        self._clock = clock
        self._tasks = tasks
        self._members: dict[str, Member] = {}
        self._by_slot: dict[int, Member] = {}
        self._policies: dict[bytes, Policy] = {}
        self._workers: ThreadPoolExecutor | None = None
        self._past = NetCounts()
        self._grounds = Grounds(gateway_v4="", gateway_v6="", forbidden=FORBIDDEN, guarded=GUARDED)
        self.why_not = parts.why_not

    # -- the node's part ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Makes the node's part ready; where the host cannot, says why in `why_not` and in the log, and goes on without."""
        fabric, gate = self._on.fabric, self._on.gate
        if fabric is None or gate is None:
            return
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="dsec-network")
        gate.on_answer, gate.on_flow = self._answered, self._seen
        try:
            await self._work(fabric.open)
            await gate.open()
        except (KernelError, DSecError) as error:
            self.why_not = f"the network cannot be opened: {error}"
            _log.warning("sandboxes have no network: %s", error)
            await gate.close()
            try:
                # What holds sandboxes of before goes on to judge them; without any, nothing stays on a host that cannot do it all.
                await self._work(fabric.close, self._journal.has_living())
            except KernelError as worse:
                _log.error("what was made of the network is not removed: %s", worse)
            return
        self._grounds = replace(
            self._grounds,
            gateway_v4=fabric.gateway_v4,
            gateway_v6=fabric.gateway_v6,
            forbidden=(*FORBIDDEN, *self._on.settings.forbidden, *self._on.ranges),
            credentials=self._on.credentials,
        )
        self._policies.clear()
        asyncio.get_running_loop().add_reader(fabric.events_fd(), self._drain)
        self._tasks.spawn(self._sweeping(), "network sweep")
        self.why_not = ""

    async def settle(self) -> None:
        """After the living have been taken over: removes what belongs to none of them."""
        if self.why_not or self._on.fabric is None:
            return
        left = await self._work(self._on.fabric.linked) - self._by_slot.keys()
        if left:
            await self._work(self._on.fabric.unlink, *left)

    async def close(self) -> None:
        """Ends the server's part. Linked sandboxes stay connected and judged, names and relayed connections end; without any, nothing stays."""
        fabric, gate = self._on.fabric, self._on.gate
        if fabric is not None and gate is not None and not self.why_not:
            asyncio.get_running_loop().remove_reader(fabric.events_fd())
            self.why_not = "the edge is shutting down"
            await gate.close()
            await self._work(fabric.close, bool(self._members))
        elif fabric is not None and self._workers is not None and not self._journal.has_living():
            # It could not be opened, and was kept for those that lived then; they have ended.
            await self._work(fabric.close, False)
        if self._workers is not None:
            self._workers.shutdown()

    # -- one sandbox -------------------------------------------------------------------------------------------------

    def check(self, spec: SandboxSpec) -> None:
        """Raises InvalidArgument and Unsupported for rules, of any phase, that this node could not enforce as they are written."""
        for phase in spec.network_phases:
            self._compiled(spec, "", phase_rules(spec, phase), f"network_phases.{phase}")
        if spec.network_rules is not None:
            self._compiled(spec, "", spec.network_rules, "network_rules")

    def _compiled(self, spec: SandboxSpec, group: str, rules: Any, field: str) -> Policy:
        """Sandboxes of one job have one set of rules, and each needs its policy twice: those compiled last are kept."""
        key = _encode((rules, spec.network_limits, group, spec.aliases))
        policy = self._policies.pop(key, None) or compiled(
            rules, self._on.services, self._grounds, field=field, limits=spec.network_limits, group=group, aliases=spec.aliases
        )  # fmt: skip
        self._policies[key] = policy
        if len(self._policies) > _POLICIES_MAX:
            del self._policies[next(iter(self._policies))]
        return policy

    def link_of(self, resident: Resident) -> Link | None:
        """What a sandbox that is about to start begins with; None without a network."""
        spec = resident.row.spec
        if self.why_not or not linked(spec):
            return None
        known = self._journal.network(resident.id)
        phase, rules = first_rules(spec)
        if known is None:
            known = NetworkInForce(rules=rules, phase=phase)
            self._journal.set_network(resident.id, known)
        return self._link(resident, known)

    def _link(self, resident: Resident, known: NetworkInForce) -> Link:
        spec, number = resident.row.spec, 0
        if spec.network_group is not None:
            number = self._journal.group_number(resident.row.project, spec.network_group)
        if known.refused:
            return Link(policy=Policy(limits=spec.network_limits))
        policy = self._compiled(spec, str(number) if number else "", known.rules, "network_rules")
        return Link(policy=policy, group=number)

    async def join(self, resident: Resident, slot: int | None, link: Link) -> None:
        """Before its first process: the gate knows it, and its tools will find the mirrors. Raises Unavailable."""
        fabric, gate = self._on.fabric, self._on.gate
        if fabric is None or gate is None or slot is None:
            raise Unavailable("the sandbox cannot be linked", what="network")
        member = self._enlist(resident, slot, link, fabric.address(slot))
        member.since = self._clock.now()
        await gate.set_policy(slot, member.address, link.policy)

    def _enlist(self, resident: Resident, slot: int, link: Link, address: Address) -> Member:
        member = Member(slot, address, link, self._on.settings.log_flows)
        self._members[resident.id] = self._by_slot[slot] = member
        self._surround(resident)
        return member

    def _surround(self, resident: Resident) -> None:
        row = resident.row
        known = self._journal.network(row.id)
        names = set(known.rules if known else ()).union(*row.spec.network_phases.values())
        env = environment(names, self._on.services, self._grounds)
        resident.surroundings = surroundings(row.composition.config, row.spec, env)

    async def leave(self, sandbox_id: str) -> None:
        """Before its slot is given back: names and relayed connections end; its link goes with its backend's parts. Any number of times."""
        member = self._members.pop(sandbox_id, None)
        if member is None:
            return
        self._by_slot.pop(member.slot, None)
        counts = member.log.counts
        self._past = _sum(self._past, counts)
        async with member.lock:  # an answer under way is over before the slot can be another's
            member.closed = True
        if not self.why_not:
            self._tasks.spawn(self._drop(member.slot), f"network of {sandbox_id}")

    async def _drop(self, slot: int) -> None:
        """Nobody waits for it: what the gate is told of the slot's next sandbox comes after this, on the same channel."""
        try:
            if self._on.gate is not None:
                await self._on.gate.drop(slot)
        except DSecError as error:
            _log.warning("the gate, started anew, will not know slot %d: %s", slot, error)

    async def adopt(self, resident: Resident, slot: int | None) -> None:
        """After a restart: what is in force is what the journal says, or nothing is reached."""
        known, fabric = self._journal.network(resident.id), self._on.fabric
        if known is None or fabric is None or slot is None:
            return
        if self.why_not:
            _log.error("sandbox %s keeps the rules that it had: %s", resident.id, self.why_not)
            return
        member = self._enlist(resident, slot, Link(policy=Policy()), fabric.address(slot))
        try:
            if not await self._work(fabric.adopt, slot):
                raise Unavailable("its link was not there when the node's server came back", what="network")
            async with member.turn:
                await self._switch(resident, member, known)
        except (KernelError, DSecError) as error:
            await self._refuse(resident, member, known, str(error))

    # -- while it runs -----------------------------------------------------------------------------------------------

    async def change(self, resident: Resident, change: NetworkChange) -> NetworkView:
        """Puts other rules in force, for flows that there are too. Raises InvalidArgument and Unsupported, and then nothing has changed;
        Unavailable where it failed, and then everything is refused."""
        spec, member = resident.row.spec, self._members.get(resident.id)
        if (change.rules is None) == (change.phase is None):
            raise InvalidArgument("exactly one of rules and phase", field="rules")
        if member is None:
            why = self.why_not if linked(spec) else "the sandbox was created without a network (network_rules=None)"
            raise Unsupported(why, feature="network_rules")
        rules = change.rules if change.rules is not None else phase_rules(spec, change.phase or "")
        known = NetworkInForce(rules=rules, phase=change.phase)
        self._link(resident, known)  # refused before anything is touched
        done: asyncio.Future[DSecError | None] = asyncio.get_running_loop().create_future()
        # A caller that goes away does not leave it half done.
        self._tasks.spawn(self._changing(resident, member, known, done), f"network of {resident.id}")
        error = await asyncio.shield(done)
        if error is not None:
            raise error
        return await self.view(resident)

    async def _changing(
        self, resident: Resident, member: Member, known: NetworkInForce, done: "asyncio.Future[DSecError | None]"
    ) -> None:
        try:
            async with (
                member.turn
            ):  # with what follows a failure: the next caller's rules come after it, not in between
                self._journal.set_network(resident.id, known)
                try:
                    await self._switch(resident, member, known)
                except (KernelError, DSecError) as error:
                    _log.error("the network of %s is shut, as its rules could not be switched: %s", resident.id, error)
                    await self._refuse(resident, member, known, str(error))
                    why = f"the rules could not be switched, so everything is refused: {error}"
                    done.set_result(Unavailable(why, what="network"))
                else:
                    done.set_result(None)
        finally:
            if not done.done():
                done.set_result(Unavailable("the edge is shutting down", what="network"))

    async def _switch(self, resident: Resident, member: Member, known: NetworkInForce) -> None:
        """Within the member's turn."""
        link = self._link(resident, known)
        await self._apply(member, link)
        await self._gate_policy(member, link.policy)
        self._surround(resident)
        member.refused = known.refused

    async def _apply(self, member: Member, link: Link) -> None:
        fabric, policy = self._fabric(), link.policy
        async with member.lock:
            if member.closed:
                raise Unavailable("the sandbox is ending", what="network")
            member.link = link
            answers = member.kept(policy, self._clock.monotonic())
            await self._work(fabric.apply, member.slot, policy.allows, policy.limits, link.group, answers)

    async def _gate_policy(self, member: Member, policy: Policy) -> None:
        if self._on.gate is None:
            raise Unavailable("the gate is not there", what="network")
        await self._on.gate.set_policy(member.slot, member.address, policy)

    async def _refuse(self, resident: Resident, member: Member, known: NetworkInForce, why: str) -> None:
        member.refused = why
        shut = Link(policy=Policy(limits=resident.row.spec.network_limits))
        self._journal.set_network(resident.id, replace(known, refused=why))
        for act in (self._apply(member, shut), self._gate_policy(member, shut.policy)):
            try:
                await act
            except (KernelError, DSecError) as error:
                # The fabric promises that after a failed switch nothing is reached, and the gate that without it nothing is answered.
                _log.error("shutting the network of %s: %s", resident.id, error)

    async def view(self, resident: Resident) -> NetworkView:
        """What is in force, as asked and as the kernel has it. Raises Unavailable."""
        spec, member = resident.row.spec, self._members.get(resident.id)
        known = self._journal.network(resident.id)
        if member is None or known is None:
            return NetworkView(
                rules=spec.network_rules if linked(spec) else None, refused=self.why_not if linked(spec) else ""
            )
        try:
            allows = await self._work(self._fabric().allowed, member.slot)
        except KernelError as error:
            raise Unavailable(f"the kernel's maps cannot be read: {error}", what="network") from error
        return NetworkView(
            rules=known.rules, phase=known.phase, phases=tuple(spec.network_phases), limits=spec.network_limits,
            group=spec.network_group, aliases=spec.aliases, v4=member.address.v4, v6=member.address.v6, allows=allows,
            names=member.link.policy.names, counts=member.log.counts, refused=member.refused,
        )  # fmt: skip

    async def log(self, resident: Resident) -> list[Flow]:
        """The flows kept, oldest first, those included that ended this moment. Raises Unavailable."""
        member = self._members.get(resident.id)
        if member is None:
            return []
        try:
            self._drain()
            await self._sweep()
        except KernelError as error:
            raise Unavailable(f"the kernel's log cannot be read: {error}", what="network") from error
        return member.log.read()

    # -- what kernel and gate tell -----------------------------------------------------------------------------------

    async def _answered(self, slot: int, answer: NetworkAnswer) -> None:
        """Opens an answer's addresses before it is sent. Raises PermissionDenied for a name that is not allowed (any more)."""
        member = self._by_slot.get(slot)
        if member is None:
            raise PermissionDenied("no such sandbox", permission="network")
        async with member.lock:
            policy = member.link.policy
            if member.closed or answer.rule not in policy.names:
                raise PermissionDenied("the name is not allowed any more", permission="network")
            allows = answer_allows(answer, answer.rule, self._grounds, policy.allows)
            try:
                await self._work(self._fabric().permit, slot, allows, answer.seconds)
            except KernelError as error:
                raise Unavailable(f"the kernel does not take the answer: {error}", what="network") from error
            member.remember(answer, allows, self._clock.monotonic())

    def _seen(self, found: SlotFlow) -> None:
        member = self._by_slot.get(found.slot)
        # What the kernel still tells of the slot's last sandbox is not for the eyes of this one.
        if member is not None and found.flow.at >= member.since:
            member.log.add(found.flow)

    def _drain(self) -> None:
        for found in self._fabric().drain():
            self._seen(found)

    async def _sweep(self) -> None:
        for found in await self._work(self._fabric().sweep):
            self._seen(found)

    async def _sweeping(self) -> None:
        while True:
            await asyncio.sleep(self._on.settings.sweep_interval)
            try:
                await self._sweep()
            except KernelError as error:
                _log.error("flows cannot be swept: %s", error)

    def counts(self) -> tuple[int, NetCounts, int]:
        """Linked sandboxes, counts of all that there were since the server began, and events that found no room."""
        total = self._past
        for member in self._members.values():
            total = _sum(total, member.log.counts)
        return len(self._members), total, 0 if self.why_not else self._fabric().lost()

    def _fabric(self) -> Fabric:
        if self._on.fabric is None:
            raise Unavailable(self.why_not, what="network")
        return self._on.fabric

    async def _work(self, job: Callable[..., _R], *args: object) -> _R:
        if self._workers is None:
            raise Unavailable("the network is not open", what="network")
        return await asyncio.get_running_loop().run_in_executor(self._workers, job, *args)


def _sum(one: NetCounts, other: NetCounts) -> NetCounts:
    return NetCounts(
        allowed=one.allowed + other.allowed,
        refused=one.refused + other.refused,
        bytes_out=one.bytes_out + other.bytes_out,
        bytes_in=one.bytes_in + other.bytes_in,
    )
