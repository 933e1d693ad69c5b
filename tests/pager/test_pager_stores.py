"""Stores that are away, lie, or change; what a reader gets then, and what is counted."""

import errno
import time
from pathlib import Path

import pytest

from pager.place import Made, Pager, Reader, Refused, away, make_layer, until

pytestmark = pytest.mark.root

SHORT = {"wait_seconds": 1.0}


def damage(path: Path) -> bytes:
    """Changes each block of a pack a little; gives what it was."""
    before = path.read_bytes()
    bad = bytearray(before)
    for at in range(100, len(bad), 512):
        bad[at] ^= 0x40
    path.write_bytes(bad)
    return before


def test_a_store_that_stays_away_is_an_error_after_its_time(pager: Pager, made: Made, store: Path) -> None:
    target = pager.mount(made, limits=SHORT)
    with away(store):
        began = time.monotonic()
        got = Reader(target / "small1").result()
        took = time.monotonic() - began
    assert isinstance(got, OSError)
    assert got.errno == errno.EIO
    assert 0.9 < took < 10
    stats = pager.stats(made)
    assert stats["errors"] >= 1
    assert stats["store_errors"] >= 1
    assert stats["bytes_filled"] == 0
    assert (target / "small1").read_bytes() == made.files["small1"], "it is back"


def test_a_store_that_comes_back_in_time_is_no_error(pager: Pager, made: Made, store: Path) -> None:
    target = pager.mount(made)
    with away(store):
        reader = Reader(target / "odd")
        until(lambda: pager.stats(made)["store_errors"] >= 2)
        assert reader.is_alive()
    assert reader.result() == made.files["odd"]
    assert pager.stats(made)["errors"] == 0


def test_wrong_bytes_are_refused(pager: Pager, made: Made) -> None:
    target = pager.mount(made, limits=SHORT)
    for pack in made.packs():
        damage(pack)
    for name in ("small5", "large"):
        got = Reader(target / name).result()
        assert isinstance(got, OSError)
        assert got.errno == errno.EIO
    stats = pager.stats(made)
    assert stats["wrong_bytes"] >= 3
    assert stats["bytes_filled"] == 0
    assert stats["errors"] >= 2


def test_wrong_bytes_are_fetched_again(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    pack = made.packs()[0]
    before = damage(pack)
    for name in ("small5", "odd"):
        assert isinstance(Reader(target / name).result(), OSError)
    assert pager.stats(made)["refetched"] >= 2
    pack.write_bytes(before)
    for name, content in made.files.items():
        assert (target / name).read_bytes() == content


def test_packs_that_are_gone_or_short_are_errors_at_once(pager: Pager, made: Made) -> None:
    target = pager.mount(made)
    for pack in made.packs():
        pack.write_bytes(pack.read_bytes()[:50])
    began = time.monotonic()
    assert isinstance(Reader(target / "large").result(), OSError)
    for pack in made.packs():
        pack.unlink()
    assert isinstance(Reader(target / "odd").result(), OSError)
    assert time.monotonic() - began < 15


def test_a_map_that_calls_a_chunk_zeros_does_not_make_it_so(pager: Pager, made: Made) -> None:
    lied = dict(made.parts)
    rows = len(made.lengths) * 16
    head, table = lied["map"][:-rows], bytearray(lied["map"][-rows:])
    for chunk in made.chunks_of("odd"):
        table[chunk * 16 : chunk * 16 + 4] = b"\xff" * 4
    lied["map"] = head + bytes(table)
    liar = Made(made.hex, made.files, made.offsets, made.lengths, made.store, lied)
    target = pager.mount(liar)
    assert isinstance(Reader(target / "odd").result(), OSError)
    assert (target / "large").read_bytes() == made.files["large"]


def test_a_map_that_leads_elsewhere_yields_nothing_wrong(pager: Pager, made: Made) -> None:
    swapped = dict(made.parts)
    rows = len(made.lengths) * 16
    head, table = swapped["map"][:-rows], swapped["map"][-rows:]
    swapped["map"] = head + table[16:] + table[:16]
    liar = Made(made.hex, made.files, made.offsets, made.lengths, made.store, swapped)
    target = pager.mount(liar)
    for name in ("small5", "large", "odd"):
        assert isinstance(Reader(target / name).result(), OSError)
    assert pager.stats(made)["bytes_filled"] == 0


def test_a_layer_whose_files_are_not_its_own_is_not_attached(pager: Pager, made: Made) -> None:
    for name in ("manifest.json", "index", "map"):
        for change in (lambda b: b[:-1], lambda b: b + b"x" * 16, lambda b: b"", lambda b: bytes([b[0] ^ 1]) + b[1:]):
            broken = Made(made.hex, {}, {}, [], made.store, {**made.parts, name: change(made.parts[name])})
            folder = pager.folder(broken)
            folder.mkdir(parents=True, exist_ok=True)
            for part, content in broken.parts.items():
                (folder / part).write_bytes(content)
            with pytest.raises(Refused, match="bad_layer"):
                pager.attach(broken)
    assert pager.ask("stats")["layers"] == {}


def test_another_store_by_a_new_name_is_used(pager: Pager, made: Made, store: Path, tmp_path: Path) -> None:
    target = pager.mount(made)
    with away(store):
        reader = Reader(target / "odd")
        until(lambda: pager.stats(made)["store_errors"] >= 1)
        assert reader.is_alive()
        other = tmp_path / "other"
        make_layer(other, made.files)
        pager.ask("store", layer=made.hex, store={"url": f"file://{other}"})
        assert Reader(target / "small6").result() == made.files["small6"]
    assert reader.result() == made.files["odd"]


def test_stores_of_no_known_kind_are_refused(pager: Pager, made: Made) -> None:
    for url in ("ftp://host/x", "file://relative", "", "/just/a/path"):
        with pytest.raises(Refused, match="bad_store"):
            pager.attach(made, store={"url": url})
