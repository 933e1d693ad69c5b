"""Namespaces made ahead, off the way of a create: each set with the slot of ids that its user namespace maps."""

import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dsec import _native
from dsec.kernel.errors import KernelError, from_kernel
from dsec.kernel.uids import Slots, agent_id, base_id

__all__ = ["Linker", "NamespacePool", "Namespaces", "make_namespaces"]

_AHEAD = "ahead"
_AGAIN = 1.0

_log = logging.getLogger("dsec.kernel")


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Descriptors of one sandbox's namespaces. The user namespace owns the other three; aether's id owns it."""

    slot: int
    user: int
    net: int
    ipc: int
    uts: int

    def close(self) -> None:
        for fd in (self.user, self.net, self.ipc, self.uts):
            os.close(fd)


def make_namespaces(slot: int) -> Namespaces:
    """Makes the namespaces for the ids of `slot`: about half a millisecond, most of it the network. Raises KernelError."""
    fds = from_kernel(_native.make_namespaces)(base_id(slot), agent_id(slot))
    return Namespaces(slot, *fds)


class Linker(Protocol):
    """What gives namespaces a link ahead, and takes it away: a slot and the descriptor of its network namespace."""

    def prepare(self, slot: int, netns: int) -> None: ...
    def unlink(self, slot: int) -> None: ...


class NamespacePool:
    """Slots of ids, and namespaces for them: between `low` and `high` sets are ready, refilled by a thread of its own.

    `high` 0 makes none ahead. With a `linker`, as many sets with a link are kept ready too, from the first time that one was asked for. A slot
    belongs to a holder (a sandbox's name) from `take_slot` or `hold` until `give_back`.
    """

    def __init__(self, slots: Slots, *, low: int = 16, high: int = 48, linker: Linker | None = None) -> None:
        self._slots = slots
        self._low = low
        self._high = high
        self._linker = linker
        self._shelves: dict[bool, deque[Namespaces]] = {False: deque()}
        self._kept: dict[str, tuple[Namespaces, bool]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._failure: KernelError | None = None
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> int:
        """Sets made ahead and not taken yet."""
        return sum(len(shelf) for shelf in self._shelves.values())

    def open(self) -> None:
        """Starts filling."""
        self._closing = False
        if self._high > 0:
            self._thread = threading.Thread(target=self._fill, name="dsec-namespaces", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and lets go of every set that no sandbox was started with."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._changed:
            for linked, shelf in self._shelves.items():
                for made in shelf:
                    self._discard(made, linked, _AHEAD)
            for holder, (made, linked) in self._kept.items():
                self._discard(made, linked, holder)
            self._shelves = {False: deque()}
            self._kept.clear()

    def take_slot(self, holder: str, *, linked: bool = False) -> int:
        """A slot for `holder`, with a ready set if there is one. Never waits. Raises KernelError ENOSPC."""
        with self._changed:
            shelf = self._shelves.setdefault(linked, deque())
            if not shelf:
                self._changed.notify_all()
                return self._slots.take(holder)
            made = shelf.popleft()
            self._kept[holder] = made, linked
            self._slots.pass_on(made.slot, _AHEAD, holder)
            if len(shelf) < self._low:
                self._changed.notify_all()
            return made.slot

    def namespaces(self, slot: int, holder: str) -> Namespaces:
        """The holder's set, made now if none was ready; the caller closes it. Raises KernelError."""
        with self._changed:
            kept = self._kept.pop(holder, None)
        return kept[0] if kept else make_namespaces(slot)

    def hold(self, slot: int, holder: str) -> bool:
        """Marks a slot as the holder's after a restart; False where another has it."""
        with self._changed:
            return self._slots.hold(slot, holder)

    def give_back(self, slot: int, holder: str) -> None:
        """The holder is gone. Done when it holds nothing."""
        with self._changed:
            kept = self._kept.pop(holder, None)
            if kept is None:
                self._slots.release(slot, holder)
            else:
                self._discard(*kept, holder)

    @property
    def failure(self) -> KernelError | None:
        """Why the last attempt to make a set ahead failed; None if it did not."""
        return self._failure

    def _discard(self, made: Namespaces, linked: bool, holder: str) -> None:
        if linked and self._linker is not None:
            self._linker.unlink(made.slot)
        made.close()
        self._slots.release(made.slot, holder)

    def _fill(self) -> None:
        while (linked := self._wait_for_need()) is not None:
            with self._changed:
                try:
                    slot = self._slots.take(_AHEAD)
                except KernelError as error:
                    self._failed(error)
                    continue
            try:
                made = self._make(slot, linked)
            except KernelError as error:
                # Creates go on making their own sets, and report the same refusal to their callers.
                with self._changed:
                    self._slots.release(slot, _AHEAD)
                    self._failed(error)
                continue
            with self._changed:
                if self._failure is not None:
                    _log.warning("namespaces can be made again")
                self._failure = None
                self._shelves[linked].append(made)

    def _failed(self, error: KernelError) -> None:
        """Tells the first of a row of failures, and waits before the next attempt."""
        if self._failure is None:
            _log.error("no namespaces can be made ahead: %s", error)
        self._failure = error
        self._changed.wait_for(lambda: self._closing, timeout=_AGAIN)

    def _make(self, slot: int, linked: bool) -> Namespaces:
        made = make_namespaces(slot)
        if linked and self._linker is not None:
            try:
                self._linker.prepare(slot, made.net)
            except KernelError:
                made.close()
                raise
        return made

    def _wait_for_need(self) -> bool | None:
        """Which kind is needed, with a link or without; None when closing. Once there are `high` of a kind, waits until there are
        fewer than `low`."""
        with self._changed:
            filling = [kind for kind, shelf in self._shelves.items() if 0 < len(shelf) < self._high]
            self._changed.wait_for(lambda: self._closing or filling or self._needed())
            return None if self._closing else (filling or self._needed())[0]

    def _needed(self) -> list[bool]:
        return [kind for kind, shelf in self._shelves.items() if len(shelf) < max(1, self._low)]
