"""Manifests from outside: a store's bytes become a LayerManifest only if nothing in it can be meant ill."""

import hashlib

import msgspec
from msgspec import Struct

from dsec.images.index import ENTRY_BYTES, HEAD_BYTES
from dsec.images.spool import Digest
from dsec.kernel.erofs import BLOCK_BYTES, MAX_DATA_BLOCKS
from dsec.model.errors import ImageUnavailable, InvalidArgument
from dsec.model.layers import SCHEMA_VERSION, LayerManifest
from dsec.rules.chunks import MAX_CHUNK_BYTES, check_target

__all__ = ["MAX_MANIFEST_BYTES", "decode_manifest", "encode_manifest"]

MAX_MANIFEST_BYTES = 4 << 20
"""Bytes of a manifest's JSON at most: reading more of one is of no use."""
_MAX_META = 1 << 38
_MAX_BELOW = 1024


class _Versioned(Struct):
    schema_version: int = 1


def encode_manifest(manifest: LayerManifest) -> tuple[bytes, str]:
    """The canonical JSON of a manifest, and its digest, which is the layer's."""
    raw = msgspec.json.encode(manifest, order="deterministic")
    return raw, f"sha256:{hashlib.sha256(raw).hexdigest()}"


def decode_manifest(raw: bytes, digest: str) -> LayerManifest:
    """The manifest of layer `digest` from its bytes, all of it checked: digest, version, and that sizes and digests can be meant.

    Raises ImageUnavailable; for a layer of an older version it says so.
    """
    if len(raw) > MAX_MANIFEST_BYTES or f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise ImageUnavailable(f"the manifest of layer {digest} is damaged")
    try:
        version = msgspec.json.decode(raw, type=_Versioned).schema_version
        if version != SCHEMA_VERSION:
            how = "an older" if version < SCHEMA_VERSION else "a newer"
            raise ImageUnavailable(
                f"layer {digest} was made by {how} version of DSec (format {version}): import it again"
            )
        manifest = msgspec.json.decode(raw, type=LayerManifest)
        _check(manifest)
    except (msgspec.DecodeError, InvalidArgument, RecursionError) as error:
        raise ImageUnavailable(f"the manifest of layer {digest} is damaged: {error}") from error
    return manifest


def _check(manifest: LayerManifest) -> None:
    """Raises InvalidArgument for what no writer of ours would have said."""
    digests = [blob.digest for blob in (manifest.meta, manifest.data, manifest.files, manifest.index)]
    for digest in (*digests, manifest.hash_root, *manifest.below):
        Digest(digest)
    check_target(manifest.chunk_bytes)
    blocks, rest = divmod(manifest.data.size, BLOCK_BYTES)
    least, left = divmod(manifest.index.size - HEAD_BYTES, ENTRY_BYTES)
    if (
        rest
        or left
        or not 0 <= blocks <= MAX_DATA_BLOCKS
        or not blocks * BLOCK_BYTES <= least * MAX_CHUNK_BYTES
        or not least <= blocks
        or not 0 < manifest.meta.size <= _MAX_META
        or not 0 < manifest.files.size <= _MAX_META
        or min(manifest.entries, manifest.content_bytes) < 0
    ):
        raise InvalidArgument("its sizes contradict each other", field="manifest")
    if len(manifest.below) > _MAX_BELOW or len(set(manifest.below)) != len(manifest.below):
        raise InvalidArgument(f"more than {_MAX_BELOW} layers below, or one of them twice", field="manifest")
