"""Prune: what no name reaches goes, in two steps; what a push builds on meanwhile stays."""

from pathlib import Path

import pytest

from dsec.images.importing import Quiet
from dsec.images.stores.layout import GRACE_SECONDS, SAFE_SECONDS, Folder, Item, Store, named
from dsec.images.stores.opening import open_store
from dsec.images.stores.prune import Pruned, prune
from dsec.images.stores.transfer import Node, push_images
from dsec.model.errors import Conflict, ImageUnavailable
from imagekit import CLOCK, Shelf
from storekit import CONFIG, content, import_tree, options, pull_all, push_all, same_layer

FILES = {"a": content(1, 300_000), "b": content(2, 9_000)}
MORE = {"c": content(3, 400_000), "d": content(4, 100)}


class Later:
    """The clock, some seconds on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return CLOCK.now() + self.seconds

    def monotonic(self) -> float:
        return CLOCK.monotonic() + self.seconds

    def random(self, n: int) -> bytes:
        return CLOCK.random(n)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(options(f"file://{tmp_path}/store"), create=True)


async def push_later(shelf: Shelf, store: Store, name: str, seconds: float) -> int:
    """Pushes as somebody does after so many seconds; gives the number of chunks that were new."""
    place = Node(shelf.layers, shelf.names, Later(seconds), Quiet())
    return sum([layer.new_chunks async for p in push_images(place, store, [name], CONFIG) for layer in p.layers])


async def count(store: Store, folder: Folder) -> int:
    return len([stored async for stored in store.list(folder)])


async def test_two_steps(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    digest = import_tree(shelf, "keep", FILES, tmp_path)
    import_tree(shelf, "go", {**FILES, **MORE}, tmp_path)
    await push_all(shelf, store, ["keep"])
    kept = {folder: await count(store, folder) for folder in Folder if folder is not Folder.HEAD}
    await push_all(shelf, store, ["go"])
    assert await prune(store, CLOCK) == Pruned()
    await store.remove(named("go"))
    dry = await prune(store, CLOCK, dry_run=True)
    assert dry.marked > 0 and await count(store, Folder.CONDEMNED) == 0
    marked = await prune(store, CLOCK)
    assert (marked.items, marked.marked) == (0, dry.marked)
    assert await prune(store, Later(GRACE_SECONDS - 60)) == Pruned()
    gone = await prune(store, Later(GRACE_SECONDS + 60))
    assert (gone.layers, gone.items) == (1, dry.marked) and gone.freed_bytes > 0
    left = {folder: await count(store, folder) for folder in Folder if folder is not Folder.HEAD}
    assert left | {Folder.KNOWN: 0} == kept | {Folder.KNOWN: 0}
    other = Shelf(tmp_path / "other")
    await pull_all(other, store, ["keep"])
    assert same_layer(shelf, other, digest)
    # Nothing is believed of what went: all of it is stored anew.
    assert (await push_all(shelf, store, ["go"]))[0].layers[0].new_chunks > 0
    await pull_all(other, store, ["go"])


async def test_a_mark_goes_when_it_is_reached_again(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"])
    await store.remove(named("one"))
    assert (await prune(store, CLOCK)).marked > 0
    # Young marks: a push builds on what is there, and saves it.
    assert await push_later(shelf, store, "one", SAFE_SECONDS - 60) == 0
    assert await prune(store, Later(GRACE_SECONDS + 60)) == Pruned()
    assert await count(store, Folder.CONDEMNED) == 0
    await pull_all(Shelf(tmp_path / "other"), store, ["one"])


async def test_old_marks_are_left_alone_by_pushes(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    import_tree(shelf, "one", FILES, tmp_path)
    digest = import_tree(shelf, "two", {**FILES, "more": content(7, 40_000)}, tmp_path)
    await push_all(shelf, store, ["one"])
    await store.remove(named("one"))
    await prune(store, CLOCK)
    with pytest.raises(Conflict, match="prune"):
        await push_later(shelf, store, "one", SAFE_SECONDS + 60)
    # A related image takes nothing from packs that may go at any time, and is whole when they have gone.
    manifest_of_one = Item(Folder.MANIFESTS, shelf.names.record("one").digest.removeprefix("sha256:"))
    assert await push_later(shelf, store, "two", SAFE_SECONDS + 60) > 3
    await prune(store, Later(GRACE_SECONDS + 60))
    assert await store.size(manifest_of_one) is None
    other = Shelf(tmp_path / "other")
    await pull_all(other, store, ["two"])
    assert same_layer(shelf, other, digest)
    assert await push_later(shelf, store, "one", GRACE_SECONDS + 120) >= 0
    await pull_all(other, store, ["one"])


async def test_the_very_same_pack_gets_another_name(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    """A killed push's pack that is about to go, wanted again by a push of the same content."""
    import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"])
    hexa = shelf.names.record("one").digest.removeprefix("sha256:")
    for folder in (Folder.NAMES, Folder.MANIFESTS, Folder.MAPS, Folder.BLOBS):
        for stored in [s async for s in store.list(folder)]:
            await store.remove(Item(folder, stored.name))
    assert (await prune(store, CLOCK)).marked == 1
    assert await push_later(shelf, store, "one", SAFE_SECONDS + 60) > 0
    assert await count(store, Folder.PACKS) == 2
    assert (await prune(store, Later(GRACE_SECONDS + 60))).items == 1
    assert await store.size(Item(Folder.MANIFESTS, hexa)) is not None
    await pull_all(Shelf(tmp_path / "other"), store, ["one"])


async def test_alone_removes_at_once_and_half_written_files_too(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"])
    half = tmp_path / "store/v2/packs" / ("0" * 64 + "#1")
    half.write_bytes(b"half")
    assert await count(store, Folder.PACKS) == 1
    await store.remove(named("one"))
    done = await prune(store, Later(1), 0.0)
    assert done.layers == 1 and not half.exists()
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["store.json"]


async def test_what_cannot_be_read_stops_it(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    import_tree(shelf, "one", FILES, tmp_path)
    import_tree(shelf, "two", MORE, tmp_path)
    await push_all(shelf, store, ["one", "two"])
    await store.remove(named("two"))
    await store.write(Item(Folder.MAPS, shelf.names.record("one").digest.removeprefix("sha256:")), b"damaged")
    with pytest.raises(ImageUnavailable):
        await prune(store, Later(1), 0.0)
    assert await count(store, Folder.MANIFESTS) == 2
