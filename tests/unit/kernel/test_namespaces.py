"""Namespaces made ahead: how many, for whom, and that none is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.kernel import namespaces
from dsec.kernel.errors import KernelError
from dsec.kernel.namespaces import NamespacePool, Namespaces
from dsec.kernel.uids import Slots

WAIT = 5.0


class Maker:
    """Stands for the kernel: sets of descriptors of /dev/null, counted."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.changed = threading.Condition()
        self.error: KernelError | None = None

    def __call__(self, slot: int) -> Namespaces:
        with self.changed:
            if self.error is not None:
                error, self.error = self.error, None
                self.changed.notify_all()
                raise error
            self.made.append(slot)
            self.changed.notify_all()
        return Namespaces(slot, *(os.open("/dev/null", os.O_RDONLY) for _ in range(4)))

    def wait(self, enough: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(enough, WAIT)


def eventually(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    maker = Maker()
    monkeypatch.setattr(namespaces, "make_namespaces", maker)
    return maker


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    slots = Slots("/a", tmp_path)
    slots.open()
    yield slots
    slots.close()
    assert list(tmp_path.iterdir()) == [], "a slot is still held"


def test_a_set_made_ahead_goes_with_its_slot(maker: Maker, slots: Slots) -> None:
    pool = NamespacePool(slots, low=2, high=4)
    pool.open()
    eventually(lambda: pool.ready == 4)  # made is not yet ready: one taken between the two is made up for
    slot = pool.take_slot("one")
    assert slot == maker.made[0]
    made = pool.namespaces(slot, "one")
    assert made.slot == slot
    made.close()
    pool.give_back(slot, "one")
    pool.close()
    assert len(maker.made) == 4


def test_it_is_refilled_below_the_low_mark(maker: Maker, slots: Slots) -> None:
    pool = NamespacePool(slots, low=2, high=4)
    pool.open()
    maker.wait(lambda: len(maker.made) == 4)
    taken = [pool.take_slot(name) for name in ("one", "two", "three")]
    maker.wait(lambda: len(maker.made) == 7)
    for slot, name in zip(taken, ("one", "two", "three"), strict=True):
        pool.give_back(slot, name)
    pool.close()


def test_with_none_ready_one_is_made_on_demand(maker: Maker, slots: Slots) -> None:
    pool = NamespacePool(slots, low=0, high=0)
    pool.open()
    slot = pool.take_slot("one")
    pool.namespaces(slot, "one").close()
    assert maker.made == [slot]
    pool.give_back(slot, "one")
    pool.give_back(slot, "one")
    pool.close()


def test_a_reserved_set_that_was_never_used_is_let_go(maker: Maker, slots: Slots) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = NamespacePool(slots, low=1, high=2)
    pool.open()
    maker.wait(lambda: len(maker.made) == 2)
    pool.take_slot("one")
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refusal_is_remembered_and_its_slot_comes_back(maker: Maker, slots: Slots) -> None:
    maker.error = KernelError("clone3", "user namespace", 28)
    pool = NamespacePool(slots, low=1, high=2)
    pool.open()
    maker.wait(lambda: maker.error is None)
    pool.close()
    assert pool.failure is not None
    assert pool.failure.errno == 28


class FakeLinker:
    """Stands for the fabric: which slots have a link. `error`: what the next one meets."""

    def __init__(self) -> None:
        self.linked: set[int] = set()
        self.removals: list[tuple[int, ...]] = []
        self.error: KernelError | None = None
        self.changed = threading.Condition()

    def prepare(self, slot: int, netns: int) -> None:
        with self.changed:
            self.changed.notify_all()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.linked.add(slot)

    def unlink(self, *slots: int) -> None:
        with self.changed:
            self.changed.notify_all()
            self.removals.append(slots)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.linked.difference_update(slots)

    def wait(self, enough: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(enough, WAIT)


def test_links_are_made_ahead_from_the_first_that_was_asked_for(maker: Maker, slots: Slots) -> None:
    linker = FakeLinker()
    pool = NamespacePool(slots, low=1, high=2, linker=linker)
    pool.open()
    maker.wait(lambda: len(maker.made) == 2)
    assert linker.linked == set()
    first = pool.take_slot("one", linked=True)
    assert first not in linker.linked, "the first is linked by its create"
    linker.wait(lambda: len(linker.linked) == 2)
    maker.wait(lambda: pool.ready == 4)
    second = pool.take_slot("two", linked=True)
    assert second in linker.linked
    plain = pool.take_slot("three")
    assert plain not in linker.linked
    pool.namespaces(second, "two").close()
    for slot, name, with_link in ((first, "one", True), (second, "two", True), (plain, "three", False)):
        pool.give_back(slot, name, linked=with_link)
    pool.close()
    assert linker.linked == set()
    assert plain not in [slot for slots in linker.removals for slot in slots]


def test_links_given_back_are_removed_many_at_once_and_nobody_waits(maker: Maker, slots: Slots) -> None:
    linker = FakeLinker()
    pool = NamespacePool(slots, high=0, linker=linker)
    pool.open()
    taken = {pool.take_slot(f"box{number}", linked=True): f"box{number}" for number in range(300)}
    linker.linked.update(taken)
    for slot, name in taken.items():
        pool.give_back(slot, name, linked=True)
        pool.give_back(slot, name, linked=True)
    linker.wait(lambda: not linker.linked)
    pool.close()
    assert sorted(slot for slots in linker.removals for slot in slots) == sorted(taken), "each once"
    assert len(linker.removals) <= 5


def test_a_slot_is_nobodys_until_its_link_is_removed(maker: Maker, slots: Slots) -> None:
    linker = FakeLinker()
    linker.error = KernelError("unlink", "netlink", 16)
    pool = NamespacePool(slots, high=0, linker=linker)
    pool.open()
    slot = pool.take_slot("one", linked=True)
    linker.linked.add(slot)
    pool.give_back(slot, "one", linked=True)
    linker.wait(lambda: linker.error is None)
    assert not slots.hold(slot, "two"), "refused once, it is still being removed"
    linker.wait(lambda: not linker.linked)
    pool.close()
    assert slots.hold(slot, "two")
    slots.release(slot, "two")


def test_a_link_that_cannot_be_made_loses_neither_slot_nor_set(maker: Maker, slots: Slots) -> None:
    linker = FakeLinker()
    linker.error = KernelError("link", "netlink", 95)
    pool = NamespacePool(slots, low=1, high=1, linker=linker)
    pool.open()
    taken = pool.take_slot("one", linked=True)
    linker.wait(lambda: linker.error is None)
    pool.give_back(taken, "one")
    pool.close()
    assert linker.linked == set()
