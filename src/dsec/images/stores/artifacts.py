"""Stores in an OCI registry: a layer is an artifact, whose blobs are what a directory store keeps in files.

| in the registry | what |
| --- | --- |
| tag `_l-<hex>` | the artifact of the layer <hex>: its manifest, meta, files, index, map and packs as blobs, by the title `<folder>/<name>` |
| a name, escaped | the same artifact |
| tag `_known-<shard>` | an artifact whose blobs are the shard's segments of the known index |
| referrers of an artifact | signatures and profiles; where the registry has no referrers API by the tag `sha256-<hex>`, as OCI 1.1 says |

Packs and segments have their own digests as blobs', so that a pager reads a pack by range requests on a blob. Removing is left to
the registry: it collects what no tag reaches.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.images.registryclient import Access, Credentials, RegistryClient, parse_reference, read_bounded
from dsec.images.spool import sha256_of
from dsec.images.stores.layout import Folder, Item, Stored, StoredName, StoreHead, named
from dsec.images.stores.tags import KNOWN_TAG, layer_tag, name_of_tag, tag_of_name
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, Unsupported
from dsec.model.stores import StoreOptions

__all__ = ["Artifacts", "open_registry"]

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_EMPTY = b"{}"
_KIND = "application/vnd.dsec.{}.v2+json"
_BLOB_TYPE = "application/vnd.dsec.layer.{}.v2"
_TITLE = "org.opencontainers.image.title"
_DIGEST = "vnd.dsec.layer.digest"
_MAX_MANIFEST = 16 << 20
MAX_LISTED = 2_000_000
_PAGE = 1000
_LINK = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')


class _Descriptor(Struct, frozen=True, rename="camel", omit_defaults=True):
    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: dict[str, str] = {}


class _Artifact(Struct, frozen=True, rename="camel", omit_defaults=True):
    schema_version: int
    media_type: str
    artifact_type: str
    config: _Descriptor
    layers: tuple[_Descriptor, ...]
    subject: _Descriptor | None = None
    annotations: dict[str, str] = {}


class _Referrers(Struct, frozen=True, rename="camel"):
    schema_version: int = 2
    media_type: str = _INDEX
    manifests: tuple[_Descriptor, ...] = ()


class _Tags(Struct, frozen=True):
    tags: tuple[str, ...] | None = ()


_EMPTY_CONFIG = _Descriptor(_EMPTY_TYPE, f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}", len(_EMPTY))


class Artifacts:
    """A store in one repository of a registry. Made inside a running loop."""

    def __init__(self, url: str, client: RegistryClient) -> None:
        self.url = url
        self._client = client
        self._artifacts: dict[str, _Artifact] = {}
        self._parts: dict[tuple[str, str], _Descriptor] = {}
        self._sizes: dict[str, int] = {}
        self._shards = asyncio.Lock()

    async def read(self, item: Item, limit: int) -> bytes:
        if item.folder is Folder.HEAD:
            return msgspec.json.encode(StoreHead())  # a registry's layout is told by media types
        if item.folder is Folder.NAMES:
            return await self._read_name(item)
        descriptor = await self._descriptor(item)
        if descriptor.size > limit:
            raise ImageUnavailable(f"{item.path} of {self.url} is longer than {limit} bytes")
        async with self._client.request("GET", f"blobs/{descriptor.digest}") as answer:
            return await read_bounded(answer, limit)

    async def read_range(self, item: Item, offset: int, length: int) -> bytes:
        digest = await self._blob_digest(item)
        ranges = {"Range": f"bytes={offset}-{offset + length - 1}"}
        async with self._client.request("GET", f"blobs/{digest}", headers=ranges, accepted=(200, 206)) as answer:
            if answer.status == 200 and offset:
                raise Unsupported(f"{self.url}: the registry does not serve ranges of blobs", what="range")
            raw = await read_bounded(answer, length)
        if len(raw) != length:
            raise ImageUnavailable(f"{self.url}: {item.path} ends before byte {offset + length}")
        return raw

    async def size(self, item: Item) -> int | None:
        try:
            if item.folder in (Folder.PACKS, Folder.KNOWN):
                return await self._blob_size(await self._blob_digest(item))
            return (await self._descriptor(item)).size
        except NotFound:
            return None

    async def write(self, item: Item, data: bytes | Path) -> None:
        if item.folder is Folder.NAMES:
            await self._write_name(item, data)
        elif item.folder is Folder.KNOWN:
            await self._upload(data)
            await self._change_shard(item.name.partition("/")[0], add=item)
        elif item.folder in (Folder.SIGNATURES, Folder.PROFILES):
            await self._refer(item, await self._upload(data, item))
        elif item.folder is Folder.PACKS:
            await self._upload(data, item)
        elif item.folder in (Folder.BLOBS, Folder.MAPS):
            self._parts[item.layer, _title(item)] = await self._upload(data, item)
        elif item.folder is not Folder.HEAD:
            raise self._unsupported(item)

    async def publish(self, layer: str, manifest: bytes, parts: Sequence[Item]) -> None:
        first = Item(Folder.MANIFESTS, layer, layer)
        layers = [await self._upload(manifest, first)]
        for part in parts:
            layers.append(await self._part(part))
        digest = f"sha256:{layer}"
        artifact = await self._artifact_of("layer", layers, annotations={_DIGEST: digest})
        await self._put(layer_tag(layer), msgspec.json.encode(artifact), _MANIFEST)
        self._artifacts[layer] = artifact

    async def list(self, folder: Folder, below: str = "") -> AsyncIterator[Stored]:
        if folder in (Folder.SIGNATURES, Folder.PROFILES) and below:
            for item, descriptor in await self._referrers(below):
                if item.folder is folder:
                    yield Stored(item.name, descriptor.size, 0.0)
        elif folder in (Folder.NAMES, Folder.MANIFESTS):
            async for tag in self._tags():
                name = name_of_tag(tag)
                if folder is Folder.NAMES and name is not None:
                    yield Stored(named(name).name, 0, 0.0)
                elif folder is Folder.MANIFESTS and tag == layer_tag(tag[-64:]):
                    yield Stored(tag[-64:], 0, 0.0)
        elif folder is Folder.KNOWN:
            async for tag in self._tags():
                if tag.startswith(KNOWN_TAG):
                    for descriptor in (await self._artifact(tag)).layers:
                        name = f"{tag.removeprefix(KNOWN_TAG)}/{descriptor.digest.removeprefix('sha256:')}"
                        yield Stored(name, descriptor.size, 0.0)
        elif folder is not Folder.CONDEMNED:
            raise self._unsupported(Item(folder, below))

    async def remove(self, item: Item) -> None:
        if item.folder is not Folder.KNOWN:
            raise self._unsupported(item)
        await self._change_shard(item.name.partition("/")[0], remove=item)

    async def close(self) -> None:
        await self._client.close()

    async def _blob_digest(self, item: Item) -> str:
        """The digest of the blob that holds an item: packs and segments are named by it."""
        if item.folder in (Folder.PACKS, Folder.KNOWN):
            return f"sha256:{item.name.rpartition('/')[2]}"
        return (await self._descriptor(item)).digest

    async def _descriptor(self, item: Item) -> _Descriptor:
        if item.folder in (Folder.PACKS, Folder.KNOWN):
            digest = await self._blob_digest(item)
            return _Descriptor("", digest, await self._blob_size(digest))
        if item.folder in (Folder.SIGNATURES, Folder.PROFILES):
            found = [each for other, each in await self._referrers(item.layer) if other.name == item.name]
            if not found:
                raise self._missing(item)
            # The newest referrer is the last one listed; its only layer is the item.
            artifact = await self._artifact(found[-1].digest)
            if len(artifact.layers) != 1:
                raise ImageUnavailable(f"{self.url}: {item.path} is not one blob")
            return artifact.layers[0]
        if (item.layer, _title(item)) in self._parts:
            return self._parts[item.layer, _title(item)]
        for descriptor in (await self._layer(item.layer)).layers:
            if descriptor.annotations.get(_TITLE) == _title(item):
                return descriptor
        raise self._missing(item)

    async def _part(self, part: Item) -> _Descriptor:
        """The descriptor of what a layer needs; a pack of another layer is a blob of the repository too."""
        descriptor = self._parts.pop((part.layer, _title(part)), None)
        if descriptor is not None:
            return descriptor
        digest = await self._blob_digest(part)
        return _described(part, digest, await self._blob_size(digest))

    async def _layer(self, layer: str) -> _Artifact:
        if layer not in self._artifacts:
            if len(self._artifacts) > 64:
                self._artifacts.clear()
            self._artifacts[layer] = await self._artifact(layer_tag(layer))
        return self._artifacts[layer]

    async def _artifact(self, reference: str) -> _Artifact:
        raw = await self._document(reference, _MANIFEST)
        try:
            return msgspec.json.decode(raw, type=_Artifact)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ImageUnavailable(f"{self.url}: {reference} is no layer of ours: {error}") from error

    async def _document(self, reference: str, kind: str) -> bytes:
        async with self._client.request("GET", f"manifests/{reference}", headers={"Accept": kind}) as answer:
            raw = await read_bounded(answer, _MAX_MANIFEST)
        if reference.startswith("sha256:") and f"sha256:{hashlib.sha256(raw).hexdigest()}" != reference:
            raise ImageUnavailable(f"{self.url}: what the registry gives for {reference} is something else")
        return raw

    async def _blob_size(self, digest: str) -> int:
        if digest not in self._sizes:
            async with self._client.request("HEAD", f"blobs/{digest}") as answer:
                length = answer.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > 15:
                raise ImageUnavailable(f"{self.url}: the registry does not say how long blob {digest} is")
            self._sizes[digest] = int(length)
        return self._sizes[digest]

    async def _upload(self, data: bytes | Path, item: Item | None = None) -> _Descriptor:
        """Puts a blob, unless it is there."""
        digest, size = await asyncio.to_thread(_measure, data)
        try:
            there = await self._blob_size(digest) == size
        except NotFound:
            there = False
        if not there:
            async with self._client.request("POST", "blobs/uploads/", body=b"", accepted=(202,)) as answer:
                location = answer.headers.get("Location", "")
            target = f"{location}{'&' if '?' in location else '?'}digest={digest}"
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            async with self._client.request("PUT", target, headers=headers, body=data, accepted=(201,)):
                self._sizes[digest] = size
        return _described(item, digest, size)

    async def _put(self, reference: str, raw: bytes, kind: str) -> bool:
        """Puts a manifest; whether the registry took note of its subject."""
        headers = {"Content-Type": kind}
        path = f"manifests/{reference}"
        async with self._client.request("PUT", path, headers=headers, body=raw, accepted=(200, 201, 202)) as answer:
            return "OCI-Subject" in answer.headers

    async def _artifact_of(
        self,
        kind: str,
        layers: Sequence[_Descriptor],
        subject: _Descriptor | None = None,
        annotations: dict[str, str] | None = None,
    ) -> _Artifact:
        await self._upload(_EMPTY)
        return _Artifact(2, _MANIFEST, _KIND.format(kind), _EMPTY_CONFIG, tuple(layers), subject, annotations or {})

    async def _read_name(self, item: Item) -> bytes:
        artifact = await self._artifact(tag_of_name(item))
        return msgspec.json.encode(StoredName(artifact.annotations.get(_DIGEST, ""), self.url))

    async def _write_name(self, item: Item, data: bytes | Path) -> None:
        if isinstance(data, Path):
            raise InvalidArgument("a name is not a file", field="name")
        layer = msgspec.json.decode(data, type=StoredName).digest.removeprefix("sha256:")
        await self._put(tag_of_name(item), await self._document(layer_tag(layer), _MANIFEST), _MANIFEST)

    async def _change_shard(self, shard: str, add: Item | None = None, remove: Item | None = None) -> None:
        """Adds a segment to a shard's artifact, or takes one away. Of two clients at the same time one may lose: it costs space."""
        async with self._shards:
            try:
                layers = list((await self._artifact(KNOWN_TAG + shard)).layers)
            except NotFound:
                layers = []
            if add is not None:
                layers.append(await self._part(add))
            if remove is not None:
                gone = await self._blob_digest(remove)
                layers = [each for each in layers if each.digest != gone]
            unique = tuple({each.digest: each for each in layers}.values())
            artifact = await self._artifact_of("known", unique)
            await self._put(KNOWN_TAG + shard, msgspec.json.encode(artifact), _MANIFEST)

    async def _refer(self, item: Item, blob: _Descriptor) -> None:
        """Puts an artifact that refers to the layer's, and notes that by tag where the registry does not."""
        raw = await self._document(layer_tag(item.layer), _MANIFEST)
        subject = _Descriptor(_MANIFEST, f"sha256:{hashlib.sha256(raw).hexdigest()}", len(raw))
        artifact = await self._artifact_of(item.folder, [blob], subject, {_TITLE: _title(item)})
        document = msgspec.json.encode(artifact)
        digest = f"sha256:{hashlib.sha256(document).hexdigest()}"
        if await self._put(digest, document, _MANIFEST):
            return
        descriptor = _Descriptor(_MANIFEST, digest, len(document), artifact.artifact_type, artifact.annotations)
        tag = subject.digest.replace(":", "-")
        others = [each for each in await self._referred(tag) if each.annotations.get(_TITLE) != _title(item)]
        index = _Referrers(manifests=(*others, descriptor))
        await self._put(tag, msgspec.json.encode(index), _INDEX)

    async def _referrers(self, layer: str) -> Sequence[tuple[Item, _Descriptor]]:
        raw = await self._document(layer_tag(layer), _MANIFEST)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        try:
            async with self._client.request("GET", f"referrers/{digest}", headers={"Accept": _INDEX}) as answer:
                found = _decode_index(await read_bounded(answer, _MAX_MANIFEST), self.url)
        except NotFound:
            found = await self._referred(digest.replace(":", "-"))
        items = []
        for descriptor in found:
            folder, _, name = descriptor.annotations.get(_TITLE, "").partition("/")
            if folder in (Folder.SIGNATURES, Folder.PROFILES) and name.startswith(f"{layer}/"):
                items.append((Item(Folder(folder), name, layer), descriptor))
        return items

    async def _referred(self, tag: str) -> tuple[_Descriptor, ...]:
        try:
            return _decode_index(await self._document(tag, _INDEX), self.url)
        except NotFound:
            return ()

    async def _tags(self) -> AsyncIterator[str]:
        path, seen = f"tags/list?n={_PAGE}", 0
        while path:
            try:
                async with self._client.request("GET", path) as answer:
                    raw = await read_bounded(answer, _MAX_MANIFEST)
                    following = _LINK.search(answer.headers.get("Link", ""))
            except NotFound:
                return  # a repository that nobody has pushed to
            try:
                tags = msgspec.json.decode(raw, type=_Tags).tags or ()
            except msgspec.DecodeError as error:
                raise ImageUnavailable(f"{self.url}: the list of tags is damaged: {error}") from error
            seen += max(len(tags), _PAGE)  # an empty page counts too: they must end
            if seen > MAX_LISTED:
                raise ImageUnavailable(f"{self.url} has more than {MAX_LISTED} tags")
            for tag in tags:
                yield tag
            path = following[1] if following else ""

    def _missing(self, item: Item) -> NotFound:
        return NotFound(f"{self.url} has no {item.path}", what="store item")

    def _unsupported(self, item: Item) -> Unsupported:
        return Unsupported(f"{self.url}: a registry keeps and collects {item.folder} by itself", what="registry")


def open_registry(options: StoreOptions, *, push: bool) -> Artifacts:
    """The store of oci://host/repository; `push` asks the token service for the right to write. Raises InvalidArgument."""
    reference = parse_reference(options.url.removeprefix("oci://"))
    if options.url != f"oci://{reference.host}/{reference.repository}":
        raise InvalidArgument(f"{options.url[:200]!a} is not oci://host/repository", field="store")
    credentials = Credentials(options.username, options.password) if options.username else None
    access = Access(credentials, options.token, "pull,push" if push else "pull", options.allow_http)
    return Artifacts(options.url, RegistryClient(reference, access))


def _title(item: Item) -> str:
    return f"{item.folder}/{item.name}"


def _described(item: Item | None, digest: str, size: int) -> _Descriptor:
    if item is None:
        return _Descriptor(_EMPTY_TYPE, digest, size)
    return _Descriptor(_BLOB_TYPE.format(item.folder), digest, size, annotations={_TITLE: _title(item)})


def _measure(data: bytes | Path) -> tuple[str, int]:
    if isinstance(data, bytes):
        return f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)
    with data.open("rb") as file:
        return f"sha256:{sha256_of(file)}", file.tell()


def _decode_index(raw: bytes, url: str) -> tuple[_Descriptor, ...]:
    try:
        return msgspec.json.decode(raw, type=_Referrers).manifests
    except (msgspec.DecodeError, RecursionError) as error:
        raise ImageUnavailable(f"{url}: a list of referrers is damaged: {error}") from error
