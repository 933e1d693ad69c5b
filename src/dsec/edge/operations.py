"""The ordered log of one edge: every operation with a request_id is recorded before it acts, and carried out once.

An operation without one is not recorded: nobody can ask for it again. With one, a write before and one after cost about
50 us of the edge's processor together. A caller that goes away during an operation with a request_id may come back for it
within the grace time; then, or as soon as it says that it will not, it is cancelled, which ends its process tree.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct

from dsec.edge.flight import Flight
from dsec.edge.journal import Journal
from dsec.edge.resident import Resident
from dsec.edge.tasks import TaskSet
from dsec.model.errors import Busy, Conflict, DSecError, InvalidArgument, Unavailable, error_from_code
from dsec.model.outcome import ExecResult
from dsec.model.settings import check_positive, setting
from dsec.ports.clock import Clock
from dsec.rules.oplog import Decision, Operation, Phase, Retention, decide
from dsec.web import ClientGone, failure

__all__ = ["OperationSettings", "Operations", "fingerprint_of"]

_log = logging.getLogger("dsec.edge")

R = TypeVar("R")

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class OperationSettings:
    """Settings of the ordered log."""

    kept_stream_kib: int = setting(
        64, "KiB of each output stream of a result that are kept for a repeat of its request_id"
    )
    kept_seconds: float = setting(
        3600.0, "seconds that a result is kept; a later repeat is a Conflict, never a second run"
    )
    grace: float = setting(2.0, "seconds that an operation with a request_id goes on after its caller went away")

    def __post_init__(self) -> None:
        check_positive(self, "kept_seconds")


class _Recorded(Struct, frozen=True, omit_defaults=True):
    """A result, or the error that was it."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    code: str = ""
    detail: str = ""
    fields: dict[str, str | int | float | bool | None] = {}


_recorded = msgspec.msgpack.Decoder(_Recorded)


def fingerprint_of(*values: Any) -> bytes:
    """What makes two requests the same: a digest of their parameters, whether a default was written out or left out.
    Raises InvalidArgument for a number that no field takes."""
    plain = [_plain(value) for value in values]
    try:
        return blake2b(_encode(plain), digest_size=16).digest()
    except OverflowError as error:
        raise InvalidArgument("a number is out of every range", field="body") from error


def _plain(value: Any) -> Any:
    """A record as all its values: encoded as it is, it would leave out defaults that are the very object of its class."""
    if not isinstance(value, Struct):
        return value
    return [type(value).__name__, *("" if part is UNSET else part for part in msgspec.structs.astuple(value))]


class Operations:
    """Carries operations out, once each."""

    def __init__(self, journal: Journal, tasks: TaskSet, clock: Clock, settings: OperationSettings) -> None:
        self._journal = journal
        self._tasks = tasks
        self._clock = clock
        self._grace = settings.grace
        self._ended: list[tuple[Resident, str, Phase, float, bytes | None]] = []
        self.retention = Retention(settings.kept_stream_kib * 1024, settings.kept_seconds)

    async def once(
        self,
        resident: Resident,
        request_id: str | None,
        kind: str,
        fingerprint: bytes,
        run: Callable[[], Awaitable[R]],
        type_: type[R],
    ) -> R:
        """The result of `run`, which is called at most once for a request_id of this sandbox. A repeat waits for the first
        where that still runs. Raises Conflict and Interrupted as rules.oplog.decide says, and what `run` raised."""
        resident.sequence += 1
        if request_id is None:
            return await run()
        now = self._clock.now()
        operation = Operation(resident.sequence, request_id, kind, fingerprint, Phase.BEGUN, now)
        if request_id not in resident.running and self._journal.begin(resident.id, operation):
            return await self._first(resident, operation, run)
        return await self._again(resident, operation, type_)

    async def give_up(self, resident: Resident, request_id: str) -> None:
        """Cancels the operation under way, if there is one; returns when it is over. A later repeat is a Conflict."""
        flight = resident.running.get(request_id)
        if flight is not None:
            await flight.give_up()

    async def _again(self, resident: Resident, asked: Operation, type_: type[R]) -> R:
        key = asked.request_id
        while True:
            known = self._journal.operation(resident.id, key)
            flight = resident.running.get(key)
            decision = decide(
                known, asked.kind, asked.fingerprint, running=flight is not None, now=asked.at, retention=self.retention
            )
            if decision is Decision.WAIT and flight is not None:
                flight.joined()
                try:
                    await asyncio.shield(flight.done)
                    await asyncio.sleep(0)  # for the loop to record it, if it has just ended
                finally:
                    flight.left()
            elif decision is Decision.REPLAY:
                return self._replay(resident, key, type_)
            else:  # it was withdrawn between, having done nothing
                raise Busy("the first request did nothing; ask again", retry_after=0.1)

    def _replay(self, resident: Resident, key: str, type_: type[R]) -> R:
        data = self._journal.result(resident.id, key)
        if data is None:
            raise Conflict("the result is no longer kept", request_id=key, state="forgotten")
        found = _recorded.decode(data)
        if found.code:
            raise error_from_code(found.code, found.detail, found.fields)
        return msgspec.msgpack.decode(found.value, type=type_)

    async def _first(self, resident: Resident, operation: Operation, run: Callable[[], Awaitable[R]]) -> R:
        """Runs it as a task of its own, which the caller waits for: so the caller may go and come back."""
        flight = Flight(self._tasks, self._grace)
        resident.running[operation.request_id] = flight
        outcome: list[R | Exception] = []
        flight.begin(self._run(resident, operation, run, flight, outcome), operation.kind)
        try:
            await asyncio.shield(flight.done)
        finally:
            flight.left()
        if not outcome and flight.given_up:
            raise Conflict("the operation was cancelled", request_id=operation.request_id, state="cancelled")
        if not outcome:
            raise Unavailable("the edge is shutting down")
        found = outcome[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def _run(
        self,
        resident: Resident,
        operation: Operation,
        run: Callable[[], Awaitable[R]],
        flight: Flight,
        outcome: list[R | Exception],
    ) -> None:
        key = operation.request_id
        try:
            try:
                value = await run()
                outcome.append(value)
                self._finish(resident, key, self._kept(value))
            except (Busy, InvalidArgument, ClientGone) as error:  # raised before anything is done, or its input was cut
                outcome.append(error)
                self._journal.withdraw(resident.id, key)
                del resident.running[key]
            except DSecError as error:
                outcome.append(error)
                self._finish(
                    resident, key, _encode(_Recorded(code=error.code, detail=error.detail, fields=error.fields))
                )
            except Exception as error:  # noqa: BLE001 - told as an incident, and recorded: it may have acted
                known = failure(error, self._clock, operation.kind)
                outcome.append(known)
                self._finish(
                    resident, key, _encode(_Recorded(code=known.code, detail=known.detail, fields=known.fields))
                )
            except asyncio.CancelledError:
                if flight.given_up:
                    self._finish(resident, key, None, Phase.CANCELLED)
                else:  # the edge ends, not its caller's wish: to him who asks again it is interrupted
                    del resident.running[key]
                raise
        finally:
            flight.end()

    def _finish(self, resident: Resident, key: str, data: bytes | None, phase: Phase = Phase.ENDED) -> None:
        """Records an end in the loop's next turn, together with those of others; until then the operation counts as running."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self.flush)
        self._ended.append((resident, key, phase, self._clock.now(), data))

    def flush(self) -> None:
        """Records all ends now. What cannot be recorded will look, after a restart, as if it had been interrupted."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        try:
            self._journal.finish([(phase, at, data, resident.id, key) for resident, key, phase, at, data in ended])
        except DSecError as error:
            _log.error("%d ended operations are not in the journal: %s", len(ended), error.detail)
        for resident, key, *_ in ended:
            resident.running.pop(key, None)

    def _kept(self, value: object) -> bytes | None:
        """The record of a result; None where it is too large to keep."""
        most = self.retention.stream_bytes
        if isinstance(value, ExecResult) and (len(value.stdout) > most or len(value.stderr) > most):
            return None
        data = _encode(_Recorded(value=msgspec.Raw(_encode(value))))
        return data if len(data) <= 2 * most + 65536 else None
