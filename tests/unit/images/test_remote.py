"""Images of a store, found by name: what comes to the node, once however many ask, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.images.index import ChunkIndex
from dsec.images.origins import keep_profile, present_bytes, read_origin, read_profile
from dsec.images.remote import Asked, Remote, push_profile
from dsec.images.settings import ImagesSettings, Stores
from dsec.images.stores.layout import Store
from dsec.images.stores.opening import open_store
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, PermissionDenied, Unsupported
from dsec.model.loading import Ladder, LoadMode, LoadPath, Way
from dsec.model.stores import StoreOptions
from dsec.rules.profiles import first_profile
from imagekit import CLOCK, Shelf
from storekit import content, import_tree, options, push_all

HOST = Ladder(ways=tuple(Way(path=path, ok=True) for path in LoadPath))


class Site:
    """A store that holds `base`, and the nodes that are made beside it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.maker = Shelf(place / "maker")
        self.digest = import_tree(self.maker, "base", {"f": content(1, 400_000), "g": b"small"}, place)
        self.options = options(f"file://{place}/store")
        self.nodes = 0

    def node(
        self, *, ladder: Ladder = HOST, stores: list[StoreOptions] | None = None, **more: object
    ) -> tuple[Shelf, Remote]:
        self.nodes += 1
        shelf = Shelf(self.place / f"node{self.nodes}")
        listed = {str(n): each for n, each in enumerate([self.options] if stores is None else stores)}

        async def found() -> Ladder:
            return ladder

        settings = ImagesSettings(**more)  # type: ignore[arg-type]
        return shelf, Remote(shelf.layers, shelf.names, CLOCK, Stores(listed), settings, found)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    store = open_store(site.options, create=True)
    await push_all(site.maker, store, ["base"])
    yield site
    await store.close()


async def test_what_comes_is_the_metadata_and_a_hole(site: Site) -> None:
    shelf, remote = site.node()
    record = await remote.find("base")
    folder, manifest = shelf.layers.directory(site.digest), shelf.layers.manifest(site.digest)
    assert record.digest == site.digest and shelf.names.record("base") == record
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "meta.erofs", "files.zst", "index", "map", "data", "have", "origin.json",
    }  # fmt: skip
    data = (folder / "data").stat()
    assert (data.st_size, data.st_blocks) == (manifest.data.size, 0)
    assert (folder / "have").stat().st_mode & 0o777 == 0o600
    assert present_bytes(folder, ChunkIndex.read(folder / "index", manifest)) == 0
    origin = read_origin(folder)
    assert origin is not None and (origin.store, origin.load, origin.pulled) == (site.options.url, "on-demand", False)


async def test_whole_is_all_of_it(site: Site) -> None:
    shelf, remote = site.node(load="whole")
    await remote.find("base")
    folder = shelf.layers.directory(site.digest)
    assert not (folder / "have").exists() and not (folder / "map").exists()
    assert (folder / "data").read_bytes() == (site.maker.layers.directory(site.digest) / "data").read_bytes()


async def test_many_that_ask_at_once_are_answered_by_one_fetch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _, remote = site.node()
    pulls: list[str] = []
    pull = remote.pull

    async def counted(options: StoreOptions, name: str, asked: Asked) -> object:
        pulls.append(name)
        return await pull(options, name, asked)

    monkeypatch.setattr(remote, "pull", counted)
    found = await asyncio.gather(*(remote.find("base") for _ in range(20)))
    assert pulls == ["base"] and {each.digest for each in found} == {site.digest}


async def test_a_name_that_no_store_has_is_asked_for_once_a_while(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _, remote = site.node()
    pulls: list[str] = []
    pull = remote.pull

    async def counted(options: StoreOptions, name: str, asked: Asked) -> object:
        pulls.append(name)
        return await pull(options, name, asked)

    monkeypatch.setattr(remote, "pull", counted)
    for _ in range(3):
        with pytest.raises(NotFound):
            await remote.find("nothing")
    assert pulls == ["nothing"]
    for name in ("file:///etc", "../base", "a//b", "s3://x/y"):
        with pytest.raises(InvalidArgument):
            await remote.find(name)


async def test_the_second_store_is_asked_for_what_the_first_lacks(site: Site, tmp_path: Path) -> None:
    empty = options(f"file://{tmp_path}/empty")
    other = open_store(empty, create=True)
    await push_all(site.maker, other, [])
    _, remote = site.node(stores=[empty, site.options])
    assert (await remote.find("base")).digest == site.digest
    with pytest.raises(NotFound):
        await remote.find("nothing")
    await other.close()


async def test_a_store_that_is_not_there_is_no_answer(site: Site, tmp_path: Path) -> None:
    _, remote = site.node(stores=[options(f"file://{tmp_path}/nowhere")])
    with pytest.raises(ImageUnavailable, match="nowhere"):
        await remote.find("base")
    (tmp_path / "unmounted").mkdir()
    _, remote = site.node(stores=[options(f"file://{tmp_path}/unmounted")])
    with pytest.raises(ImageUnavailable, match="no store of layers"):
        await remote.find("base")


async def test_an_unsigned_image_is_refused_where_keys_are_listed(site: Site) -> None:
    key = "ed25519:" + "A" * 43 + "="
    shelf, remote = site.node(stores=[options(site.options.url, keys=(key,))])
    with pytest.raises(PermissionDenied):
        await remote.find("base")
    assert shelf.layers.digests() == []


async def test_what_the_host_cannot_do_is_refused_and_leaves_nothing(site: Site) -> None:
    lacking = Ladder(ways=tuple(Way(path=path, ok=False, why="not here") for path in LoadPath))
    _, remote = site.node(ladder=lacking)
    with pytest.raises(Unsupported, match="not here"):
        await remote.pull(site.options, "base", Asked())
    shelf, remote = site.node(load="shared")
    with pytest.raises(Unsupported, match="--plain"):
        await remote.pull(site.options, "base", Asked())
    assert shelf.layers.digests() == [] and list((shelf.state / "tmp").glob("import-*")) == []


async def test_a_profile_goes_with_its_layer(site: Site) -> None:
    folder, manifest = site.maker.layers.directory(site.digest), site.maker.layers.manifest(site.digest)
    count = ChunkIndex.read(folder / "index", manifest).count
    store: Store = open_store(site.options)
    assert await push_profile(store, folder, site.digest, count) is None
    keep_profile(folder, first_profile(site.digest, [2, 0, 1]))
    assert [await push_profile(store, folder, site.digest, count) for _ in range(2)] == [1, 2]
    shelf, remote = site.node()
    await remote.find("base", Asked(LoadMode.ON_DEMAND, pulled=True))
    found = read_profile(shelf.layers.directory(site.digest), site.digest, count)
    assert found is not None and (found.version, found.order) == (2, (2, 0, 1))
    wrong = first_profile(site.digest, [count])
    keep_profile(folder, wrong)
    other, remote = site.node()
    (site.place / "store/v2/profiles" / site.digest[7:] / "9").write_bytes((folder / "profile.json").read_bytes())
    await remote.find("base")
    assert read_profile(other.layers.directory(site.digest), site.digest, count) is None
    await store.close()
