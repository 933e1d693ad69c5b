"""One behaviour on every kind of store: a directory, a directory behind FUSE, an S3 server and an OCI registry, all real."""

import asyncio
import hashlib
import json
import os
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.images.stores.known import Known
from dsec.images.stores.layout import Folder, Item, Store, StoreHead, open_head
from dsec.images.stores.opening import open_store
from dsec.images.stores.pull import fetch_layer
from dsec.images.stores.signing import Signer, make_key
from dsec.images.stores.transfer import stored_name, stored_names
from dsec.model.errors import DSecError, NotFound, PermissionDenied, Unauthenticated, Unavailable, Unsupported
from dsec.model.stores import StoreOptions
from dsec.rules.chunkmap import Encoding, Place
from imagekit import CLOCK, Shelf
from storekit import content, import_tree, options, pull_all, push_all, same_layer, sync_all
from storeservers import BUCKET, registry_server, s3_server

FILES = {"a": content(1, 900_000), "b": content(2, 9_000), "zeros": bytes(200_000), "tail": content(3, 70_001)}
KINDS = ["file", "fuse", "s3", "oci"]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry_server(tmp_path_factory.mktemp("oci")) as found:
        yield found


@contextmanager
def fuse_mount(folder: Path) -> Iterator[Path]:
    (folder / "below").mkdir()
    (folder / "shared").mkdir()
    subprocess.run(["bindfs", str(folder / "below"), str(folder / "shared")], check=True)
    try:
        yield folder / "shared"
    finally:
        subprocess.run(["umount", str(folder / "shared")], check=True)


def bucket(endpoint: str, prefix: str, **more: object) -> StoreOptions:
    given = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key": "test",
        "secret_key": "test",
        "allow_http": True,
    }
    return options(str(more.pop("url", f"s3://{BUCKET}/{prefix}")), **(given | more))


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "fuse":
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        with fuse_mount(tmp_path) as place:
            yield open_store(options(f"file://{place}"), create=True)
        return
    if request.param == "file":
        given = options(f"file://{tmp_path}/store")
    elif request.param == "s3":
        given = bucket(request.getfixturevalue("endpoint"), f"some/prefix/{tmp_path.name}")
    else:
        given = options(f"oci://{request.getfixturevalue('registry')}/team/{tmp_path.name.replace('_', '-').lower()}")
    opened = open_store(given, create=True)
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


@pytest.fixture
def other(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "other")


async def test_images_travel(shelf: Shelf, other: Shelf, store: Store, tmp_path: Path) -> None:
    name = "team_x/app:1@2+b"
    digest = import_tree(shelf, name, FILES, tmp_path)
    assert await stored_names(store) == []
    first = (await push_all(shelf, store, [name]))[0].layers[0]
    assert first.new_chunks == first.chunks > 30
    assert (await push_all(shelf, store, [name]))[0].layers[0].already
    assert await stored_names(store) == [name]
    assert (await stored_name(store, name)).digest == digest
    assert (await pull_all(other, store, [name]))[0].fetched == (digest,)
    assert same_layer(shelf, other, digest)
    import_tree(shelf, "two", {**FILES, "new": content(9, 50_000)}, tmp_path)
    second = (await push_all(shelf, store, ["two"]))[0].layers[0]
    assert 0 < second.new_chunks <= 6
    await pull_all(other, store, ["two"])
    assert same_layer(shelf, other, shelf.names.record("two").digest)
    with pytest.raises(NotFound):
        await pull_all(other, store, ["three"])


async def test_ranges_of_packs(shelf: Shelf, store: Store, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, store, ["one"])
    fetched = await fetch_layer(store, digest, tmp_path / "lazy")
    pack = Item(Folder.PACKS, fetched.places.packs[0].hex(), fetched.layer)
    size = await store.size(pack)
    assert size is not None and size > 2000
    whole = await store.read(pack, size)
    assert await store.read_range(pack, 1000, 500) == whole[1000:1500]
    assert await store.read_range(pack, size - 1, 1) == whole[-1:]
    for offset, length in ((size - 10, 20), (size + 5, 10)):
        with pytest.raises(DSecError):
            await store.read_range(pack, offset, length)
    with pytest.raises(DSecError):
        await store.read(pack, size - 1)
    absent = Item(Folder.PACKS, "0" * 64, fetched.layer)
    assert await store.size(absent) is None
    with pytest.raises(NotFound):
        await store.read_range(absent, 0, 10)


async def test_signatures_and_profiles(shelf: Shelf, other: Shelf, store: Store, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    make_key(tmp_path / "key")
    make_key(tmp_path / "key2")
    signer, second = Signer(tmp_path / "key"), Signer(tmp_path / "key2")
    await push_all(shelf, store, ["one"])
    with pytest.raises(PermissionDenied):
        await pull_all(other, store, ["one"], [signer.public])
    await push_all(shelf, store, ["one"], signer)
    await push_all(shelf, store, ["one"], second)
    await push_all(shelf, store, ["one"], second)
    hexa = digest.removeprefix("sha256:")
    assert len([s async for s in store.list(Folder.SIGNATURES, hexa)]) == 2
    found = await pull_all(other, store, ["one"], [second.public, signer.public])
    assert found[0].signed_by == (second.public.text, signer.public.text)
    profile = Item(Folder.PROFILES, f"{hexa}/3", hexa)
    await store.write(profile, b"profile")
    assert [s.name async for s in store.list(Folder.PROFILES, hexa)] == [f"{hexa}/3"]
    assert await store.read(profile, 100) == b"profile"


async def test_sync_into_and_out_of(shelf: Shelf, other: Shelf, store: Store, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    first = open_store(options(f"file://{tmp_path}/first"), create=True)
    make_key(tmp_path / "key")
    signer = Signer(tmp_path / "key")
    await push_all(shelf, first, ["one"], signer)
    assert not (await sync_all(other, first, store))[0].layers[0].already
    assert (await sync_all(other, first, store))[0].layers[0].already
    last = open_store(options(f"file://{tmp_path}/last"), create=True)
    await sync_all(other, store, last)
    await pull_all(other, last, ["one"], [signer.public])
    assert same_layer(shelf, other, digest)


async def test_segments_are_merged(store: Store) -> None:
    known = Known(store, await open_head(store, create=True), CLOCK)
    pack = hashlib.sha256(content(1, 9000)).digest()
    await store.write(Item(Folder.PACKS, pack.hex()), content(1, 9000))
    said = {bytes([0x50, n]) + bytes(30): Place(pack, 100 * n, 100, Encoding.RAW) for n in range(9)}
    for digest, place in said.items():
        await known.add({digest: place})
    assert await known.compact() == 9
    assert [s.name[:2] async for s in store.list(Folder.KNOWN)] == ["05"]
    assert await known.compact() == 0
    fresh = Known(store, StoreHead(), CLOCK)
    assert await fresh.places([*said, bytes(32)], set()) == said
    await fresh.forget({pack})
    assert [s.name async for s in store.list(Folder.KNOWN)] == []
    assert await fresh.places(said, set()) == {}


def test_an_artifact_is_what_other_tools_expect(registry: str, shelf: Shelf, tmp_path: Path) -> None:
    digest = import_tree(shelf, "one", FILES, tmp_path)
    make_key(tmp_path / "key")

    async def push() -> None:
        store = open_store(options(f"oci://{registry}/plain/one"), create=True)
        await push_all(shelf, store, ["one"], Signer(tmp_path / "key"))
        await store.close()

    asyncio.run(push())
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json"}

    def get(reference: str) -> tuple[dict[str, object], str]:
        asked = urllib.request.Request(f"http://{registry}/v2/plain/one/manifests/{reference}", headers=accept)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer), answer.headers["Docker-Content-Digest"]

    found, oci_digest = get("one")
    assert found["artifactType"] == "application/vnd.dsec.layer.v2+json"
    assert found["annotations"] == {"vnd.dsec.layer.digest": digest}
    titles = [layer["annotations"]["org.opencontainers.image.title"] for layer in found["layers"]]  # type: ignore[index, attr-defined]
    kinds = [title.partition("/")[0] for title in titles]
    assert kinds[:5] == ["manifests", "blobs", "blobs", "blobs", "maps"] and set(kinds[5:]) == {"packs"}
    assert get(f"_l-{digest.removeprefix('sha256:')}") == (found, oci_digest)
    # Debian's registry has no referrers API: the fallback tag lists what refers to the layer.
    index, _ = get(oci_digest.replace(":", "-"))
    (signature,) = index["manifests"]  # type: ignore[misc, index]
    assert signature["artifactType"] == "application/vnd.dsec.signatures.v2+json"


async def test_a_store_that_is_not_there(other: Shelf, endpoint: str, registry: str) -> None:
    with pytest.raises((Unavailable, Unauthenticated, NotFound)):
        await pull_all(other, open_store(bucket(endpoint, "x", url="s3://no-such-bucket/x")), ["one"])
    absent = open_store(options(f"oci://{registry}/no/such"))
    try:
        with pytest.raises(NotFound):
            await pull_all(other, absent, ["one"])
        with pytest.raises(Unsupported):
            await absent.remove(Item(Folder.MANIFESTS, "0" * 64))
    finally:
        await absent.close()
