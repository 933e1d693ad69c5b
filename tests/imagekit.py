"""Images for tests: archives written by the standard library and by hand, OCI layouts, and stores in a folder."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from dsec.images.importing import BuildArgs, Importer, Quiet, open_path
from dsec.images.inputs import ImportConfig, Notes
from dsec.images.names import NameStore
from dsec.images.oci import Platform
from dsec.images.store import LayerStore
from dsec.images.tar import TarInput
from dsec.kernel.clock import SystemClock
from dsec.model.layers import NameRecord
from dsec.model.tree import TreeEntry
from dsec.testing.suite import archives
from dsec.testing.suite.archives import (
    Image,
    descriptor,
    file,
    folder,
    index_of,
    layout_files,
    link,
    other,
    sha,
    symlink,
    tar,
    write_layout,
)  # fmt: skip

__all__ = [
    "CLOCK", "PACKERS", "Image", "Shelf", "descriptor", "file", "folder", "image", "index_of", "layout_files", "link", "other",
    "read_all", "reading", "sha", "symlink", "tar", "write_layout",
]  # fmt: skip

CLOCK = SystemClock()


@dataclass
class Shelf:
    """A store in a folder, as the commands use it."""

    state: Path
    config: ImportConfig = field(default_factory=ImportConfig)

    def __post_init__(self) -> None:
        self.layers = LayerStore(self.state, CLOCK)
        self.names = NameStore(self.state, self.layers, CLOCK)
        self.importer = Importer(self.layers, self.names, CLOCK, self.config)

    def import_image(
        self,
        name: str,
        source: Path,
        ref: str | None = None,
        wanted: Platform | None = None,
        config: ImportConfig | None = None,
    ) -> NameRecord:
        with self.layers.scratch() as folder:
            work = self.importer.workshop(folder, Quiet())
            work.config = config or self.config
            return self.importer.image(name, open_path(source, ref, wanted, work), work)

    def build(self, args: BuildArgs) -> NameRecord:
        return self.importer.layer(args, Quiet())


@contextmanager
def reading(raw: bytes, config: ImportConfig | None = None, *, whole: bool = True) -> Iterator[TarInput]:
    notes = Notes()
    yield TarInput(io.BytesIO(raw), number=0, config=config or ImportConfig(), notes=notes, whole=whole)


def read_all(raw: bytes, config: ImportConfig | None = None) -> list[tuple[TreeEntry, bytes]]:
    with reading(raw, config) as archive:
        entries = list(archive.entries())
        return [(e, b"".join(archive.read(e.content)) if e.content else b"") for e in entries]


PACKERS = {**archives.PACKERS, "+zstd": lambda raw: zstandard.ZstdCompressor().compress(raw)}


def image(
    layers: Sequence[bytes], packing: str = "+gzip", run: dict[str, Any] | None = None, arch: str = "amd64"
) -> Image:
    """An OCI image of layers given as plain tars, zstd ones too."""
    return archives.image(layers, packing, run, arch, PACKERS)
