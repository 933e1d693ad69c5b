"""What COPY and ADD take files from: a build's context directory, an image's tree, text of the Dockerfile, archives that are unpacked."""

import bz2
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import zstandard
from msgspec.structs import replace

from dsec.images.directory import DirectoryInput
from dsec.images.inputs import ImportConfig, Input, Notes
from dsec.images.oci import Workshop
from dsec.images.tar import TarInput
from dsec.model.build import InlineFile
from dsec.model.errors import InvalidArgument
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import flatten, shown
from dsec.rules.copying import Picked
from dsec.rules.merged import Merged
from dsec.rules.patterns import Ignore

__all__ = ["Archives", "ContextDirectory", "Files", "InlineInput", "digest_of"]

_HEAD = 512
_PIECE = 1 << 20
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open, b"\x28\xb5\x2f\xfd": zstandard.open,
}  # fmt: skip


class Files(Protocol):
    """A tree to copy from: an Input with its tree. Its contents are numbered from 0 to below `count`."""

    tree: Merged

    @property
    def count(self) -> int: ...

    def entries(self) -> Iterator[TreeEntry]: ...
    def read(self, content: Content) -> Iterator[bytes]: ...
    def close(self) -> None: ...


class ContextDirectory:
    """The directory `path` without what `ignore` excludes, as input 0. Attributes of the host's file system other than mode and time
    are left behind."""

    def __init__(self, path: Path, ignore: Ignore, *, config: ImportConfig, notes: Notes) -> None:
        self.count = 1
        self._input = DirectoryInput(path, number=0, config=config, notes=notes)
        self.tree = Merged()
        try:
            self.tree.lay(self._kept(ignore))
        except BaseException:
            self._input.close()
            raise

    def _kept(self, ignore: Ignore) -> Iterator[TreeEntry]:
        firsts: dict[bytes, TreeEntry] = {}
        # A folder that is excluded is there all the same while something in it is taken back.
        held: dict[bytes, TreeEntry] = {}
        for entry in self._input.entries():
            if entry.kind is EntryKind.LINK:
                entry = replace(firsts[entry.target], path=entry.path)  # noqa: PLW2901 - one file of its own, as any other
            else:
                firsts[entry.path] = entry
            entry = replace(entry, xattrs=())  # noqa: PLW2901
            if entry.path and ignore.excludes(entry.path.decode("utf-8", "surrogateescape").split("/")):
                if entry.kind is EntryKind.DIR:
                    held[entry.path] = entry
                continue
            yield from _above(entry.path, held)
            yield entry

    def entries(self) -> Iterator[TreeEntry]:
        """What is not excluded."""
        return self.tree.entries()

    def read(self, content: Content) -> Iterator[bytes]:
        """A file's bytes."""
        return self._input.read(content)

    def close(self) -> None:
        """Lets go of the directory."""
        self._input.close()


def _above(path: bytes, held: dict[bytes, TreeEntry]) -> Iterator[TreeEntry]:
    names = path.split(b"/")
    for length in range(1, len(names)):
        entry = held.pop(b"/".join(names[:length]), None)
        if entry is not None:
            yield entry


class InlineInput:
    """Here-documents as files, as input `number`."""

    def __init__(self, files: Sequence[InlineFile], number: int) -> None:
        self._texts = [each.text.encode("utf-8", "surrogateescape") for each in files]
        names = [each.name.encode("utf-8", "surrogateescape") for each in files]
        self.picked = [
            Picked(name, TreeEntry(path=name, kind=EntryKind.FILE, content=Content(len(text), number, offset=place)))
            for place, (name, text) in enumerate(zip(names, self._texts, strict=True))
        ]

    def entries(self) -> Iterator[TreeEntry]:
        """The files."""
        return (each.entry for each in self.picked)

    def read(self, content: Content) -> Iterator[bytes]:
        """A document's bytes."""
        yield self._texts[content.offset]

    def close(self) -> None:
        """Nothing is held."""


class Archives:
    """Unpacks archives among the files of `source` for ADD: tars, plain or compressed with gzip, bzip2, xz or zstd, told by their first
    bytes. Each becomes an input of its own, numbered from `first` on, in `inputs`."""

    def __init__(self, source: Input, work: Workshop, first: int) -> None:
        self._source = source
        self._work = work
        self._first = first
        self.inputs: list[Input] = []

    def unpack(self, entry: TreeEntry) -> list[TreeEntry] | None:
        """The archive's tree, composed; None for a file that is none. Raises InvalidArgument for one that is damaged."""
        if entry.content is None:
            return None
        head = next(self._source.read(entry.content), b"")
        opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
        if opener is None and head[257:262] != b"ustar":
            return None
        number = self._first + len(self.inputs)
        place = self._work.folder / f"add-{number}.tar"
        try:
            self._spool(entry.content, place, opener)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
            raise InvalidArgument(f"{shown(entry.path)}: damaged: {error}", field="source") from error
        file = place.open("rb", buffering=128 << 10)
        if file.read(_HEAD)[257:262] != b"ustar":
            file.close()  # compressed, and something else
            return None
        file.seek(0)
        archive = TarInput(file, number=number, config=self._work.config, notes=self._work.notes)
        self.inputs.append(archive)
        return flatten([archive.entries()])

    def close(self) -> None:
        """Closes what was unpacked."""
        for each in self.inputs:
            each.close()

    def _spool(self, content: Content, place: Path, opener: Callable[..., Any] | None) -> None:
        """Writes the archive, unpacked, to `place`."""
        packed = place.with_suffix(".packed")
        with packed.open("wb") as file:
            for piece in self._source.read(content):
                file.write(piece)
        if opener is None:
            packed.rename(place)
            return
        left = self._work.config.archive_bytes
        with opener(packed, "rb") as stream, place.open("wb") as file:
            while data := stream.read(_PIECE):
                left -= len(data)
                if left < 0:
                    raise InvalidArgument(
                        f"an archive of more than {self._work.config.archive_bytes} bytes", field="source"
                    )
                file.write(data)
        packed.unlink()


def digest_of(picked: Sequence[Picked], source: Input) -> str:
    """What the picked files are known by: names, kinds, modes, targets and bytes; of owners, times and places nothing."""
    whole = hashlib.sha256()
    for each in picked:
        for path, entry in ((b"", each.entry), *each.inside):
            fields = (each.name, path, int(entry.kind), entry.mode, entry.target, entry.rdev, entry.xattrs)
            whole.update(repr(fields).encode())
            if entry.content is not None:
                inner = hashlib.sha256()
                for piece in source.read(entry.content):
                    inner.update(piece)
                whole.update(inner.digest())
    return whole.hexdigest()
