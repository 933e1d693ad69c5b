"""Slots of ids: no overlap, no early reuse, no undo of somebody else's claim."""

from pathlib import Path

import pytest

from dsec.kernel import uids
from dsec.kernel.errors import KernelError
from dsec.kernel.uids import IDS, Slots, agent_id, base_id, slot_of_agent


def test_ranges_do_not_overlap_and_aether_is_outside_its_own() -> None:
    for slot in (0, 1, 255, 256, 60_000):
        assert agent_id(slot) == base_id(slot) + IDS
        assert base_id(slot + 1) == agent_id(slot) + 1
        assert slot_of_agent(agent_id(slot)) == slot
        assert slot_of_agent(base_id(slot)) is None
        assert agent_id(slot) < 2**32 - 2
    assert slot_of_agent(0) is None


def test_two_servers_never_share_a_slot(tmp_path: Path) -> None:
    first, second = Slots("/a", tmp_path), Slots("/b", tmp_path)
    first.open()
    second.open()
    mine = {first.take("x") for _ in range(300)}
    theirs = {second.take("y") for _ in range(300)}
    assert len(mine) == len(theirs) == 300
    assert not mine & theirs
    first.close()
    second.close()


def test_a_server_gets_its_own_block_back_and_gives_up_what_is_unused(tmp_path: Path) -> None:
    slots = Slots("/a", tmp_path)
    slots.open()
    slot = slots.take("x")
    slots.close()
    assert [p.read_text() for p in tmp_path.iterdir()] == ["/a"]
    again = Slots("/a", tmp_path)
    again.open()
    assert again.hold(slot, "x")
    assert slot not in {again.take(str(n)) for n in range(255)}
    again.close()


def test_nothing_stays_when_nothing_is_held(tmp_path: Path) -> None:
    slots = Slots("/a", tmp_path)
    slots.open()
    slots.release(slots.take("x"), "x")
    slots.close()
    assert list(tmp_path.iterdir()) == []


def test_only_the_holder_can_release(tmp_path: Path) -> None:
    slots = Slots("/a", tmp_path)
    slots.open()
    slot = slots.take("new")
    slots.release(slot, "old")
    assert not slots.hold(slot, "old")
    slots.pass_on(slot, "old", "thief")
    assert slots.hold(slot, "new")
    slots.close()


def test_a_released_slot_is_reused_last(tmp_path: Path) -> None:
    slots = Slots("/a", tmp_path)
    slots.open()
    slot = slots.take("x")
    slots.release(slot, "x")
    assert slots.take("y") != slot
    slots.close()


def test_a_dead_servers_block_is_left_alone_while_its_sandboxes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0").write_text("/dead")
    monkeypatch.setattr(uids, "_in_use", lambda block: True)
    slots = Slots("/b", tmp_path)
    slots.open()
    slot = slots.take("x")
    assert slot >= 256
    slots.release(slot, "x")
    slots.close()
    monkeypatch.setattr(uids, "_in_use", lambda block: False)
    slots = Slots("/b", tmp_path)
    slots.open()
    assert slots.take("x") < 256
    slots.close()


def test_the_end_of_all_ids_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "_BLOCKS", 1)
    slots = Slots("/a", tmp_path)
    slots.open()
    for number in range(256):
        slots.take(str(number))
    with pytest.raises(KernelError, match="claim ids"):
        slots.take("one more")
    slots.close()
