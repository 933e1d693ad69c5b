"""What a reader of a layer that is not here yet gets, and what it costs."""

import random
from pathlib import Path

import pytest

from pager.place import Made, Pager, Reader, Refused, detached, forget_pages, make_layer, until

pytestmark = pytest.mark.root


def test_every_file_reads_as_it_is_in_the_layer(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    for name, content in made.files.items():
        assert (target / name).read_bytes() == content, name


def test_only_what_is_touched_is_fetched(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    name = "small3"
    assert (target / name).read_bytes() == made.files[name]
    stats = pager.stats(made)
    zeros = len(made.chunks_of("zeros"))
    assert stats["present"] == len(made.chunks_of(name)) + zeros
    assert stats["bytes_filled"] == sum(made.lengths[n] for n in made.chunks_of(name))
    assert stats["fetches"] == 1
    assert stats["errors"] == stats["refetched"] == 0
    data = pager.folder(made) / "data"
    assert data.stat().st_blocks * 512 < 64 * 1024


def test_zeros_are_never_fetched(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "zeros").read_bytes() == made.files["zeros"]
    assert pager.stats(made)["fetches"] == 0


def test_a_chunk_is_fetched_once_however_many_want_it(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    readers = [Reader(target / "large") for _ in range(64)]
    assert all(reader.result() == made.files["large"] for reader in readers)
    stats = pager.stats(made)
    wanted = made.chunks_of("large")
    assert stats["chunks_filled"] == len(wanted)
    assert stats["bytes_filled"] == sum(made.lengths[n] for n in wanted)


@pytest.mark.slow
def test_memory_does_not_grow_with_what_is_read(pager: Pager, store: Path) -> None:
    big = make_layer(store, {f"f{n}": random.Random(n).randbytes(4_000_000) for n in range(40)})
    target = pager.mount(big)
    readers = [Reader(target / name) for name in big.files for _ in range(4)]
    assert all(reader.result() == big.files[reader.path.name] for reader in readers)
    status = Path(f"/proc/{pager.ask('hello', version=1)['pid']}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    assert int(peak.split()[1]) < 64 * 1024, peak


def test_a_whole_layer_asks_nothing_more(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    pager.ask("fill", layer=made.hex)
    until(lambda: pager.stats(made)["whole"])
    assert not (pager.folder(made) / "have").exists()
    before = pager.stats(made)["events"]
    if pager.mechanism == "fuse":
        # A mount over FUSE goes on asking; the next one is of the data file itself.
        pager.unmount(target)
        target = pager.mount(made)
    for _ in range(2):
        for name, content in made.files.items():
            assert (target / name).read_bytes() == content
        forget_pages(target)
    assert pager.stats(made)["events"] == before


def test_what_was_read_stays_read_without_the_pager_being_asked(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "odd").read_bytes() == made.files["odd"]
    before = pager.stats(made)["events"]
    assert (target / "odd").read_bytes() == made.files["odd"]
    assert pager.stats(made)["events"] == before


def test_a_present_range_costs_no_fetch(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "odd").read_bytes() == made.files["odd"]
    forget_pages(target)
    before = pager.stats(made)
    assert (target / "odd").read_bytes() == made.files["odd"]
    after = pager.stats(made)
    assert after["fetches"] == before["fetches"]
    assert after["waits"] == before["waits"]


def test_prefetched_chunks_are_not_waited_for(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    wanted = made.chunks_of("large")
    pager.ask("prefetch", layer=made.hex, chunks=[(wanted.start, wanted.stop)], depth=4)
    zeros = len(made.chunks_of("zeros"))
    until(lambda: pager.stats(made)["present"] == len(wanted) + zeros)
    fetches = pager.stats(made)["fetches"]
    assert fetches < len(wanted) / 2, "neighbours were not fetched together"
    assert (target / "large").read_bytes() == made.files["large"]
    assert pager.stats(made)["waits"] == 0
    assert pager.stats(made)["fetches"] == fetches


def test_a_trace_is_the_order_of_first_touches(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert pager.ask("trace", layer=made.hex, on=True)["chunks"] == []
    order = ["small5", "odd", "small1"]
    for name in order:
        assert (target / name).read_bytes() == made.files[name]
    found = pager.ask("trace", layer=made.hex, on=False)["chunks"]
    assert len(found) == len(set(found))
    firsts = [found.index(made.chunks_of(name).start) for name in order]
    assert firsts == sorted(firsts)
    assert set(found) >= {chunk for name in order for chunk in made.chunks_of(name)}
    assert pager.ask("trace", layer=made.hex, on=False)["chunks"] == []


def test_a_layer_is_let_go_of_only_when_nothing_has_it_mounted(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    assert (target / "small1").read_bytes() == made.files["small1"]
    with pytest.raises(Refused, match="busy"):
        pager.ask("detach", layer=made.hex)
    pager.unmount(target)
    until(lambda: detached(pager, made))
    with pytest.raises(Refused, match="unknown_layer"):
        pager.ask("stats", layer=made.hex)
    assert (pager.mount(made) / "small1").read_bytes() == made.files["small1"]
    assert pager.stats(made)["fetches"] == 0


def test_attaching_again_is_the_same(pager: Pager, made: Made, tmp_path: Path) -> None:
    first = pager.attach(made)
    assert pager.attach(made) == first
    other = "fuse" if pager.mechanism == "fanotify" else "fanotify"
    with pytest.raises(Refused, match="busy"):
        pager.attach(made, mechanism=other)
