"""Images in files: OCI layouts, archives of them, docker save; every digest is checked."""

import gzip
import json
from pathlib import Path

import pytest

from dsec.images.making import FILES
from dsec.images.oci import Platform
from dsec.images.records import read_records
from dsec.model.errors import DSecError, InvalidArgument, NotFound, Unsupported
from dsec.model.layers import ImageConfig, LayerManifest
from imagekit import Shelf, descriptor, file, folder, image, index_of, layout_files, sha, symlink, tar, write_layout

LOWER = tar([folder("d"), file("d/a", b"1"), file("d/b", b"2")])
UPPER = tar([file("d/.wh.a"), file("d/b", b"3"), file("e", b"4")])
RUN = {
    "Env": ["PATH=/opt/x:/bin", "A=b c"], "WorkingDir": "/w", "User": "1234:5678", "Entrypoint": ["/e"], "Cmd": ["c"],
    "Labels": {"k": "v"},
}  # fmt: skip


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state")


def seen(shelf: Shelf, digest: str) -> tuple[set[str], LayerManifest]:
    records = read_records(shelf.layers.directory(digest) / FILES)
    return {r.path.decode() for r in records}, shelf.layers.manifest(digest)


@pytest.mark.parametrize("packing", ["", "+gzip", "+zstd"])
def test_a_layout_as_directory_and_as_archive(shelf: Shelf, tmp_path: Path, packing: str) -> None:
    files = layout_files(image([LOWER, UPPER], packing, RUN))
    first = shelf.import_image("a", write_layout(tmp_path / "layout", files))
    members = [folder("blobs"), folder("blobs/sha256"), *(file(name, raw) for name, raw in files.items())]
    (tmp_path / "layout.tar").write_bytes(tar(members))
    (tmp_path / "layout.tgz").write_bytes(gzip.compress(tar(members)))
    second = shelf.import_image("b", tmp_path / "layout.tar")
    third = shelf.import_image("c", tmp_path / "layout.tgz")
    assert first.digest == second.digest == third.digest
    names, manifest = seen(shelf, first.digest)
    assert names == {"", "d", "d/b", "e"}
    assert manifest.config == ImageConfig(
        env=("PATH=/opt/x:/bin", "A=b c"), user="1234:5678", working_dir="/w", entrypoint=("/e",), cmd=("c",),
        labels={"k": "v"}, architecture="amd64", os="linux",
    )  # fmt: skip


def test_docker_save(shelf: Shelf, tmp_path: Path) -> None:
    made = image([LOWER, UPPER], "", RUN)
    saved = [{"Config": "c.json", "RepoTags": ["x:1"], "Layers": ["one/layer.tar", "two/layer.tar", "three/layer.tar"]}]
    config = json.loads(made.config)
    config["rootfs"]["diff_ids"].append(sha(LOWER))
    members = [
        file("one/layer.tar", LOWER), file("two/layer.tar", UPPER), symlink("three/layer.tar", "../one/layer.tar"),
        file("c.json", json.dumps(config).encode()), file("manifest.json", json.dumps(saved).encode()),
    ]  # fmt: skip
    (tmp_path / "saved.tar").write_bytes(tar(members))
    names, manifest = seen(shelf, shelf.import_image("a", tmp_path / "saved.tar").digest)
    assert names == {"", "d", "d/a", "d/b", "e"} and manifest.config.user == "1234:5678"
    two = [*saved, {**saved[0], "RepoTags": ["y:2"]}]
    (tmp_path / "two.tar").write_bytes(tar([*members[:-1], file("manifest.json", json.dumps(two).encode())]))
    with pytest.raises(InvalidArgument, match="y:2"):
        shelf.import_image("b", tmp_path / "two.tar")
    shelf.import_image("b", tmp_path / "two.tar", ref="y:2")


def test_a_root_filesystem_with_such_names_in_it_is_no_image(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(tar([file("manifest.json", b"{}"), file("index.json", b"{}"), folder("bin")]))
    names, _ = seen(shelf, shelf.import_image("a", tmp_path / "root.tar").digest)
    assert names == {"", "manifest.json", "index.json", "bin"}


def test_the_platform_is_chosen(shelf: Shelf, tmp_path: Path) -> None:
    ours, theirs = image([LOWER]), image([UPPER], arch="sparc")
    inner = index_of(
        [
            {**theirs.manifest, "platform": {"os": "linux", "architecture": "sparc"}},
            {**ours.manifest, "platform": {"os": "linux", "architecture": "amd64"}},
            {**theirs.manifest, "platform": {"os": "unknown", "architecture": "unknown"}},
        ]
    )
    files = {**layout_files(theirs), **layout_files(ours)}
    files["blobs/sha256/" + sha(inner).removeprefix("sha256:")] = inner
    files["index.json"] = index_of([descriptor(inner, "application/vnd.oci.image.index.v1+json")])
    names, _ = seen(shelf, shelf.import_image("a", write_layout(tmp_path / "l", files)).digest)
    assert names == {"", "d", "d/a", "d/b"}
    files = layout_files(theirs, index_of([{**theirs.manifest, "platform": {"os": "linux", "architecture": "sparc"}}]))
    with pytest.raises(NotFound, match="sparc"):
        shelf.import_image("b", write_layout(tmp_path / "m", files))


def test_an_only_image_for_another_platform_is_refused_unless_it_is_asked_for(shelf: Shelf, tmp_path: Path) -> None:
    root = write_layout(tmp_path / "l", layout_files(image([LOWER], arch="sparc")))
    with pytest.raises(NotFound, match="linux/sparc"):
        shelf.import_image("a", root)
    record = shelf.import_image("a", root, wanted=Platform("linux", "sparc"))
    assert shelf.layers.manifest(record.digest).config.architecture == "sparc"


def test_several_images_need_a_choice(shelf: Shelf, tmp_path: Path) -> None:
    one, two = image([LOWER]), image([UPPER])
    key = "org.opencontainers.image.ref.name"
    index = index_of([{**one.manifest, "annotations": {key: "v1"}}, {**two.manifest, "annotations": {key: "v2"}}])
    root = write_layout(tmp_path / "l", {**layout_files(one), **layout_files(two), "index.json": index})
    with pytest.raises(InvalidArgument, match="v1"):
        shelf.import_image("a", root)
    assert seen(shelf, shelf.import_image("a", root, ref="v2").digest)[0] == {"", "d", "d/b", "e"}
    with pytest.raises(NotFound, match="v2"):
        shelf.import_image("a", root, ref="v3")


def test_nothing_unchecked_gets_in(shelf: Shelf, tmp_path: Path) -> None:
    made = image([LOWER])
    for number, (digest, blob) in enumerate(made.blobs.items()):
        files = layout_files(made)
        name = "blobs/sha256/" + digest.removeprefix("sha256:")
        files[name] = image([UPPER]).layers[0] if blob[:2] == b"\x1f\x8b" else blob.replace(b"linux", b"LINUX") + b" "
        with pytest.raises(InvalidArgument, match="digest"):
            shelf.import_image("a", write_layout(tmp_path / str(number), files))
        del files[name]
        (tmp_path / str(number) / name).unlink()
        with pytest.raises(DSecError):
            shelf.import_image("a", tmp_path / str(number))
    artifact = image([LOWER])
    manifest = json.dumps(
        {"config": descriptor(artifact.config, "x"), "layers": [descriptor(LOWER, "application/vnd.wasm")]}
    ).encode()
    files = layout_files(artifact, index_of([descriptor(manifest, "m")]))
    files["blobs/sha256/" + sha(manifest).removeprefix("sha256:")] = manifest
    with pytest.raises(Unsupported, match="wasm"):
        shelf.import_image("a", write_layout(tmp_path / "artifact", files))
    assert shelf.layers.digests() == []


def test_five_hundred_layers(shelf: Shelf, tmp_path: Path) -> None:
    layers = [
        tar([file(f"only-{n}", b"%d" % n), file("top", b"%d" % n), file(f".wh.only-{n - 2}")]) for n in range(500)
    ]
    record = shelf.import_image("many", write_layout(tmp_path / "l", layout_files(image(layers, ""))))
    records = read_records(shelf.layers.directory(record.digest) / FILES)
    found = {r.path.decode(): r for r in records}
    assert set(found) == {"", "only-498", "only-499", "top"}
    assert found["top"].size == 3
