"""Making a layer's files in a folder, from a composed tree: data, index, record, metadata image and manifest."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dsec.images.blob import BlobWriter, write_contents
from dsec.images.index import encode_index, index_root
from dsec.images.inputs import Input, Progress
from dsec.images.manifests import encode_manifest
from dsec.images.records import FileRecord, to_erofs, write_records
from dsec.images.spool import sha256_of
from dsec.kernel.erofs import BLOCK_BYTES, MAX_DATA_BLOCKS, erofs_image
from dsec.model.errors import InvalidArgument
from dsec.model.layers import SCHEMA_VERSION, Blob, ImageConfig, LayerKind, LayerManifest
from dsec.model.tree import TreeEntry

__all__ = ["CHUNK_BYTES", "DATA", "FILES", "INDEX", "MANIFEST", "META", "LayerArgs", "Made", "make_layer"]

MANIFEST, META, DATA, FILES, INDEX = "manifest.json", "meta.erofs", "data", "files.zst", "index"
CHUNK_BYTES = 16 << 10


@dataclass(frozen=True)
class LayerArgs:
    """What a layer says beside its tree. `below`: digests of the layers beneath it, lowest first; `chunk_bytes`: the target of
    a chunk (dsec.rules.chunks)."""

    kind: LayerKind
    config: ImageConfig = field(default_factory=ImageConfig)
    below: tuple[str, ...] = ()
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True)
class Made:
    """A layer on disk that is not published: its folder with all files, its digest and manifest."""

    folder: Path
    digest: str
    manifest: LayerManifest


def make_layer(
    entries: Sequence[TreeEntry], inputs: Sequence[Input], args: LayerArgs, folder: Path, progress: Progress
) -> Made:
    """Writes the layer of composed `entries` into the new folder `folder`; all of it is on disk then.

    Raises InvalidArgument for what a layer cannot hold.
    """
    folder.mkdir(mode=0o755)
    with (folder / DATA).open("xb", buffering=0) as file:
        with BlobWriter(file.fileno(), args.chunk_bytes) as blob:
            records = write_contents(entries, inputs, blob, progress)
            written = blob.finish()
        progress.step("sync", None)
        os.fsync(file.fileno())
        # Sandboxes read a small part of an image: what nobody has read yet takes no memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    data = Blob(digest=written.digest, size=written.size)
    index = encode_index(data.size, args.chunk_bytes, written.lengths, written.chunks)
    files = _write_records(folder / FILES, records)
    manifest = LayerManifest(
        kind=args.kind,
        meta=_write(folder / META, _metadata(records, files, data)),
        data=data,
        files=files,
        index=_write(folder / INDEX, index),
        chunk_bytes=args.chunk_bytes,
        hash_root=index_root(index),
        entries=len(records),
        content_bytes=sum(record.size for record in records),
        config=args.config,
        below=args.below,
        schema_version=SCHEMA_VERSION,
    )
    raw, digest = encode_manifest(manifest)
    _write(folder / MANIFEST, raw)
    return Made(folder, digest, manifest)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write(path: Path, raw: bytes) -> Blob:
    with path.open("xb") as file:
        file.write(raw)
        _sync(file)
    return Blob(digest=f"sha256:{hashlib.sha256(raw).hexdigest()}", size=len(raw))


def _write_records(path: Path, records: Sequence[FileRecord]) -> Blob:
    with path.open("x+b") as file:
        write_records(file, records)
        _sync(file)
        file.seek(0)
        return Blob(digest=f"sha256:{sha256_of(file)}", size=file.tell())


def _metadata(records: Sequence[FileRecord], files: Blob, data: Blob) -> bytes:
    blocks = data.size // BLOCK_BYTES
    if blocks > MAX_DATA_BLOCKS:
        raise InvalidArgument(f"a layer of {data.size} bytes; the format ends at 16 TiB", field="source")
    # Equal trees get equal images, so the image's identity follows from its content.
    uuid = hashlib.sha256(f"{files.digest} {data.digest}".encode()).digest()[:16]
    try:
        return erofs_image([to_erofs(record) for record in records], uuid, blocks)
    except ValueError as error:
        raise InvalidArgument(str(error), field="source") from error
