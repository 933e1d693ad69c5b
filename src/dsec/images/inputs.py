"""What an import reads from: inputs that list entries first and give the bytes of chosen files afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from dsec.model.errors import InvalidArgument
from dsec.model.layers import ImageConfig
from dsec.model.tree import Content, TreeEntry
from dsec.rules.compose import shown

__all__ = ["ImportConfig", "Input", "Notes", "Progress", "Source", "kept_xattrs"]

_NAMESPACES = (b"user.", b"trusted.", b"security.")
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")


@dataclass(frozen=True)
class ImportConfig:
    """Bounds of an import. `entries` of one layer; bytes of all files of one layer; bytes of one layer's archive, unpacked;
    bytes of one extended header of an archive; pieces of one sparse file; bytes of a JSON document; layers of an image.

    `merge_bytes`: neighbouring layers of an image become one while their files have at most that many bytes.
    `spool_bytes`: what imports that were cut off may leave for the next ones, fetched and unpacked layers together."""

    entries: int = 5_000_000
    content_bytes: int = 1 << 40
    archive_bytes: int = 1 << 40
    header_bytes: int = 4 << 20
    sparse_pieces: int = 200_000
    document_bytes: int = 16 << 20
    layers: int = 1024
    merge_bytes: int = 3 << 30
    spool_bytes: int = 16 << 30


class Progress(Protocol):
    """Told of work as it goes: `step` names what is done next and its size in bytes (None: not known); `add` counts bytes."""

    def step(self, what: str, total: int | None) -> None: ...
    def add(self, count: int) -> None: ...


class Notes:
    """What an import left out, for the person who asked for it: one sentence each, each once, at most 100 of them."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def add(self, sentence: str) -> None:
        if sentence in self._seen or len(self._seen) < 100:
            self._seen[sentence] = self._seen.get(sentence, 0) + 1

    def all(self) -> tuple[str, ...]:
        return tuple(f"{text} ({count} times)" if count > 1 else text for text, count in self._seen.items())


class Input(Protocol):
    """One layer's archive or directory. `entries` may be called once, before `read`.

    `read` gives a file's bytes in order, in pieces of at most 1 MiB, exactly `content.size` of them in all. Raises
    InvalidArgument for what the input must not hold, ImageUnavailable when it cannot be read or has changed.
    """

    def entries(self) -> Iterator[TreeEntry]: ...
    def read(self, content: Content) -> Iterator[bytes]: ...
    def close(self) -> None: ...


@dataclass
class Source:
    """All that makes an image: its layers' inputs (lowest first), its config, and where it came from, for people."""

    inputs: list[Input]
    config: ImageConfig
    origin: str
    notes: Notes = field(default_factory=Notes)

    def close(self) -> None:
        for each in self.inputs:
            each.close()


def kept_xattrs(pairs: list[tuple[bytes, bytes]], path: bytes, notes: Notes) -> tuple[tuple[bytes, bytes], ...]:
    """The attributes that a layer can hold, sorted: user, trusted, security and POSIX ACLs; others are noted and left out.

    Raises InvalidArgument for a value over 65,535 bytes.
    """
    kept = []
    for name, value in pairs:
        if len(value) > 65_535:
            raise InvalidArgument(f"{shown(path)}: attribute {shown(name)} is over 65,535 bytes", field="path")
        if name in _ACLS or (name.startswith(_NAMESPACES) and b"\0" not in name and len(name) <= 255):
            kept.append((name, value))
        else:
            notes.add(f"attributes named {shown(name)} were left out: no namespace that a layer can hold")
    return tuple(sorted(dict(kept).items()))
