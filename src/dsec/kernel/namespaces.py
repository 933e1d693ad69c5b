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

_AHEAD, _LEAVING = "ahead", "leaving"
_AGAIN = 1.0
_TOGETHER = 128
_GATHERING = 0.1

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
    def unlink(self, *slots: int) -> None: ...


class NamespacePool:
    """Slots of ids, and namespaces for them: between `low` and `high` sets are ready, refilled by a thread of its own.

    `high` 0 makes none ahead. With a `linker`, as many sets with a link are kept ready too, from the first time that one was asked for. A slot
    belongs to a holder (a sandbox's name) from `take_slot` or `hold` until `give_back`; one with a link is nobody's until that is removed,
    by a second thread, many at once, since each removal has the kernel wait for all CPUs.
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
        self._filler: threading.Thread | None = None
        self._unlinker: threading.Thread | None = None
        self._leaving: deque[int] = deque()
        self._emptied = False

    @property
    def ready(self) -> int:
        """Sets made ahead and not taken yet."""
        return sum(len(shelf) for shelf in self._shelves.values())

    def open(self) -> None:
        """Starts filling."""
        self._closing = self._emptied = False
        if self._high > 0:
            self._filler = threading.Thread(target=self._fill, name="dsec-namespaces", daemon=True)
            self._filler.start()
        if self._linker is not None:
            self._unlinker = threading.Thread(target=self._unlink, name="dsec-unlink", daemon=True)
            self._unlinker.start()

    def close(self) -> None:
        """Ends the threads and lets go of every set that no sandbox was started with; returns when all links given back are removed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._filler is not None:
            self._filler.join()
        with self._changed:
            for linked, shelf in self._shelves.items():
                for made in shelf:
                    self._discard(made, linked, _AHEAD)
            for holder, (made, linked) in self._kept.items():
                self._discard(made, linked, holder)
            self._shelves = {False: deque()}
            self._kept.clear()
            self._emptied = True
            self._changed.notify_all()
        if self._unlinker is not None:
            self._unlinker.join()
        self._filler = self._unlinker = None

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

    def give_back(self, slot: int, holder: str, *, linked: bool = False) -> None:
        """The holder is gone. Done when it holds nothing. `linked`: the slot has, or may have, a link, which is removed later."""
        with self._changed:
            kept = self._kept.pop(holder, None)
            if kept is None:
                self._release(slot, linked, holder)
            else:
                self._discard(*kept, holder)

    @property
    def failure(self) -> KernelError | None:
        """Why the last attempt to make a set ahead failed; None if it did not."""
        return self._failure

    def _discard(self, made: Namespaces, linked: bool, holder: str) -> None:
        made.close()
        self._release(made.slot, linked, holder)

    def _release(self, slot: int, linked: bool, holder: str) -> None:
        if not linked or self._linker is None:
            self._slots.release(slot, holder)
        elif self._slots.pass_on(slot, holder, _LEAVING):
            self._leaving.append(slot)
            self._changed.notify_all()

    def _unlink(self) -> None:
        """Removes links given back, and frees their slots; at the end all that are left. What the kernel refuses is tried again."""
        while slots := self._wait_for_leaving():
            try:
                assert self._linker is not None
                self._linker.unlink(*slots)
            except KernelError as error:
                _log.error("links of %d sandboxes cannot be removed yet: %s", len(slots), error)
                with self._changed:
                    if self._emptied:
                        return
                    self._leaving.extend(slots)
                    self._changed.wait_for(lambda: self._emptied, timeout=_AGAIN)
                continue
            with self._changed:
                for slot in slots:
                    self._slots.release(slot, _LEAVING)

    def _wait_for_leaving(self) -> list[int]:
        """Slots to unlink together; none at the end. Waits for more of them a little, for one costs what many do."""
        with self._changed:
            self._changed.wait_for(lambda: self._leaving or self._emptied)
            self._changed.wait_for(lambda: len(self._leaving) >= _TOGETHER or self._emptied, timeout=_GATHERING)
            return [self._leaving.popleft() for _ in range(min(_TOGETHER, len(self._leaving)))]

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
