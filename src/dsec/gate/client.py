"""The server's side of the gate: starts the process, watches it, starts it again, and tells it every policy."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.gate.messages import (
    Answered,
    Configure,
    Drop,
    Failed,
    Happened,
    Opened,
    Ready,
    Serve,
    SetPolicy,
    ToServer,
    encode,
    receive,
)
from dsec.gate.settings import RELAY_PORT, RESOLVER_PORT, Credential, GateSettings, MirrorService
from dsec.model.errors import DSecError, Unavailable
from dsec.model.network import Address, Flow, NetworkAnswer, Policy
from dsec.ports.clock import Clock
from dsec.ports.network import Fabric, OnAnswer, OnFlow, SlotFlow

__all__ = ["GateProcess", "GateSetup"]

_log = logging.getLogger("dsec.gate")
_START_SECONDS = 20.0
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class GateSetup(Struct, frozen=True, kw_only=True):
    """What a gate serves. `cache`: directory for what mirrors fetch; `forbidden`: prefixes that no name may lead to, such as the sandboxes' own."""

    settings: GateSettings
    cache: Path
    services: tuple[MirrorService, ...] = ()
    credentials: tuple[Credential, ...] = ()
    forbidden: tuple[str, ...] = ()


async def _no_answer(slot: int, answer: NetworkAnswer) -> None:
    raise Unavailable("nobody opens addresses yet")


def _no_flow(flow: SlotFlow) -> None:
    return None


class GateProcess:
    """The Gate port. Set `on_answer` and `on_flow` before `open`."""

    def __init__(self, setup: GateSetup, fabric: Fabric, clock: Clock) -> None:
        self.on_answer: OnAnswer = _no_answer
        self.on_flow: OnFlow = _no_flow
        self._setup = setup
        self._fabric = fabric
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._watch: asyncio.Task[None] | None = None
        self._sockets: dict[str, tuple[int, ...]] = {}
        self._policies: dict[int, SetPolicy] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        self._writer: asyncio.StreamWriter | None = None
        self.starts = 0
        self.pid: int | None = None

    async def open(self) -> None:
        """Makes the sockets and starts the process. Raises KernelError for a socket, Unavailable when the process does not come up."""
        await asyncio.to_thread(self._make_sockets)
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = self._group.create_task(self._keep(ready))
        try:
            async with asyncio.timeout(_START_SECONDS):
                await ready
        except TimeoutError as error:
            await self.close()
            raise Unavailable("the gate's process does not start; the server's log says why") from error

    async def close(self) -> None:
        """Ends the process, and with it all that it relays; any number of times."""
        group, self._group = self._group, None
        if group is not None and self._watch is not None:
            self._watch.cancel()
            await group.__aexit__(None, None, None)
        for numbers in self._sockets.values():
            for number in numbers:
                os.close(number)
        self._sockets = {}

    async def set_policy(self, slot: int, address: Address, policy: Policy) -> None:
        """Returns when the process judges the slot by `policy`. Raises Unavailable when it does not answer; its next start makes that good."""
        before = self._policies.get(slot)
        message = SetPolicy(0, before.generation + 1 if before else self._next(), address, policy)
        self._policies[slot] = message
        await self._request(lambda number: replace(message, number=number))

    async def drop(self, slot: int) -> None:
        """Forgets the slot; any number of times. Raises Unavailable when the process does not answer; its next start does not know the slot."""
        self._policies.pop(slot, None)
        await self._request(lambda number: Drop(number, slot))

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _request(self, make: Any) -> None:
        writer, number = self._writer, self._next()
        if writer is None:
            raise Unavailable("the gate's process is being started anew")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = done
        try:
            writer.write(encode(make(number)))
            async with asyncio.timeout(_ANSWER_SECONDS):
                await writer.drain()
                await done
        except (TimeoutError, ConnectionError) as error:
            raise Unavailable("the gate's process does not answer") from error
        finally:
            del self._waiting[number]

    def _make_sockets(self) -> None:
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        wanted = [
            ("udp", datagram, RESOLVER_PORT, False),
            ("tcp", stream, RESOLVER_PORT, False),
            ("relay", stream, RELAY_PORT, True),
        ]
        wanted += [(f"mirror {service.service}", stream, service.port, False) for service in self._setup.services]
        for name, kind, port, transparent in wanted:
            self._sockets[name] = ()
            for family in (socket.AF_INET, socket.AF_INET6):
                self._sockets[name] += (self._fabric.socket(family, kind, port, transparent),)

    def _configure(self) -> Configure:
        setup, made = self._setup, self._sockets
        return Configure(
            settings=asdict(setup.settings), services=setup.services, credentials=setup.credentials,
            gateway=(self._fabric.gateway_v4, self._fabric.gateway_v6), forbidden=setup.forbidden, cache=str(setup.cache),
            udp=made["udp"], tcp=made["tcp"], relay=made["relay"],
            mirrors={service.service: made[f"mirror {service.service}"] for service in setup.services},
        )  # fmt: skip

    async def _keep(self, ready: "asyncio.Future[None]") -> None:
        """Runs the process for as long as the gate is open, with growing pauses between starts that fail."""
        pause = _FIRST_PAUSE
        while True:
            begun = self._clock.monotonic()
            try:
                await self._life(ready)
            except Exception:  # noqa: BLE001 - it is started anew, whatever it was
                _log.exception("the gate's process could not be started, or does not speak as it should")
            if self._clock.monotonic() - begun > _LONGEST_PAUSE * 2:
                pause = _FIRST_PAUSE
            _log.error("the gate's process ended; it is started anew in %.1f s", pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _life(self, ready: "asyncio.Future[None]") -> None:
        ours, process = self._spawn()
        self.pid, self.starts = process.pid, self.starts + 1
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(encode(self._configure()))
            await self._listen(reader, writer, ready)
        finally:
            self._writer = None
            writer.close()
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(ConnectionResetError("the gate's process ended"))
            await asyncio.shield(asyncio.to_thread(_reap, process))

    def _spawn(self) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
        """Starts the process in this thread's network namespace; its end of the channel closes with it."""
        ours, theirs = socket.socketpair()
        numbers = [number for numbers in self._sockets.values() for number in numbers]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsec.gate", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *numbers], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return ours, process

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ready: "asyncio.Future[None]"
    ) -> None:
        async with asyncio.TaskGroup() as group:
            while (data := await receive(reader)) is not None:
                message = msgspec.msgpack.decode(data, type=ToServer)
                if isinstance(message, Ready):
                    await self._resend(writer)
                    self._writer = writer
                    if not ready.done():
                        ready.set_result(None)
                elif isinstance(message, Answered):
                    group.create_task(self._answered(message, writer))
                elif isinstance(message, Happened):
                    self._happened(message)
                elif isinstance(message, Failed):
                    _log.error("within the gate: %s failed: %s", message.where, message.text)
                elif (waiter := self._waiting.get(message.number)) is not None and not waiter.done():
                    waiter.set_result(None)

    async def _resend(self, writer: asyncio.StreamWriter) -> None:
        for message in list(self._policies.values()):
            writer.write(encode(message))
            await writer.drain()
        writer.write(encode(Serve()))

    async def _answered(self, message: Answered, writer: asyncio.StreamWriter) -> None:
        known, good = self._policies.get(message.slot), False
        # An answer to a question of before a switch opens nothing after it.
        if known is not None and known.generation == message.generation:
            try:
                await self.on_answer(message.slot, message.answer)
                good = True
            except DSecError as error:
                _log.warning("addresses of %s were not opened: %s", message.answer.name, error)
            except Exception:  # noqa: BLE001 - the sandbox gets no answer, the server goes on
                _log.exception("addresses of %s were not opened", message.answer.name)
        writer.write(encode(Opened(message.number, good)))

    def _happened(self, message: Happened) -> None:
        now = self._clock.now()
        flow: Flow = replace(message.flow, at=now - message.seconds, ended=now)
        self.on_flow(SlotFlow(message.slot, flow))


def _reap(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
