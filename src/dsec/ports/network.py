"""What an edge needs of the network: the part that the kernel enforces, and the process that answers names and relays."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from dsec.model.network import Address, Allow, Flow, NetLimits, NetworkAnswer, Policy

__all__ = ["Fabric", "Gate", "OnAnswer", "OnFlow", "SlotFlow"]


class SlotFlow(Struct, frozen=True):
    """A flow and the slot of the sandbox that it belongs to."""

    slot: int
    flow: Flow


OnAnswer = Callable[[int, NetworkAnswer], Awaitable[None]]
"""Told of a slot's answer before it is sent to the sandbox; when it returns, the addresses can be reached. May raise: then no answer is sent."""

OnFlow = Callable[[SlotFlow], None]


class Fabric(Protocol):
    """Links and their policy, enforced by the kernel. Synchronous; called in worker threads. All methods raise KernelError.

    A slot is the host-wide number of a sandbox's ids. What a slot may reach is nothing until `apply`.
    """

    gateway_v4: str
    gateway_v6: str

    def open(self) -> None:
        """Makes, or takes over from a server before, the node's router, its table of nftables and its programs. Refused by name where the
        host cannot (see `dsec doctor`)."""
        ...

    def close(self, keep: bool) -> None:
        """Ends this server's part. `keep`: linked sandboxes stay connected and judged; else all is removed."""
        ...

    def prepare(self, slot: int, netns: int) -> None:
        """Makes ahead what `link` of the same slot and namespace then only has to find; until then it is no sandbox's."""
        ...

    def link(self, slot: int, netns: int) -> None:
        """Puts a device with the slot's addresses and routes into the namespace of the descriptor `netns`; nothing is allowed yet."""
        ...

    def adopt(self, slot: int) -> bool:
        """After a restart: True where the slot's link and its policy are there and enforced."""
        ...

    def linked(self) -> frozenset[int]:
        """Slots that have anything of the fabric, so that what belongs to no sandbox can be unlinked."""
        ...

    def cut(self, slot: int) -> None:
        """Lets nothing pass any more and forgets the slot's rules, at once, any number of times. `unlink` has to follow."""
        ...

    def unlink(self, *slots: int) -> None:
        """Removes all of these slots, in any state, any number of times; when it returns, they may be linked again. Takes some tens of
        milliseconds for one, and about one more for each further."""
        ...

    def address(self, slot: int) -> Address:
        """The slot's addresses: a pure function of it."""
        ...

    def apply(
        self,
        slot: int,
        allows: Sequence[Allow],
        limits: NetLimits,
        group: int,
        answers: Sequence[tuple[Allow, float]] = (),
    ) -> None:
        """Switches the slot to exactly these, at once for established flows too; of what `permit` gave only `answers` stay, for the seconds
        beside each. `group` 0: none; sandboxes of one other number reach each other. Where it fails, the slot may reach nothing."""
        ...

    def permit(self, slot: int, allows: Sequence[Allow], seconds: float) -> None:
        """Adds addresses of an answer for `seconds` from now, on top of what `apply` gave."""
        ...

    def allowed(self, slot: int) -> tuple[Allow, ...]:
        """What the kernel's maps allow a slot now, as given to `apply` and `permit` (prefixes as texts, order of no meaning)."""
        ...

    def events_fd(self) -> int:
        """A descriptor that is readable while `drain` would give something."""
        ...

    def drain(self) -> list[SlotFlow]:
        """Refused and begun flows since the last call; never blocks. Events that were lost are counted in `lost`."""
        ...

    def lost(self) -> int:
        """Events that found no room, since `open`."""
        ...

    def sweep(self) -> list[SlotFlow]:
        """Removes closed and idle flows, and gives them with their bytes."""
        ...

    def socket(self, family: int, kind: int, port: int, transparent: bool) -> int:
        """A bound socket (listening, where `kind` is a stream) inside the router, at the gateway's address; the caller owns it."""
        ...


class Gate(Protocol):
    """The resolver, relay and mirrors: a process of its own. After its death it is started anew and gets all policies again."""

    on_answer: OnAnswer
    on_flow: OnFlow

    async def open(self) -> None:
        """Starts and watches the process. Raises BackendFailure's cause as DSecError where it cannot run."""
        ...

    async def close(self) -> None:
        """Ends it; relayed connections end with it."""
        ...

    async def set_policy(self, slot: int, address: Address, policy: Policy) -> None:
        """Returns when the process judges by `policy`: relayed connections which it does not allow have been cut. Raises Unavailable
        when it cannot be reached; then nothing is answered for the slot, which the next start of the process makes good."""
        ...

    async def drop(self, slot: int) -> None:
        """Forgets a slot and cuts its connections, any number of times."""
        ...
