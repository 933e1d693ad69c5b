"""Hostile stores (threats IMG-S*): whatever one says, nothing but what a layer's digest stands for arrives, and within bounds."""

import asyncio
import hashlib
import os
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from aiohttp import web

from dsec.images.stores import artifacts, objects
from dsec.images.stores.layout import Folder, Item
from dsec.images.stores.opening import open_store
from dsec.model.errors import DSecError, ImageUnavailable, Unavailable
from dsec.model.layers import LayerManifest
from imagekit import Shelf
from storekit import Meddled, content, import_tree, options, pull_all, push_all, same_layer, sync_all

FILES = {"a": content(1, 400_000), "b": content(2, 9_000), "tail": content(3, 70_001)}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


@pytest.fixture
def other(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "other")


@pytest.fixture
async def store(shelf: Shelf, tmp_path: Path) -> Meddled:
    """A store with the image `one`."""
    opened = Meddled(open_store(options(f"file://{tmp_path}/store"), create=True))
    import_tree(shelf, "one", FILES, tmp_path)
    await push_all(shelf, opened, ["one"])
    return opened


def nothing_came(other: Shelf) -> bool:
    return not other.layers.digests() and not other.names.all() and not list((other.state / "tmp").glob("import-*"))


def stored(tmp_path: Path, folder: str) -> Path:
    """The largest item of a folder of the store."""
    return max((tmp_path / "store/v2" / folder).iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("folder", ["manifests", "blobs", "maps", "packs"])
@pytest.mark.parametrize("how", ["flip", "cut", "longer", "empty", "gone", "zeros"])
async def test_wrong_bytes_are_refused(other: Shelf, store: Meddled, tmp_path: Path, folder: str, how: str) -> None:
    for path in sorted((tmp_path / "store/v2" / folder).iterdir()):
        good = path.read_bytes()
        middle = len(good) // 2
        wrong = {
            "flip": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :], "cut": good[:middle], "longer": good + b"x",
            "empty": b"", "gone": None, "zeros": bytes(len(good)),
        }[how]  # fmt: skip
        if wrong is None:
            path.unlink()
        else:
            path.write_bytes(wrong)
        if how == "longer" and folder in ("packs", "blobs"):
            # A tail that nobody asks for is not read, or refused: never believed.
            try:
                await pull_all(other, store, ["one"])
            except DSecError:
                assert nothing_came(other)
        else:
            with pytest.raises(DSecError) as caught:
                await pull_all(other, store, ["one"])
            assert caught.value.code in ("image_unavailable", "not_found", "unavailable")
            assert nothing_came(other)
        path.write_bytes(good)


async def test_a_chunk_that_is_wrong_once_is_read_again(
    shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path
) -> None:
    pack = stored(tmp_path, "packs")
    path = f"v2/packs/{pack.name}"
    good = pack.read_bytes()
    store.once[path] = good[:1000] + bytes([good[1000] ^ 1]) + good[1001:]
    await pull_all(other, store, ["one"])
    assert same_layer(shelf, other, other.names.record("one").digest)
    assert store.reads.count(path) == 2
    # Wrong for ever: one more try, and not for ever.
    third = Shelf(tmp_path / "third")
    store.reads.clear()
    store.instead[path] = good[:1000] + bytes([good[1000] ^ 1]) + good[1001:]
    with pytest.raises(ImageUnavailable, match="wrong, twice"):
        await pull_all(third, store, ["one"])
    assert store.reads.count(path) == 2
    with pytest.raises(ImageUnavailable):
        await sync_all(third, store, open_store(options(f"file://{tmp_path}/second"), create=True))
    assert nothing_came(third)


def frame_of(size: int) -> bytes:
    """A zstd frame of a few bytes that says and holds `size` zeros."""
    return zstandard.ZstdCompressor(level=1).compress(bytes(size))


def claim_of(size: int) -> bytes:
    """The head of a frame that says `size` bytes and has none."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\x00\x00"


async def test_bombs_take_no_memory_and_no_disk(other: Shelf, store: Meddled, tmp_path: Path) -> None:
    manifest = msgspec.json.decode(stored(tmp_path, "manifests").read_bytes(), type=LayerManifest)
    bomb = frame_of(1 << 30)
    assert len(bomb) < 100_000
    for blob in (manifest.meta, manifest.files):
        path = f"v2/blobs/{blob.digest.removeprefix('sha256:')}"
        # As many bytes as the bound on the stored form lets through, which is checked first.
        for wrong in (bomb, bomb[: blob.size], claim_of(1 << 62), claim_of(blob.size)):
            store.instead = {path: wrong}
            tracemalloc.start()
            with pytest.raises(DSecError):
                await pull_all(other, store, ["one"])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 64 << 20
            assert nothing_came(other)
    pack = stored(tmp_path, "packs")
    for wrong in (claim_of(1 << 62), frame_of(64 << 20)):
        filled = wrong + bytes(pack.stat().st_size - len(wrong))
        store.instead = {f"v2/packs/{pack.name}": filled}
        with pytest.raises(ImageUnavailable):
            await pull_all(other, store, ["one"])
    assert nothing_came(other)


async def test_a_manifest_that_asks_for_too_much(other: Shelf, store: Meddled, tmp_path: Path) -> None:
    path = stored(tmp_path, "manifests")
    good = msgspec.json.decode(path.read_bytes())
    changes = [
        {"meta": {"digest": good["meta"]["digest"], "size": 1 << 37}}, {"index": {"digest": good["index"]["digest"], "size": 64 + 36 * 2**40}},
        {"data": {"digest": good["data"]["digest"], "size": 1 << 60}}, {"below": ["sha256:" + "../" * 21 + "a"]},
        {"below": ["sha256:" + "0" * 64]}, {"chunk_bytes": 1}, {"schema_version": 3}, {"meta": {"digest": "sha256:../../x", "size": 1}},
    ]  # fmt: skip
    for change in changes:
        raw = msgspec.json.encode(good | change)
        digest = hashlib.sha256(raw).hexdigest()
        store.instead = {
            f"v2/manifests/{digest}": raw,
            "v2/names/one": msgspec.json.encode({"digest": f"sha256:{digest}"}),
        }
        with pytest.raises(DSecError):
            await pull_all(other, store, ["one"])
        assert nothing_came(other)


async def test_a_listing_without_end(store: Meddled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(objects, "MAX_LISTED", 20)
    for number in range(30):
        await store.write(Item(Folder.NAMES, f"n{number}"), b"{}")
    with pytest.raises(ImageUnavailable, match="more than 20"):
        [each async for each in store.inner.list(Folder.NAMES)]


async def test_a_poisoned_known_index_makes_no_wrong_image(
    shelf: Shelf, other: Shelf, store: Meddled, tmp_path: Path
) -> None:
    """Segments that say false places: the push believes in none that is not there, and a pull refuses the rest."""
    segments = [path for path in (tmp_path / "store/v2/known").rglob("*") if path.is_file()]
    for path in segments:
        raw = path.read_bytes()
        path.unlink()
        for wrong in (raw[:-5], b"", os.urandom(200), raw[:16] + os.urandom(32) + raw[48:]):
            (path.parent / hashlib.sha256(wrong).hexdigest()).write_bytes(wrong)
        (path.parent / ("0" * 64)).write_bytes(raw)  # not the name of these bytes
    import_tree(shelf, "two", {**FILES, "new": content(9, 50_000)}, tmp_path)
    pushed = (await push_all(shelf, store, ["two"]))[0].layers[0]
    assert pushed.new_chunks == pushed.chunks
    await pull_all(other, store, ["two"])
    assert same_layer(shelf, other, shelf.names.record("two").digest)


async def serve(handler: object) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("kind", ["endless", "redirect", "not http", "tags"])
async def test_hostile_registries(other: Shelf, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_LISTED", 20_000)
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        if kind == "redirect":
            raise web.HTTPTemporaryRedirect("http://192.0.2.1/secret")
        if kind == "not http":
            raise web.HTTPTemporaryRedirect("file:///etc/passwd")
        if kind == "tags":
            return web.json_response({"tags": ["../../x"]}, headers={"Link": f'<{request.path_qs}>; rel="next"'})
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(bytes(1 << 16))
        except ConnectionError:
            return answer

    serving = serve(handler)
    host = await anext(serving)
    store = open_store(options(f"oci://{host}/a/b"))
    try:
        with pytest.raises(ImageUnavailable):
            if kind == "tags":
                assert [s async for s in store.list(Folder.NAMES)] == []
            await pull_all(other, store, ["one"])
    finally:
        await store.close()
        await serving.aclose()  # type: ignore[attr-defined]
    assert len(seen) < 25 and nothing_came(other)


async def test_credentials_stay_with_the_registry(other: Shelf) -> None:
    """Neither a place for uploads nor a page of a list that lies elsewhere gets the credentials."""
    elsewhere: list[str] = []

    async def stranger(request: web.Request) -> web.Response:
        elsewhere.append(request.headers.get("Authorization", ""))
        return web.json_response({"tags": []}, status=201 if request.method == "PUT" else 200)

    second = serve(stranger)
    away = await anext(second)

    async def handler(request: web.Request) -> web.Response:
        if "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        if request.method == "POST":
            return web.Response(status=202, headers={"Location": f"http://{away}/upload"})
        if request.path.endswith("tags/list"):
            return web.json_response({"tags": []}, headers={"Link": f'<http://{away}/tags>; rel="next"'})
        return web.Response(status=404)

    first = serve(handler)
    host = await anext(first)
    store = open_store(options(f"oci://{host}/a/b", username="user", password="secret"), create=True)
    try:
        assert "secret" not in repr(store.__dict__)
        assert [s async for s in store.list(Folder.NAMES)] == []
        await store.write(Item(Folder.PACKS, "0" * 64), b"pack")
    finally:
        await store.close()
        await first.aclose()  # type: ignore[attr-defined]
        await second.aclose()  # type: ignore[attr-defined]
    assert len(elsewhere) == 2 and set(elsewhere) == {""}


async def test_a_bucket_that_refuses_or_lies(other: Shelf) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=403, body=b"<Error><Code>AccessDenied</Code></Error>")

    serving = serve(handler)
    host = await anext(serving)
    given = {"endpoint": f"http://{host}", "region": "r", "access_key": "a", "secret_key": "hidden", "allow_http": True}
    try:
        with pytest.raises(DSecError) as caught:
            await pull_all(other, open_store(options("s3://bucket/x", **given)), ["one"])
        assert "hidden" not in str(caught.value) and caught.value.code in ("permission_denied", "unauthenticated")
    finally:
        await serving.aclose()  # type: ignore[attr-defined]


async def test_a_store_that_is_slow_for_ever(other: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that answers a head and then nothing: a typed error after the timeout, no wait for ever."""
    stop = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(request)
        await stop.wait()
        return answer

    serving = serve(handler)
    host = await anext(serving)
    began = time.monotonic()
    try:
        monkeypatch.setattr(objects, "TIMEOUTS", {"connect_timeout": "1s", "read_timeout": "500ms", "timeout": "2s"})
        monkeypatch.setattr(objects, "RETRY_SECONDS", 1)
        given = {"endpoint": f"http://{host}", "region": "r", "access_key": "a", "secret_key": "b", "allow_http": True}
        with pytest.raises(Unavailable):
            await pull_all(other, open_store(options("s3://bucket/x", **given)), ["one"])
    finally:
        stop.set()
        await serving.aclose()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 30 and nothing_came(other)
