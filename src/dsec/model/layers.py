"""Layers, manifests and images: what an environment is composed of (paper: base, workspace, toolkit)."""

from enum import StrEnum

from msgspec import Struct

__all__ = ["SCHEMA_VERSION", "Blob", "Composition", "ImageConfig", "LayerKind", "LayerManifest", "NameRecord"]


SCHEMA_VERSION = 2
"""Format of the layers that this version makes and reads; others are refused by name."""


class LayerKind(StrEnum):
    """base: the lowest, with the image's config; workspace: the task; toolkit: tools on top; data: mounted at a path."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    DATA = "data"


class Blob(Struct, frozen=True, kw_only=True):
    """A content-addressed file: `digest` as "sha256:<64 hex>", `size` in bytes."""

    digest: str
    size: int


class ImageConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of the OCI image config that a sandbox honours; env as "K=V" in order, exposed_ports as "80/tcp". Source: OCI image spec, config.md."""

    env: tuple[str, ...] = ()
    user: str = ""
    working_dir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    exposed_ports: tuple[str, ...] = ()
    architecture: str = ""
    os: str = ""


class LayerManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer: a metadata image and the data blob its chunks lie in, both named by digest. All of it is format 2.

    The manifest's own digest (sha256 of its canonical JSON) is the layer's name for machines. `files` is the blob with the
    per-file hashes that `verify` reads back. `index`: the blob that tells the chunks of `data` and their hashes, which are
    aimed at `chunk_bytes` each; `hash_root`: the root over it (dsec.images.index). `below`: digests of the layers that lie
    beneath this one in its image, lowest first. Nothing in it depends on when or from where the layer was made, so that
    equal trees have equal names; that is in the NameRecord. `schema_version` has no default, so that it is always written.
    """

    kind: LayerKind
    meta: Blob
    data: Blob
    files: Blob
    index: Blob
    chunk_bytes: int
    hash_root: str
    entries: int
    content_bytes: int
    schema_version: int
    config: ImageConfig = ImageConfig()
    below: tuple[str, ...] = ()


class NameRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name of the store and the layer that it stands for: where it came from, and when (Unix seconds), for people.

    `notes`: what the import left out, one sentence each. `project`: whose it is, "" is everyone's (the operator's own).
    """

    name: str
    digest: str
    origin: str = ""
    created: float = 0.0
    notes: tuple[str, ...] = ()
    project: str = ""


class Composition(Struct, frozen=True, kw_only=True):
    """Layer digests of an environment, lowest first: base, workspace, toolkits in the order asked; and the base's config."""

    layers: tuple[str, ...]
    config: ImageConfig
