"""Push, pull and sync: the same bytes arrive, each chunk is stored once, and nothing is shown before it is whole."""

from pathlib import Path

import pytest

from dsec.images.index import ChunkIndex
from dsec.images.stores.layout import Folder, Item, Stored, StoredName, named, write_name
from dsec.images.stores.opening import open_store
from dsec.images.stores.pull import FETCHED, fetch_layer
from dsec.images.stores.signing import Signer, make_key, parse_key, sign
from dsec.images.stores.transfer import stack_of, stored_name, stored_names
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, PermissionDenied, Unsupported
from imagekit import Shelf
from storekit import CONFIG, Meddled, content, import_tree, options, pull_all, push_all, same_layer, sync_all

FILES = {"a": content(1, 300_000), "b": content(2, 9_000), "zeros": bytes(200_000), "tail": content(3, 70_001)}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


@pytest.fixture
def other(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "other")


@pytest.fixture
def store(tmp_path: Path) -> Meddled:
    return Meddled(open_store(options(f"file://{tmp_path}/store"), create=True))


def items(tmp_path: Path, folder: str) -> list[Path]:
    return sorted(p for p in (tmp_path / "store/v2" / folder).rglob("*") if p.is_file())


@pytest.mark.parametrize("level", [None, 3])
async def test_what_was_pushed_is_pulled(
    shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path, level: int | None
) -> None:
    digest = import_tree(shelf, "team/app:1", FILES, tmp_path)
    pushed = await push_all(shelf, store, ["team/app:1"], config=type(CONFIG)(level=level, workers=1))
    assert pushed[0].digest == digest and not pushed[0].layers[0].already
    assert await stored_names(store) == ["team/app:1"]
    pulled = await pull_all(other, store, ["team/app:1"])
    assert pulled[0].fetched == (digest,) and same_layer(shelf, other, digest)
    assert other.names.record("team/app:1").digest == digest
    assert (other.layers.directory(digest) / "data").stat().st_blocks * 512 < 500_000  # the zeros are a hole
    assert (await pull_all(other, store, ["team/app:1"]))[0].fetched == ()
    assert not list((other.state / "tmp").glob("import-*"))


async def test_an_empty_image(shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "empty", {}, tmp_path)
    await push_all(shelf, store, ["empty"])
    await pull_all(other, store, ["empty"])
    assert same_layer(shelf, other, digest)


async def test_a_related_image_stores_what_is_new(shelf: Shelf, store: Meddled, tmp_path: Path) -> None:
    import_tree(shelf, "one", FILES, tmp_path)
    import_tree(shelf, "two", {**FILES, "new": content(9, 50_000)}, tmp_path)
    first = (await push_all(shelf, store, ["one"]))[0].layers[0]
    second = (await push_all(shelf, store, ["two"]))[0].layers[0]
    assert first.new_chunks == first.chunks
    assert 0 < second.new_chunks <= 4 < second.chunks
    again = (await push_all(shelf, store, ["two"]))[0].layers[0]
    assert again.already and again.new_bytes == 0


async def test_a_push_that_was_killed_goes_on(shelf: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    hexa = digest.removeprefix("sha256:")

    async def fail(layer: str, manifest: bytes, parts: object) -> None:
        raise RuntimeError("killed")

    store.publish = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await push_all(shelf, store, ["one"])
    assert items(tmp_path, "packs") and not items(tmp_path, "manifests") and not items(tmp_path, "names")
    before = {path: path.stat().st_mtime_ns for path in items(tmp_path, "packs")}
    del store.publish
    pushed = (await push_all(shelf, store, ["one"]))[0].layers[0]
    assert pushed.new_chunks == 0 and pushed.chunks > 0 and not pushed.already
    assert {path: path.stat().st_mtime_ns for path in items(tmp_path, "packs")} == before
    assert [path.name for path in items(tmp_path, "manifests")] == [hexa]


async def test_sync_brings_what_is_missing(shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"], Signer(_key(tmp_path)))
    target = open_store(options(f"file://{tmp_path}/second"), create=True)
    synced = await sync_all(other, store, target)
    assert synced[0].digest == digest and synced[0].layers[0].new_chunks == synced[0].layers[0].chunks
    assert (await sync_all(other, store, target))[0].layers[0].already
    await pull_all(other, target, ["one"], [Signer(tmp_path / "key").public])
    assert same_layer(shelf, other, digest)
    import_tree(shelf, "two", {**FILES, "new": content(9, 50_000)}, tmp_path)
    await push_all(shelf, store, ["two"])
    more = (await sync_all(other, store, target, ["two"]))[0].layers[0]
    assert 0 < more.new_chunks <= 4


async def test_plain_data_for_a_shared_filesystem(shelf: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    with pytest.raises(Unsupported):
        await push_all(shelf, store, ["one"], plain=True)  # what meddles is no directory
    await push_all(shelf, store.inner, ["one"], plain=True)
    (plain,) = items(tmp_path, "plain")
    data = shelf.layers.directory(digest) / "data"
    assert plain.name == shelf.layers.manifest(digest).data.digest.removeprefix("sha256:")
    assert plain.read_bytes() == data.read_bytes() and plain.stat().st_blocks <= data.stat().st_blocks + 8


async def test_the_lazy_fetch_takes_no_chunk(shelf: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"])
    store.reads.clear()
    fetched = await fetch_layer(store, (await stored_name(store, "one")).digest, tmp_path / "lazy")
    assert {path.name for path in (tmp_path / "lazy").iterdir()} == set(FETCHED)
    assert not [path for path in store.reads if "/packs/" in path]
    local = ChunkIndex.read(shelf.layers.directory(digest) / "index", shelf.layers.manifest(digest))
    assert list(fetched.index) == list(local)
    zeros = [n for n in range(local.count) if local.is_zeros(n)]
    assert zeros and all((fetched.places.place(n) is None) == (n in zeros) for n in range(local.count))


async def test_a_layer_that_is_damaged_here_is_not_pushed(shelf: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    with (shelf.layers.directory(digest) / "data").open("r+b") as data:
        data.seek(50_000)
        data.write(b"damage")
    with pytest.raises(ImageUnavailable, match="chunk"):
        await push_all(shelf, store, ["one"])
    assert not items(tmp_path, "manifests")


def _key(folder: Path) -> Path:
    make_key(folder / "key")
    return folder / "key"


async def test_signatures_are_asked_for(shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    signer = Signer(_key(tmp_path))
    key = parse_key(signer.public.text)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    await push_all(shelf, store, ["one"])
    with pytest.raises(PermissionDenied):
        await pull_all(other, store, ["one"], [key])
    await sign(store, digest, "one", signer)
    assert (await pull_all(other, store, ["one"], [key]))[0].signed_by == (key.text,)
    make_key(tmp_path / "second")
    stranger = Signer(tmp_path / "second").public
    with pytest.raises(PermissionDenied):
        await pull_all(other, store, ["one"], [stranger])
    # A store that gives a signed image another name is refused; its digest is what was signed.
    await write_name(store, "two", StoredName(digest=digest))
    with pytest.raises(PermissionDenied):
        await pull_all(other, store, ["two"], [key])
    await pull_all(other, store, [digest], [key])
    await sign(store, digest, "two", signer)
    await pull_all(other, store, ["one", "two"], [key])
    # Another's signature under the trusted key's name.
    layer = digest.removeprefix("sha256:")
    forged = await store.read(Item(Folder.SIGNATURES, f"{layer}/{key.id}"), 1 << 20)
    await sign(store, digest, "one", Signer(tmp_path / "second"))
    theirs = await store.read(Item(Folder.SIGNATURES, f"{layer}/{stranger.id}"), 1 << 20)
    for wrong in (theirs, b"", b"{}", forged.replace(b'"payload":"', b'"payload":"A'), forged[:-9] + b'"}]}'):
        store.instead[f"v2/signatures/{layer}/{key.id}"] = wrong
        with pytest.raises(PermissionDenied):
            await pull_all(other, store, ["one"], [key])


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:AAAA", "rsa:" + "A" * 44, "ed25519:" + "!" * 44])
def test_what_is_no_public_key(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_key(text)


async def test_names_of_a_store(shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"])
    store.listed = [Stored("..%2F..%2Fetc%2Fpasswd", 1, 0), Stored("%2e%2e", 1, 0), Stored("a%2Fb", 1, 0)]
    assert await stored_names(store) == ["a/b", "one"]
    for name in ("../one", "", "/etc", "a//b"):
        with pytest.raises(InvalidArgument):
            await pull_all(other, store, [name])
    with pytest.raises(NotFound, match="no image named"):
        await pull_all(other, store, ["none"])
    for wrong in (b"", b"[]", b'{"digest":"sha256:../.."}', b'{"digest":"md5:1"}'):
        store.instead[named("one").path] = wrong
        with pytest.raises(ImageUnavailable):
            await pull_all(other, store, ["one"])
    with pytest.raises(NotFound):
        await stack_of(store, "sha256:" + "0" * 64)
    assert digest not in other.layers.digests()


async def test_a_directory_that_is_no_store(tmp_path: Path, other: Shelf) -> None:
    with pytest.raises(NotFound):
        open_store(options(f"file://{tmp_path}/absent"))
    assert not (tmp_path / "absent").exists()
    (tmp_path / "plain").mkdir()
    with pytest.raises(NotFound, match="no store of layers"):
        await pull_all(other, open_store(options(f"file://{tmp_path}/plain")), ["one"])
    for url in ("file://host/path", "file:///a/../b", "s3://", "s3://UP/x", "oci://", "ftp://x/y", "nonsense"):
        with pytest.raises(InvalidArgument):
            open_store(options(url))
    with pytest.raises(InvalidArgument, match="plain HTTP"):
        open_store(options("s3://bucket/x", endpoint="http://127.0.0.1:1"))
