"""What the server and the gate's process tell each other: msgpack frames with a length in front, over one socket pair."""

import asyncio

import msgspec
from msgspec import Struct

from dsec.gate.settings import Credential, MirrorService
from dsec.model.network import Address, Flow, NetworkAnswer, Policy

__all__ = [
    "LONGEST_FRAME", "Answered", "Configure", "Done", "Drop", "Failed", "Happened", "Opened", "Ready", "Serve", "SetPolicy", "ToGate", "ToServer", "encode", "receive",
]  # fmt: skip

LONGEST_FRAME = 8 << 20


class Configure(Struct, frozen=True, tag=True):
    """The first frame. Descriptors of sockets are inherited; `settings` are those of GateSettings by name."""

    settings: dict[str, object]
    services: tuple[MirrorService, ...]
    credentials: tuple[Credential, ...]
    gateway: tuple[str, str]
    forbidden: tuple[str, ...]
    cache: str
    udp: tuple[int, ...]
    tcp: tuple[int, ...]
    relay: tuple[int, ...]
    mirrors: dict[str, tuple[int, ...]]


class SetPolicy(Struct, frozen=True, tag=True):
    """Judge `address.slot` by `policy` from now on; answered by Done."""

    number: int
    generation: int
    address: Address
    policy: Policy


class Drop(Struct, frozen=True, tag=True):
    """Forget a slot; answered by Done."""

    number: int
    slot: int


class Opened(Struct, frozen=True, tag=True):
    """The answer with `number` is in force (or must not be sent, where not `good`)."""

    number: int
    good: bool


class Ready(Struct, frozen=True, tag=True):
    """The process waits for policies, and for Serve."""


class Serve(Struct, frozen=True, tag=True):
    """All policies have been told: what waits in the sockets meanwhile is answered from now on."""


class Failed(Struct, frozen=True, tag=True):
    """An unexpected failure within the gate, for the server's log."""

    where: str
    text: str


class Done(Struct, frozen=True, tag=True):
    """The request with `number` is carried out."""

    number: int


class Answered(Struct, frozen=True, tag=True):
    """Addresses to be opened for a slot; the gate waits for Opened."""

    number: int
    slot: int
    generation: int
    answer: NetworkAnswer


class Happened(Struct, frozen=True, tag=True):
    """A flow that has ended `seconds` after it began; the server puts the times in."""

    slot: int
    flow: Flow
    seconds: float


ToGate = Configure | SetPolicy | Drop | Opened | Serve
ToServer = Ready | Failed | Done | Answered | Happened


def encode(message: Struct) -> bytes:
    """One frame."""
    data = msgspec.msgpack.encode(message)
    if len(data) > LONGEST_FRAME:
        raise ValueError(f"a frame of {len(data)} bytes")
    return len(data).to_bytes(4, "big") + data


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's content; None at the end. Raises ValueError for what is no frame."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > LONGEST_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
