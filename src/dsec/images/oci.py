"""The image format: manifests, indexes, configs, and from them the layers' archives. Sources: OCI image spec, Docker schema 2."""

import functools
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from dsec.images.inputs import ImportConfig, Notes, Progress, Source
from dsec.images.kept import Kept
from dsec.images.spool import Digest, open_archive, sha256_of
from dsec.images.tar import TarInput
from dsec.model.errors import InvalidArgument, NotFound, Unsupported
from dsec.model.layers import ImageConfig

__all__ = [
    "Descriptor", "LayerBlob", "Manifest", "OciConfig", "Parts", "Platform", "Workshop", "choose", "config_of", "host_platform", "image_of",
    "load", "parse", "parse_platform", "stack",
]  # fmt: skip

_REF = "org.opencontainers.image.ref.name"
_T = TypeVar("_T")
_WORKERS = 2


@dataclass
class Workshop:
    """Where and how an import works: a folder of its own for scratch files, what imports that were cut off left, bounds, notes
    and progress."""

    folder: Path
    progress: Progress
    kept: Kept
    config: ImportConfig = field(default_factory=ImportConfig)
    notes: Notes = field(default_factory=Notes)


class Platform(Struct, frozen=True):
    """What an image runs on: "linux", "amd64", and a variant such as "v8" where it matters."""

    os: str = "linux"
    architecture: str = ""
    variant: str = ""


class Descriptor(Struct, frozen=True, rename={"media_type": "mediaType"}):
    """A blob by digest. Source: OCI descriptor.md."""

    digest: str
    size: Annotated[int, Meta(ge=0)]
    media_type: str = ""
    platform: Platform | None = None
    annotations: dict[str, str] = {}


class Manifest(Struct, frozen=True, rename={"media_type": "mediaType"}):
    """An image manifest or an index of them; OCI and Docker schema 2 alike."""

    media_type: str = ""
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    manifests: tuple[Descriptor, ...] = ()


class _Run(Struct, frozen=True, rename="pascal"):
    env: tuple[str, ...] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    labels: dict[str, str] | None = None
    exposed_ports: dict[str, msgspec.Raw] | None = None


class _RootFs(Struct, frozen=True):
    diff_ids: tuple[str, ...] = ()


class OciConfig(Struct, frozen=True):
    """An image's config. Source: OCI config.md."""

    architecture: str = ""
    os: str = ""
    config: _Run | None = None
    rootfs: _RootFs | None = None


class Parts(Protocol):
    """How the parts of an image are reached: documents with their digest checked, and layers' blobs as open files.

    `checked`: whether a blob's digest has been checked when it is handed out.
    """

    checked: bool

    def document(self, descriptor: Descriptor) -> bytes: ...
    def blob(self, descriptor: Descriptor) -> BinaryIO: ...


def parse(raw: bytes, kind: type[_T], what: str) -> _T:
    """A JSON document as `kind`. Raises InvalidArgument when it is not one."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{what}: {error}", field="source") from error


def host_platform() -> Platform:
    """What this host runs, in the words of image formats."""
    machine = platform.machine()
    return Platform("linux", {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine))


def parse_platform(text: str) -> Platform:
    """ "linux/arm64/v8" and the like. Raises InvalidArgument."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise InvalidArgument(f"platform {text[:100]!a} is not os/architecture[/variant]", field="platform")
    return Platform(*parts)


def choose(candidates: Sequence[Descriptor], wanted: Platform, what: str) -> Descriptor:
    """The one manifest of an index that runs on `wanted`. Raises NotFound, listing what there is, and InvalidArgument."""
    fitting = [c for c in candidates if c.platform is None or _fits(c.platform, wanted)]
    if not fitting:
        there = sorted({f"{c.platform.os}/{c.platform.architecture}" for c in candidates if c.platform})
        raise NotFound(f"{what} has nothing for {wanted.os}/{wanted.architecture}; it has {there}", what="platform")
    if len(fitting) > 1 and any(c.platform is None for c in fitting):
        names = sorted(c.annotations.get(_REF, c.digest) for c in fitting)
        raise InvalidArgument(f"{what} holds several images; choose one with --ref: {names}", field="ref")
    return fitting[0]


def _fits(there: Platform, wanted: Platform) -> bool:
    same = there.os == wanted.os and there.architecture == wanted.architecture
    return same and (not wanted.variant or there.variant == wanted.variant)


def image_of(parts: Parts, top: Descriptor, wanted: Platform) -> Manifest:
    """The image manifest that `top` leads to, through indexes. Raises as `choose`, and InvalidArgument for a wrong form."""
    for _ in range(4):
        manifest = parse(parts.document(top), Manifest, "manifest")
        if manifest.config is not None:
            return manifest
        if not manifest.manifests:
            break
        top = choose(manifest.manifests, wanted, "the image")
    raise InvalidArgument("neither an image manifest nor an index that leads to one", field="source")


def config_of(raw: bytes, wanted: Platform) -> tuple[ImageConfig, tuple[str, ...]]:
    """What a sandbox honours of an image's config, and the digests of its layers, unpacked. Raises InvalidArgument, and
    NotFound for an image that says it is for another platform than `wanted`."""
    given = parse(raw, OciConfig, "image config")
    if given.architecture and not _fits(
        Platform(given.os or "linux", given.architecture), Platform(wanted.os, wanted.architecture)
    ):
        there = f"{given.os or 'linux'}/{given.architecture}"
        raise NotFound(
            f"the image is for {there}, not for {wanted.os}/{wanted.architecture}; --platform {there} imports it all the same",
            what="platform",
        )
    run = given.config or _Run()
    for pair in run.env or ():
        if "=" not in pair or "\0" in pair:
            raise InvalidArgument(f"image config: environment {pair[:100]!a} is not NAME=VALUE", field="source")
    config = ImageConfig(
        env=run.env or (),
        user=run.user or "",
        working_dir=run.working_dir or "",
        entrypoint=run.entrypoint or (),
        cmd=run.cmd or (),
        labels=run.labels or {},
        exposed_ports=tuple(sorted(run.exposed_ports or ())),
        architecture=given.architecture,
        os=given.os,
    )
    return config, given.rootfs.diff_ids if given.rootfs else ()


def load(parts: Parts, top: Descriptor, origin: str, wanted: Platform, work: Workshop) -> Source:
    """All layers of the image that `top` leads to, unpacked and checked, and its config."""
    manifest = image_of(parts, top, wanted)
    assert manifest.config is not None
    config, diff_ids = config_of(parts.document(manifest.config), wanted)
    if diff_ids and len(diff_ids) != len(manifest.layers):
        raise InvalidArgument(
            f"{len(manifest.layers)} layers but {len(diff_ids)} digests in the config", field="source"
        )
    for layer in manifest.layers:
        if "tar" not in layer.media_type:
            raise Unsupported(f"a layer of type {layer.media_type[:100]!a} is not an archive", what="media type")
    opened = [LayerBlob(functools.partial(parts.blob, layer), Digest(layer.digest)) for layer in manifest.layers]
    work.progress.step("unpack", sum(layer.size for layer in manifest.layers))
    return stack(opened, diff_ids, config, origin, work, checked=parts.checked)


@dataclass(frozen=True)
class LayerBlob:
    """A layer to be opened. `digest`: of its blob, where one is named."""

    opener: Callable[[], BinaryIO]
    digest: Digest | None = None


def stack(
    layers: Sequence[LayerBlob],
    diff_ids: Sequence[str],
    config: ImageConfig,
    origin: str,
    work: Workshop,
    *,
    checked: bool,
) -> Source:
    """A source of archives, unpacked where they are compressed, a few at a time; digests are checked on the way."""
    if len(layers) > work.config.layers:
        raise InvalidArgument(f"an image of {len(layers)} layers; the bound is {work.config.layers}", field="source")
    source = Source([], config, origin, work.notes)
    digests: list[Digest | None] = [Digest(text) for text in diff_ids] or [None] * len(layers)
    files: list[Future[BinaryIO]] = []
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="dsec-unpack") as pool:
        try:
            for number, layer in enumerate(layers):
                files.append(pool.submit(_unpacked, number, layer, digests[number], work, checked))
            for number, file in enumerate(files):
                # A checked archive is complete, whether or not its writer added the end mark.
                whole = digests[number] is None and layers[number].digest is None
                archive = TarInput(file.result(), number=number, config=work.config, notes=work.notes, whole=whole)
                source.inputs.append(archive)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            source.close()
            for file in files[len(source.inputs) :]:
                if not file.cancelled() and file.exception() is None:
                    file.result().close()
            raise
        finally:
            work.kept.close()
    return source


def _unpacked(number: int, layer: LayerBlob, diff_id: Digest | None, work: Workshop, checked: bool) -> BinaryIO:
    """A layer's archive, uncompressed and checked; unpacked before, if an import was cut off then."""
    if diff_id is not None:
        found = work.kept.open("tar", diff_id)
        if found is not None:
            return found
    raw = layer.opener()
    if not checked and diff_id is None and layer.digest is not None:
        layer.digest.check(sha256_of(raw), "a layer")
        raw.seek(0)
    scratch = work.folder / f"layer-{number}.tar"
    file = open_archive(raw, scratch, work.config, work.progress, diff_id)
    if diff_id is not None and scratch.exists():
        work.kept.keep("tar", diff_id, scratch, file)
        if layer.digest is not None:
            work.kept.discard("blob", layer.digest)
    return file
