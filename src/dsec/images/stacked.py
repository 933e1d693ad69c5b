"""An image of the store as one tree, without mounting it: names and attributes from the records of its layers, bytes from their data."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsec.images.making import DATA, FILES
from dsec.images.records import FileRecord, read_records
from dsec.images.store import LayerStore
from dsec.model.errors import ImageUnavailable, NotFound
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.copying import Owner
from dsec.rules.merged import Merged

__all__ = ["StackedImage"]

_PIECE = 1 << 20
_ACCOUNTS_MOST = 1 << 20


class StackedImage:
    """The image of `layers` (digests, lowest first). An Input whose contents name the layer by `Content.source`; `entries` is not for it.
    `tree`: what it shows."""

    def __init__(self, store: LayerStore, layers: Sequence[str]) -> None:
        self._store = store
        self._layers = tuple(layers)
        self.count = len(self._layers)
        self.tree = Merged()
        for number, digest in enumerate(self._layers):
            records = read_records(store.directory(digest) / FILES)
            self.tree.lay(_entry(record, number) for record in records)

    def entries(self) -> Iterator[TreeEntry]:
        """All of the tree."""
        return self.tree.entries()

    def close(self) -> None:
        """Nothing is held."""

    def read(self, content: Content) -> Iterator[bytes]:
        """The bytes of a file. Raises ImageUnavailable for a layer that is not whole here."""
        folder = self._store.directory(self._layers[content.source])
        if (folder / "have").exists():
            text = f"layer {self._layers[content.source]} is loaded on demand; `dsec image pull --load whole` its image first"
            raise ImageUnavailable(text)
        yield from _read(folder / DATA, content)

    def owner(self, text: str) -> Owner:
        """The ids of "user", "user:group" or "", numbers or names of the image's accounts; a user alone has the group of its account, a
        number alone the group of the same number. Raises NotFound for a name that the image does not know."""
        if not text:
            return 0, 0
        user, _, group = text.partition(":")
        if user.isdecimal():
            uid = gid = int(user)
        else:
            fields = self._account(b"etc/passwd", user)
            uid, gid = int(fields[2]), int(fields[3])
        if group.isdecimal():
            gid = int(group)
        elif group:
            gid = int(self._account(b"etc/group", group)[2])
        if max(uid, gid) >= 2**32 - 1:
            raise NotFound(f"{text!a} is no user", what="user")
        return uid, gid

    def _account(self, path: bytes, name: str) -> list[str]:
        entry = self.tree.find(self.tree.resolve(tuple(path.split(b"/"))))
        if entry is not None and entry.content is not None and entry.content.size <= _ACCOUNTS_MOST:
            for line in b"".join(self.read(entry.content)).decode("utf-8", "replace").splitlines():
                fields = line.split(":")
                if fields[0] == name and len(fields) > 3 and fields[2].isdecimal():
                    return fields if fields[3].isdecimal() or path == b"etc/group" else [*fields[:3], fields[2]]
        raise NotFound(f"the image's /{path.decode()} knows no {name!a}", what="user")


def _read(path: Path, content: Content) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            left, at = content.size, content.offset
            while left:
                data = os.pread(file.fileno(), min(left, _PIECE), at)
                if not data:
                    raise ImageUnavailable(f"{path}: shorter than its record says")
                left, at = left - len(data), at + len(data)
                yield data
    except OSError as error:
        raise ImageUnavailable(f"{path}: {error.strerror}") from error


def _entry(record: FileRecord, layer: int) -> TreeEntry:
    kind = EntryKind(record.kind)
    content = Content(record.size, layer, record.offset) if kind is EntryKind.FILE else None
    return TreeEntry(
        record.path, kind, record.mode, record.uid, record.gid, record.mtime, record.mtime_ns, record.rdev, record.target,
        record.xattrs, content,
    )  # fmt: skip
