"""What a store holds and by which names, below its URL: the same in a directory and in a bucket.

| below v2/ | what |
| --- | --- |
| `store.json` | a StoreHead: the layout's version |
| `names/<name>` | a name and the layer that it stands for, quoted as in a URL |
| `manifests/<hex>` | a layer's manifest by its digest; written when all that it needs is there |
| `blobs/<hex>` | by the digest of the uncompressed bytes: meta and files as a zstd frame, an index as it is |
| `packs/<hex>` | chunks of 4 to 32 MiB in all, by the digest of the pack's bytes |
| `maps/<hex>` | where the chunks of the layer <hex> lie |
| `known/<shard>/<hex>` | segments of the known index |
| `signatures/<hex>/<key>` | signatures of the manifest <hex> by the key <key> |
| `profiles/<hex>/<version>` | access profiles of the layer <hex> |
| `plain/<hex>` | the uncompressed data of a layer, to be mounted from where it is |
| `condemned/<folder and name>` | a mark: `prune` removes that item once it has been unreached for long enough |
"""

import urllib.parse
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from dsec.images.names import check_name
from dsec.images.spool import Digest
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, Unsupported

__all__ = [
    "GRACE_SECONDS", "MAX_DOCUMENT_BYTES", "PUSH_SECONDS", "SAFE_SECONDS", "VERSION", "Folder", "Item", "Store", "StoreHead", "Stored", "StoredName", "listed_name", "mark_of", "named",
    "open_head", "read_name", "write_name",
]  # fmt: skip

VERSION = 2
KNOWN_BITS = 4
MAX_DOCUMENT_BYTES = 1 << 20
PUSH_SECONDS = 6 * 3600.0
"""A push publishes, and names, within this time of reading what the store has, or not at all."""
GRACE_SECONDS = 24 * 3600.0
"""Age of a mark at which `prune` removes what it is of (dsec.images.stores.prune)."""
SAFE_SECONDS = GRACE_SECONDS - 2 * PUSH_SECONDS
"""Age of a mark from which a push leaves alone what it is of; the rest of the grace covers clocks that differ."""


class Folder(StrEnum):
    """The folders of a store."""

    NAMES = "names"
    MANIFESTS = "manifests"
    BLOBS = "blobs"
    PACKS = "packs"
    MAPS = "maps"
    KNOWN = "known"
    SIGNATURES = "signatures"
    PROFILES = "profiles"
    PLAIN = "plain"
    CONDEMNED = "condemned"
    HEAD = "store.json"


class Item(NamedTuple):
    """A thing in a store: its folder, its name there, and the layer (64 hex digits) that it is of, for registries, which keep
    all of a layer behind one manifest ("" for what is of none)."""

    folder: Folder
    name: str
    layer: str = ""

    @property
    def path(self) -> str:
        return f"v{VERSION}/{self.folder}/{self.name}" if self.name else f"v{VERSION}/{self.folder}"


HEAD = Item(Folder.HEAD, "")


def mark_of(item: Item) -> str:
    """The name in `condemned/` of the mark of an item."""
    return urllib.parse.quote(f"{item.folder}/{item.name}", safe="")


class Stored(NamedTuple):
    """An item as listed: its name in the folder, bytes, and when it was written, in Unix seconds (0: the store does not say)."""

    name: str
    size: int
    modified: float


class StoreHead(Struct, frozen=True):
    """`version` of the layout; `known_bits`: the known index has 2**known_bits shards."""

    version: int = VERSION
    known_bits: int = KNOWN_BITS


class StoredName(Struct, frozen=True):
    """What a name in a store stands for: a layer's digest; where that came from and when it was named (Unix seconds)."""

    digest: str
    origin: str = ""
    created: float = 0.0


class Store(Protocol):
    """A store. Every method raises Unavailable (no answer), Unauthenticated, PermissionDenied, and ImageUnavailable for an answer
    that no sound store gives. Reads never believe what they get: callers check digests. Cancelling is safe everywhere.
    """

    @property
    def url(self) -> str: ...

    async def read(self, item: Item, limit: int) -> bytes:
        """All of an item, which may have `limit` bytes at most. Raises NotFound."""

    async def read_range(self, item: Item, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`. Raises NotFound, and ImageUnavailable if the item ends before."""

    async def size(self, item: Item) -> int | None:
        """Bytes of an item; None when it is not there."""

    async def write(self, item: Item, data: bytes | Path) -> None:
        """Puts an item, at once or not at all, in place of what was there; a registry shows it from `publish` on."""

    async def publish(self, layer: str, manifest: bytes, parts: Sequence[Item]) -> None:
        """Makes layer `layer` (hex) visible, once all `parts` that it needs are safe."""

    def list(self, folder: Folder, below: str = "") -> AsyncIterator[Stored]:
        """The items of a folder whose names begin with `below`. Raises ImageUnavailable when they do not end."""

    async def remove(self, item: Item) -> None:
        """Removes an item; one that is not there is no error."""

    async def close(self) -> None:
        """Ends all connections."""


def named(name: str) -> Item:
    """The item of an image's name. Raises InvalidArgument for what is no name."""
    return Item(Folder.NAMES, urllib.parse.quote(check_name(name), safe=""))


def read_name(raw: bytes, name: str) -> StoredName:
    """What a store says of a name, checked. Raises ImageUnavailable."""
    try:
        found = msgspec.json.decode(raw, type=StoredName)
        Digest(found.digest)
    except (msgspec.DecodeError, InvalidArgument) as error:
        raise ImageUnavailable(f"what the store says of {name!a} is damaged: {error}") from error
    return found


async def write_name(store: Store, name: str, stands: StoredName) -> None:
    """Makes `name` stand for a layer that the store has."""
    await store.write(named(name), msgspec.json.encode(stands))


def listed_name(quoted: str) -> str | None:
    """The image's name of an item in `names/`; None for what nobody could have named so."""
    name = urllib.parse.unquote(quoted)
    try:
        return name if named(name).name == quoted else None
    except InvalidArgument:
        return None


async def open_head(store: Store, *, create: bool) -> StoreHead:
    """The head of a store; an empty store gets one if `create`. Raises NotFound, and as `read_head`."""
    try:
        return _read_head(await store.read(HEAD, MAX_DOCUMENT_BYTES), store.url)
    except NotFound:
        if not create:
            raise NotFound(f"{store.url} is no store of layers: it has no {HEAD.path}", what="store") from None
    head = StoreHead()
    await store.write(HEAD, msgspec.json.encode(head))
    return head


def _read_head(raw: bytes, url: str) -> StoreHead:
    """The head of a store. Raises ImageUnavailable for a damaged one, Unsupported for a layout of another version."""
    try:
        head = msgspec.json.decode(raw, type=StoreHead)
    except msgspec.DecodeError as error:
        raise ImageUnavailable(f"{url}: store.json is damaged: {error}") from error
    if head.version != VERSION or not 0 <= head.known_bits <= 8:
        raise Unsupported(f"{url} has layout {head.version}; this program knows {VERSION}", what="store")
    return head
