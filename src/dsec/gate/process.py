"""The gate's own process: sockets are inherited, policies come over a channel from the server, and it ends when the server does."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.gate.credentials import Credentials
from dsec.gate.exchange import exchange
from dsec.gate.leave_root import become, enter
from dsec.gate.messages import (
    Answered,
    Configure,
    Done,
    Drop,
    Failed,
    Happened,
    Opened,
    Ready,
    Serve,
    SetPolicy,
    ToGate,
    encode,
    receive,
)
from dsec.gate.mirror import Mirrors
from dsec.gate.names import Names
from dsec.gate.reach import Reach
from dsec.gate.refusal import Refused
from dsec.gate.relay import Relay
from dsec.gate.resolver import Resolver
from dsec.gate.settings import GateSettings
from dsec.gate.tenants import Tenants
from dsec.model.network import Flow, NetworkAnswer

__all__ = ["run"]

_log = logging.getLogger("dsec.gate")
_KEPT_EVENTS = 4096
_UNSENT_BYTES = 4 << 20
_MOST_WAITING = 4096
_OPEN_SECONDS = 5.0
# One sandbox's burst must not push the others' queries out: room for some 5,000.
_QUERY_BUFFER = 4 << 20
_SO_RCVBUFFORCE = 33


class Channel:
    """The server's end: sends frames, and keeps what waits for an answer. Events beyond a bound are lost and counted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._events: deque[Happened] = deque(maxlen=_KEPT_EVENTS)
        self._some = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._number = 0
        self.generations: dict[int, int] = {}

    async def next(self) -> ToGate | None:
        """The server's next message; None when it has gone."""
        data = await receive(self._reader)
        return None if data is None else msgspec.msgpack.decode(data, type=ToGate)

    def send(self, message: Struct) -> None:
        """Sends without waiting; only for what is bounded by questions."""
        self._writer.write(encode(message))

    def event(self, slot: int, flow: Flow, seconds: float) -> None:
        """Queues a flow for the server."""
        self._events.append(Happened(slot, flow, seconds))
        self._some.set()

    def failed(self, where: str, error: Exception) -> None:
        """Tells the server's log, without what a sandbox or a secret put into the message."""
        _log.error("%s failed", where, exc_info=error)
        if self._writer.transport.get_write_buffer_size() < _UNSENT_BYTES:
            self.send(Failed(where, type(error).__name__))

    async def report(self) -> None:
        """Sends events as fast as the server takes them."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._events:
                self.send(self._events.popleft())
                await self._writer.drain()

    async def open(self, slot: int, answer: NetworkAnswer) -> None:
        """Returns when the answer's addresses can be reached. Raises Refused when they cannot."""
        if len(self._waiting) >= _MOST_WAITING:
            raise Refused("lookup", "too many answers wait to be opened", name=answer.name)
        self._number += 1
        number, opened = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = opened
        try:
            self.send(Answered(number, slot, self.generations.get(slot, 0), answer))
            async with asyncio.timeout(_OPEN_SECONDS):
                if not await opened:
                    raise Refused("rebinding", "the node does not open these addresses", name=answer.name)
        except TimeoutError:
            raise Refused("lookup", "the node did not open the addresses in time", name=answer.name) from None
        finally:
            del self._waiting[number]

    def opened(self, message: Opened) -> None:
        waiter = self._waiting.get(message.number)
        if waiter is not None and not waiter.done():
            waiter.set_result(message.good)


class _Over(Exception):
    """The server has gone: all else is cancelled."""


async def run(channel_fd: int) -> None:
    """Serves until the server closes its end of the channel."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=channel_fd))
    channel = Channel(reader, writer)
    try:
        first = await channel.next()
        if not isinstance(first, Configure):
            raise ValueError("the first frame configures the gate")
        async with asyncio.TaskGroup() as group:
            told = asyncio.Event()
            tenants = _start(first, channel, group, told)
            become(str(first.settings["user"]))
            channel.send(Ready())
            await _obey(channel, tenants, told)
            raise _Over
    except* _Over:
        _log.debug("the server has gone")
    finally:
        writer.close()


def _start(setup: Configure, channel: Channel, group: asyncio.TaskGroup, told: asyncio.Event) -> Tenants:
    """Prepares all that is served once `told` is set: who asks earlier is not known yet, and waits in the socket."""

    async def serve(work: Callable[[], Awaitable[None]]) -> None:
        await told.wait()
        await work()

    settings = msgspec.convert(setup.settings, GateSettings)
    tenants = Tenants(group, channel.event, settings.connections_total, channel.failed)
    reach = Reach(setup.forbidden)
    names = Names(settings, reach, channel.open)
    credentials = Credentials(setup.credentials)
    group.create_task(channel.report())
    udp = _sockets(setup.udp)
    for sock in udp:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUERY_BUFFER)
    resolver, tcp = Resolver(tenants, names, settings, setup.gateway), _sockets(setup.tcp)
    relay, relayed = Relay(tenants, names, settings, credentials, exchange), _sockets(setup.relay)
    group.create_task(serve(lambda: resolver.serve(udp, tcp)))
    group.create_task(serve(lambda: relay.serve(relayed)))
    enter(Path(setup.cache), settings.user)
    mirrors = Mirrors(tenants, settings, setup.services, credentials, Path(), reach)
    mirrored = {service: _sockets(numbers) for service, numbers in setup.mirrors.items()}
    group.create_task(serve(lambda: mirrors.serve(mirrored)))
    return tenants


def _sockets(numbers: tuple[int, ...]) -> list[socket.socket]:
    return [socket.socket(fileno=number) for number in numbers]


async def _obey(channel: Channel, tenants: Tenants, told: asyncio.Event) -> None:
    """Carries out what the server says, in its order, until it has gone."""
    while (message := await channel.next()) is not None:
        if isinstance(message, SetPolicy):
            channel.generations[message.address.slot] = message.generation
            await tenants.set(message.address, message.policy)
            channel.send(Done(message.number))
        elif isinstance(message, Drop):
            channel.generations.pop(message.slot, None)
            await tenants.drop(message.slot)
            channel.send(Done(message.number))
        elif isinstance(message, Serve):
            told.set()
        elif isinstance(message, Opened):
            channel.opened(message)
