"""What the programs tell of flows, as records: begun and refused ones by events, ended ones by sweeping their table."""

import threading
import time
from collections.abc import Mapping, Sequence

from dsec._native import PinnedMap
from dsec.kernel.netmaps import METER, OVER, EventRecord, FlowKey, FlowRecord, opened_of
from dsec.model.network import Flow
from dsec.ports.clock import Clock
from dsec.ports.network import SlotFlow

__all__ = ["REASONS", "Ledger"]

REASONS = (
    "", "not allowed", "never allowed", "false source address", "malformed", "fragment", "protocol", "no such flow", "too many flows",
    "too many new flows", "no longer allowed", "unsolicited",
)  # fmt: skip
_FIN_OUT, _FIN_IN, _RESET, _ENDED, _ANSWERED = 1, 2, 4, 8, 16
_SECOND = 1_000_000_000
_DNS = 53
_TAKEN, _RELEASED = bytes(4), b"\1\0\0\0"


class Ledger:
    """Times of the records are Unix seconds; a flow of a link that is gone belongs to the slot that had it."""

    def __init__(self, maps: Mapping[str, PinnedMap], clock: Clock) -> None:
        self._maps = maps
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._gone: set[int] = set()
        self._swept: dict[int, int] = {}
        self._released = int.from_bytes(maps["shared"].get(_RELEASED) or b"", "little")

    def begin(self, ifindex: int, slot: int) -> None:
        """From here on `ifindex` is the slot's."""
        with self._lock:
            self._slots[ifindex] = slot
            self._swept[ifindex] = int.from_bytes(self._maps["swept"].get(_number(ifindex)) or b"", "little")

    def recount(self) -> None:
        """Counts anew what there is: an earlier server may have died after it removed flows and before it said so."""
        opened = {i: opened_of(self._maps["meters"].get(_number(i)) or METER) for i in self._slots}
        taken = int.from_bytes(self._maps["shared"].get(_TAKEN) or b"", "little")
        counts, shared = dict.fromkeys(self._slots, 0), 0
        for packed, value in self._maps["flows"].entries():
            ifindex = FlowKey.unpack(packed).ifindex
            if ifindex in counts:
                counts[ifindex] += 1
            shared += FlowRecord.unpack(value).shared
        with self._lock:
            self._released = max(0, taken - shared)
            self._maps["shared"].put(_RELEASED, self._released.to_bytes(8, "little"))
            for ifindex, count in counts.items():
                self._swept[ifindex] = max(0, opened[ifindex] - count)
                self._maps["swept"].put(_number(ifindex), self._swept[ifindex].to_bytes(8, "little"))

    def end(self, ifindex: int) -> None:
        """The link is gone: the next sweep gives its flows and forgets it."""
        with self._lock:
            self._gone.add(ifindex)

    def told(self, events: Sequence[bytes]) -> list[SlotFlow]:
        past = self._past()
        return [_from_event(EventRecord.unpack(event), past) for event in events]

    def sweep(self) -> list[SlotFlow]:
        with self._lock:
            gone = set(self._gone)
        now, past, found, counts, shared = _now(), self._past(), [], dict[int, int](), 0
        for packed, value in self._maps["flows"].entries():
            key, flow = FlowKey.unpack(packed), FlowRecord.unpack(value)
            slot = self._slots.get(key.ifindex)
            known = slot is not None and key.ifindex not in gone
            if known and now - flow.seen < _patience(key, flow):
                continue
            if not self._maps["flows"].remove(packed):
                continue
            counts[key.ifindex] = counts.get(key.ifindex, 0) + 1
            shared += flow.shared
            if slot is not None:
                found.append(_from_flow(slot, key, flow, past))
        with self._lock:
            self._released += shared
            self._maps["shared"].put(_RELEASED, self._released.to_bytes(8, "little"))
            for ifindex, count in counts.items():
                if ifindex in self._slots and ifindex not in gone:
                    self._swept[ifindex] += count
                    self._maps["swept"].put(_number(ifindex), self._swept[ifindex].to_bytes(8, "little"))
            for ifindex in gone:
                self._gone.discard(ifindex)
                self._slots.pop(ifindex, None)
                self._swept.pop(ifindex, None)
        return found

    def _past(self) -> float:
        """Unix seconds at boot."""
        return self._clock.now() - _now() / _SECOND


def _patience(key: FlowKey, flow: FlowRecord) -> int:
    """Nanoseconds for which a flow that says nothing is kept."""
    if flow.state & (_RESET | _ENDED) or (flow.state & _FIN_OUT and flow.state & _FIN_IN):
        seconds = 5
    elif key.protocol == "tcp":
        seconds = 3600 if flow.state & _ANSWERED else 130
    elif key.protocol == "udp":
        seconds = 5 if key.far_port == _DNS else 60
    else:
        seconds = 15
    return seconds * _SECOND


def _from_event(event: EventRecord, past: float) -> SlotFlow:
    if event.reason == OVER:
        return SlotFlow(
            event.slot,
            Flow(
                at=past + event.begun / _SECOND, ended=past + event.at / _SECOND, verdict="allowed", address=event.far,
                port=0 if event.protocol == "icmp" else event.far_port, protocol=event.protocol, bytes_out=event.bytes_out,
                bytes_in=event.bytes_in,
            ),
        )  # fmt: skip
    return SlotFlow(
        event.slot,
        Flow(
            at=past + event.at / _SECOND, verdict="refused" if event.reason else "allowed", address=event.far,
            port=0 if event.protocol == "icmp" else event.far_port, protocol=event.protocol, reason=REASONS[event.reason],
            pid=event.pid or None, comm=event.comm,
        ),
    )  # fmt: skip


def _from_flow(slot: int, key: FlowKey, flow: FlowRecord, past: float) -> SlotFlow:
    return SlotFlow(
        slot,
        Flow(
            at=past + flow.begun / _SECOND, ended=past + flow.seen / _SECOND, verdict="allowed", address=key.far,
            port=0 if key.protocol == "icmp" else key.far_port, protocol=key.protocol, bytes_out=flow.bytes_out,
            bytes_in=flow.bytes_in, pid=flow.pid or None, comm=flow.comm,
            reason=REASONS[10] if flow.state & _ENDED else "",
        ),
    )  # fmt: skip


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")
