"""Taking local data away again, and what a host that went down leaves."""

import os
from pathlib import Path

import pytest

from pager.place import Made, Pager, Refused, detached, forget_pages, until

pytestmark = pytest.mark.root


def test_evicted_chunks_give_their_disk_back_and_are_fetched_again(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "large").read_bytes() == made.files["large"]
    assert (target / "odd").read_bytes() == made.files["odd"]
    pager.unmount(target)
    data = pager.folder(made) / "data"
    full = data.stat().st_blocks
    wanted = made.chunks_of("large")
    freed = until_evicted(pager, made, [(wanted.start, wanted.stop)])
    assert freed == sum(made.lengths[n] for n in wanted)
    assert full - data.stat().st_blocks >= freed // 512 - 64
    before = pager.stats(made)["bytes_filled"]
    target = pager.mount(made)
    assert (target / "odd").read_bytes() == made.files["odd"]
    assert pager.stats(made)["bytes_filled"] == before, "the other file stayed"
    assert (target / "large").read_bytes() == made.files["large"]
    assert pager.stats(made)["bytes_filled"] == before + freed


def until_evicted(pager: Pager, made: Made, ranges: list[tuple[int, int]], **more: object) -> int:
    freed: list[int] = []

    def done() -> bool:
        try:
            freed.append(pager.ask("evict", layer=made.hex, ranges=ranges, **more)["bytes"])
        except Refused as refused:
            # An unmount returns before the kernel has let go of the last file.
            assert refused.code == "busy"
            return False
        return True

    until(done)
    return freed[0]


def test_nothing_is_taken_from_under_a_mount_unless_asked_and_quiet(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "large").read_bytes() == made.files["large"]
    everything = [(0, len(made.lengths))]
    with pytest.raises(Refused, match="busy"):
        pager.ask("evict", layer=made.hex, ranges=everything)
    assert pager.ask("evict", layer=made.hex, ranges=everything, mounted=True)["bytes"] == 0
    freed = pager.ask("evict", layer=made.hex, ranges=everything, mounted=True, quiet_seconds=0)["bytes"]
    assert freed >= len(made.files["large"])
    assert (target / "large").read_bytes() == made.files["large"], "what the page cache has is still right"
    forget_pages(target)
    assert (target / "large").read_bytes() == made.files["large"]


def test_a_layer_that_became_whole_can_be_evicted_and_asks_again(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    pager.ask("fill", layer=made.hex)
    until(lambda: pager.stats(made)["whole"])
    wanted = made.chunks_of("large")
    freed = pager.ask("evict", layer=made.hex, ranges=[(wanted.start, wanted.stop)], mounted=True, quiet_seconds=0)[
        "bytes"
    ]
    assert freed == sum(made.lengths[n] for n in wanted)
    assert (pager.folder(made) / "have").exists()
    assert not pager.stats(made)["whole"]
    forget_pages(target)
    for name, content in made.files.items():
        assert (target / name).read_bytes() == content
    until(lambda: pager.stats(made)["whole"])


def test_a_layer_that_was_whole_when_mounted_is_not_taken_from(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    pager.ask("fill", layer=made.hex)
    until(lambda: pager.stats(made)["whole"])
    pager.unmount(target)
    until(lambda: detached(pager, made))
    assert pager.attach(made)["whole"]
    target = pager.mount(made)
    everything = [(0, len(made.lengths))]
    with pytest.raises(Refused, match="busy"):
        pager.ask("evict", layer=made.hex, ranges=everything, mounted=True, quiet_seconds=0)
    assert (target / "large").read_bytes() == made.files["large"]
    assert pager.stats(made)["events"] == 0
    pager.unmount(target)
    assert until_evicted(pager, made, everything) > 0
    target = pager.mount(made)
    for name, content in made.files.items():
        assert (target / name).read_bytes() == content


def test_after_a_reboot_what_is_here_is_checked_before_it_is_used(pager: Pager, made: Made, store: Path) -> None:
    target = pager.mount(made)
    assert (target / "large").read_bytes() == made.files["large"]
    assert (target / "odd").read_bytes() == made.files["odd"]
    pager.unmount(target)
    until(lambda: detached(pager, made))
    folder = pager.folder(made)
    (folder / "have.boot").write_text("another boot\n")
    lost = made.offsets["large"] + 5 * 32768
    with (folder / "data").open("r+b", buffering=0) as data:
        os.pwrite(data.fileno(), bytes(4096), lost)
    before = pager.attach(made)
    assert not before["whole"]
    target = pager.mount(made)
    filled = pager.stats(made)["bytes_filled"]
    for name in ("large", "odd"):
        assert (target / name).read_bytes() == made.files[name]
    after = pager.stats(made)
    assert after["bytes_filled"] - filled == 32768, "only the chunk that did not survive is fetched"


def test_data_that_is_gone_is_not_taken_for_zeros(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "odd").read_bytes() == made.files["odd"]
    pager.unmount(target)
    until(lambda: detached(pager, made))
    (pager.folder(made) / "data").unlink()
    target = pager.mount(made)
    assert (target / "odd").read_bytes() == made.files["odd"]


def test_what_the_local_disk_spoils_is_fetched_again(pager: Pager, made: Made) -> None:
    target = pager.mount(made, limits={"check_seconds": 0.0})
    assert (target / "odd").read_bytes() == made.files["odd"]
    before = pager.stats(made)
    with (pager.folder(made) / "data").open("r+b", buffering=0) as data:
        os.pwrite(data.fileno(), b"spoilt", made.offsets["odd"] + 40_000)
    forget_pages(target)
    assert (target / "odd").read_bytes() == made.files["odd"]
    after = pager.stats(made)
    assert after["local_wrong"] == 1
    assert after["bytes_filled"] - before["bytes_filled"] == 32768
