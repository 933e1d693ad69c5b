"""Images from a registry. Every document and blob is checked against its digest as it arrives."""

import asyncio
import base64
import hashlib
from pathlib import Path
from typing import Any, BinaryIO

from dsec.images.groups import first_failure
from dsec.images.kept import Kept
from dsec.images.oci import Descriptor, Manifest, OciConfig, Platform, Workshop, choose, parse
from dsec.images.registryclient import Access, Credentials, Reference, RegistryClient, read_bounded
from dsec.images.spool import Digest
from dsec.model.errors import ImageUnavailable, InvalidArgument, Unsupported

__all__ = ["Pulled", "credentials_from", "pull"]

_ACCEPT = ", ".join(
    [
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ]
)
_PARALLEL = 3


def credentials_from(config: Path, host: str) -> Credentials | None:
    """What `docker login` left for `host` in a config.json; None when there is nothing. Raises Unsupported for helpers."""
    try:
        content = parse(config.read_bytes(), dict[str, Any], str(config))
    except FileNotFoundError:
        return None
    if host in content.get("credHelpers", {}):
        raise Unsupported(
            f"{config} keeps the password of {host} in a helper program; give --username", what="credHelpers"
        )
    entry = content.get("auths", {}).get(host) or content.get("auths", {}).get(f"https://{host}")
    if not isinstance(entry, dict) or not entry.get("auth"):
        return None
    try:
        username, _, password = base64.b64decode(str(entry["auth"])).decode().partition(":")
    except ValueError as error:
        raise InvalidArgument(f"{config}: the entry of {host} is damaged", field="credentials") from error
    return Credentials(username, password)


class Pulled:
    """The parts of an image that `pull` has fetched; every digest has been checked."""

    checked = True

    def __init__(self, work: Workshop) -> None:
        self._work = work
        self.documents: dict[str, bytes] = {}
        self.paths: dict[str, Path] = {}

    def document(self, descriptor: Descriptor) -> bytes:
        return self.documents[descriptor.digest]

    def blob(self, descriptor: Descriptor) -> BinaryIO:
        path = self.paths.get(descriptor.digest)
        if path is not None:
            try:
                return path.open("rb")
            except FileNotFoundError:
                del self.paths[descriptor.digest]
        found = self._work.kept.open("blob", Digest(descriptor.digest))
        if found is None:
            raise ImageUnavailable(f"layer {descriptor.digest} was removed while it was imported: import it again")
        return found


async def pull(
    reference: Reference, credentials: Credentials | None, wanted: Platform, work: Workshop
) -> tuple[Pulled, Descriptor]:
    """Fetches the image's documents and layers into `work.folder`; gives them with the descriptor to begin from.

    Raises NotFound, Unauthenticated, Unavailable (no answer), ImageUnavailable (a wrong answer), InvalidArgument (a wrong
    digest). Cancelling it ends all downloads.
    """
    parts = Pulled(work)
    client = RegistryClient(reference, Access(credentials))
    image = _Image(client, work)
    try:
        top, manifest = await image.manifest(reference.digest or reference.tag, parts)
        for _ in range(3):
            if manifest.config is not None or not manifest.manifests:
                break
            chosen = choose(manifest.manifests, wanted, str(reference))
            _, manifest = await image.manifest(chosen.digest, parts)
        if manifest.config is None:
            raise InvalidArgument(f"{reference} is neither an image nor an index that leads to one", field="source")
        await _fetch_blobs(image, manifest, parts, work)
        return parts, top
    except BaseException:
        work.kept.close()
        raise
    finally:
        await client.close()


def _unpacked(config: bytes, manifest: Manifest) -> dict[str, Digest]:
    """The digest that each layer has when it is unpacked, where the config names it."""
    rootfs = parse(config, OciConfig, "image config").rootfs
    if rootfs is None or len(rootfs.diff_ids) != len(manifest.layers):
        return {}
    return {layer.digest: Digest(text) for layer, text in zip(manifest.layers, rootfs.diff_ids, strict=True)}


def _is_kept(kept: Kept, digest: Digest, diff_id: Digest | None) -> bool:
    """Whether an import that was cut off left this layer, unpacked or as it was fetched."""
    return (diff_id is not None and kept.claim("tar", diff_id)) or kept.claim("blob", digest)


async def _fetch_blobs(image: "_Image", manifest: Manifest, parts: Pulled, work: Workshop) -> None:
    assert manifest.config is not None
    parts.documents[manifest.config.digest] = await image.small_blob(manifest.config)
    if len(manifest.layers) > work.config.layers:
        raise InvalidArgument(
            f"an image of {len(manifest.layers)} layers; the bound is {work.config.layers}", field="source"
        )
    layers = {layer.digest: layer for layer in manifest.layers}
    total = sum(layer.size for layer in layers.values())
    if total > work.config.archive_bytes:
        raise InvalidArgument(f"layers of {total} bytes; the bound is {work.config.archive_bytes}", field="source")
    work.progress.step("download", total)
    slots = asyncio.Semaphore(_PARALLEL)
    unpacked = _unpacked(parts.documents[manifest.config.digest], manifest)

    async def fetch(layer: Descriptor) -> None:
        async with slots:
            digest = Digest(layer.digest)
            if await asyncio.to_thread(_is_kept, work.kept, digest, unpacked.get(layer.digest)):
                work.progress.add(layer.size)
                return
            path = work.folder / f"blob-{digest.hex}"
            await image.large_blob(layer, path)
            with path.open("rb") as file:
                parts.paths[layer.digest] = work.kept.keep("blob", digest, path, file)

    with first_failure():
        async with asyncio.TaskGroup() as group:
            for layer in layers.values():
                group.create_task(fetch(layer))


class _Image:
    """What is fetched of one image."""

    def __init__(self, client: RegistryClient, work: Workshop) -> None:
        self._client = client
        self._work = work

    async def manifest(self, name: str, parts: Pulled) -> tuple[Descriptor, Manifest]:
        """A manifest or index by tag or digest, and its descriptor."""
        async with self._client.request("GET", f"manifests/{name}", headers={"Accept": _ACCEPT}) as answer:
            raw = await read_bounded(answer, self._work.config.document_bytes)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if name.startswith("sha256:"):
            Digest(name).check(digest.removeprefix("sha256:"), "the manifest")
        parts.documents[digest] = raw
        return Descriptor(digest, len(raw), media_type), parse(raw, Manifest, "manifest")

    async def small_blob(self, descriptor: Descriptor) -> bytes:
        digest = Digest(descriptor.digest)
        async with self._client.request("GET", f"blobs/{digest.text}") as answer:
            raw = await read_bounded(answer, self._work.config.document_bytes)
        digest.check(hashlib.sha256(raw).hexdigest(), "the image's config")
        return raw

    async def large_blob(self, descriptor: Descriptor, path: Path) -> None:
        digest, hasher, total = Digest(descriptor.digest), hashlib.sha256(), 0
        async with self._client.request("GET", f"blobs/{digest.text}") as answer:
            with path.open("xb") as out:
                async for data in answer.content.iter_chunked(256 << 10):
                    total += len(data)
                    if total > descriptor.size:
                        raise ImageUnavailable(f"layer {digest.text} is longer than its manifest says")
                    hasher.update(data)
                    out.write(data)
                    self._work.progress.add(len(data))
        digest.check(hasher.hexdigest(), "a layer")
