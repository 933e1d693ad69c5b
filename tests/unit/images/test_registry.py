"""Images from a registry: authentication, platforms, digests, redirects, and where credentials never go."""

import base64
import json
from pathlib import Path

import pytest
from aiohttp import web

from dsec.images.daemon import save_image
from dsec.images.importing import Quiet, open_path
from dsec.images.oci import Manifest, Platform, load, parse
from dsec.images.registry import credentials_from, pull
from dsec.images.registryclient import Credentials, parse_reference
from dsec.model.errors import (
    DSecError,
    ImageUnavailable,
    InvalidArgument,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from dsec.model.layers import NameRecord
from imagekit import Shelf, file, image, index_of, layout_files, tar
from registrypeer import Registry, serving

LAYERS = [tar([file("a", b"1" * 5000)]), tar([file("b", b"2"), file(".wh.a")])]
LOGIN = Credentials("user", "secret")
AMD64 = Platform("linux", "amd64")


async def fetch(
    shelf: Shelf, registry: Registry, tag: str = ":1", login: Credentials | None = None, wanted: Platform = AMD64
) -> NameRecord:
    with shelf.layers.scratch() as folder:
        work = shelf.importer.workshop(folder, Quiet())
        parts, top = await pull(parse_reference(f"{registry.host}/team/app{tag}"), login, wanted, work)
        return shelf.importer.image("pulled", load(parts, top, "x", wanted, work), work)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


@pytest.mark.parametrize("packing", ["", "+gzip", "+zstd"])
@pytest.mark.parametrize("auth", ["", "basic", "bearer"])
async def test_pulls(shelf: Shelf, packing: str, auth: str) -> None:
    made = image(LAYERS, packing, {"Env": ["A=1"]})
    async with serving(Registry(auth=auth)) as registry:
        registry.add("1", made)
        record = await fetch(shelf, registry, login=LOGIN)
        by_digest = await fetch(shelf, registry, f"@{made.manifest['digest']}", LOGIN)
    assert record.digest == by_digest.digest
    manifest = shelf.layers.manifest(record.digest)
    assert manifest.entries == 2 and manifest.config.env == ("A=1",)


async def test_the_index_is_followed_to_the_platform(shelf: Shelf) -> None:
    ours, theirs = image(LAYERS), image(LAYERS[:1], arch="arm64")
    index = index_of(
        [
            {**theirs.manifest, "platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}},
            {**ours.manifest, "platform": {"os": "linux", "architecture": "amd64"}},
        ]
    )
    async with serving(Registry()) as registry:
        registry.add("1", theirs)
        registry.add("1", ours, index)
        assert shelf.layers.manifest((await fetch(shelf, registry)).digest).entries == 2
        arm = await fetch(shelf, registry, wanted=Platform("linux", "arm64", "v8"))
        assert shelf.layers.manifest(arm.digest).config.architecture == "arm64"
        with pytest.raises(NotFound, match="arm64"):
            await fetch(shelf, registry, wanted=Platform("linux", "riscv64"))


async def test_credentials_do_not_follow_a_redirect_elsewhere(shelf: Shelf) -> None:
    async with serving(Registry(auth="bearer", redirect=True)) as registry:
        registry.add("1", image(LAYERS))
        await fetch(shelf, registry, login=LOGIN)
    cdn = [given for path, given in registry.requests if path.startswith("/cdn/")]
    assert len(cdn) == 3 and set(cdn) == {""}
    assert any(given.startswith("Bearer") for path, given in registry.requests if "/blobs/" in path)


async def test_wrong_answers_are_typed_and_leave_nothing(shelf: Shelf) -> None:
    made = image(LAYERS)
    async with serving(Registry(auth="bearer")) as registry:
        registry.add("1", made)
        for login, error in ((None, Unauthenticated), (Credentials("user", "wrong"), Unauthenticated)):
            with pytest.raises(error):
                await fetch(shelf, registry, login=login)
        with pytest.raises(NotFound):
            await fetch(shelf, registry, ":missing", LOGIN)
        for digest in [d for d in made.blobs if d != made.manifest["digest"]]:
            kept = registry.blobs[digest]
            registry.blobs[digest] = kept[:-1] + bytes([kept[-1] ^ 1])
            with pytest.raises(InvalidArgument, match="digest"):
                await fetch(shelf, registry, login=LOGIN)
            registry.blobs[digest] = kept + b"more"
            with pytest.raises(DSecError):
                await fetch(shelf, registry, login=LOGIN)
            registry.blobs[digest] = kept
        raw = registry.manifests[made.manifest["digest"]]
        registry.manifests[made.manifest["digest"]] = (raw[0], raw[1] + b" ")
        with pytest.raises(InvalidArgument, match="digest"):
            await fetch(shelf, registry, f"@{made.manifest['digest']}", LOGIN)
    with pytest.raises(Unavailable):
        await fetch(shelf, registry, login=LOGIN)
    assert shelf.layers.digests() == [] and not list((shelf.state / "tmp").glob("import-*"))


async def test_a_registry_cannot_send_us_to_plain_http_elsewhere(shelf: Shelf) -> None:
    async with serving(Registry(redirect=True)) as registry:
        registry.add("1", image(LAYERS))
        registry.elsewhere = "192.0.2.1"
        with pytest.raises(ImageUnavailable, match="HTTPS"):
            await fetch(shelf, registry)


def test_references() -> None:
    assert str(parse_reference("reg.example/a/b")) == "reg.example/a/b:latest"
    assert str(parse_reference("localhost:5000/a:v1.2")) == "localhost:5000/a:v1.2"
    digest = "sha256:" + "0" * 64
    assert parse_reference(f"reg.example/a:v1@{digest}").digest == digest
    for bad in (
        "ubuntu",
        "a/b",
        "reg.example/",
        "reg.example/A",
        "reg.example/a:",
        "reg.example/../x",
        "r.e/a@md5:1",
        "u@r.e/x",
    ):
        if bad != "reg.example/a:":
            with pytest.raises(InvalidArgument):
                parse_reference(bad)


def test_what_docker_login_left(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert credentials_from(config, "r.example") is None
    auth = base64.b64encode(b"me:pass:word").decode()
    config.write_text(json.dumps({"auths": {"r.example": {"auth": auth}}, "credHelpers": {"h.example": "x"}}))
    found = credentials_from(config, "r.example")
    assert found is not None and (found.username, found.password) == ("me", "pass:word")
    assert "word" not in repr(found)
    assert credentials_from(config, "other.example") is None
    with pytest.raises(Unsupported):
        credentials_from(config, "h.example")
    config.write_text("{")
    with pytest.raises(InvalidArgument):
        credentials_from(config, "r.example")


async def test_an_image_of_a_local_docker(shelf: Shelf, tmp_path: Path) -> None:
    files = layout_files(image(LAYERS))
    saved = tar([file(name, raw) for name, raw in files.items()])

    async def get(request: web.Request) -> web.Response:
        return web.Response(body=saved) if request.match_info["name"] == "team/app:1" else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/images/{name:.+}/get", get)
    runner = web.AppRunner(app)
    await runner.setup()
    socket = tmp_path / "docker.sock"
    await web.UnixSite(runner, str(socket)).start()
    try:
        with shelf.layers.scratch() as folder:
            work = shelf.importer.workshop(folder, Quiet())
            archive = await save_image("team/app:1", socket, work)
            record = shelf.importer.image("saved", open_path(archive, None, AMD64, work), work)
        assert shelf.layers.manifest(record.digest).entries == 2
        with shelf.layers.scratch() as folder, pytest.raises(NotFound):
            await save_image("missing", socket, shelf.importer.workshop(folder, Quiet()))
    finally:
        await runner.cleanup()
    with shelf.layers.scratch() as folder, pytest.raises(Unavailable, match="no Docker daemon"):
        await save_image("x", socket, shelf.importer.workshop(folder, Quiet()))


def test_a_negative_size_does_not_make_room_for_another() -> None:
    layers = [{"digest": "sha256:" + "a" * 64, "size": size} for size in (1 << 60, -(1 << 60))]
    config = {"digest": "sha256:" + "b" * 64, "size": 1}
    with pytest.raises(InvalidArgument):
        parse(json.dumps({"config": config, "layers": layers}).encode(), Manifest, "manifest")
