"""Imports: a source becomes layers of the store and gets a name. No path of a source is ever made on the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from dsec.images.directory import DirectoryInput
from dsec.images.inputs import ImportConfig, Input, Progress, Source
from dsec.images.kept import Kept
from dsec.images.layouts import image_in_archive, open_layout
from dsec.images.making import LayerArgs, Made, make_layer
from dsec.images.names import NameStore, check_name
from dsec.images.oci import Platform, Workshop, host_platform
from dsec.images.spool import open_archive
from dsec.images.store import LayerStore
from dsec.images.tar import TarInput
from dsec.model.errors import InvalidArgument, NotFound
from dsec.model.layers import ImageConfig, LayerKind, NameRecord
from dsec.model.tree import EntryKind, TreeEntry
from dsec.ports.clock import Clock
from dsec.rules.compose import components, flatten, flatten_groups, overlay_layer
from dsec.rules.difference import difference, merged

__all__ = ["BuildArgs", "Importer", "Quiet", "open_path"]


class Quiet:
    """Progress that is shown to nobody."""

    def step(self, what: str, total: int | None) -> None:
        pass

    def add(self, count: int) -> None:
        pass


@dataclass(frozen=True)
class BuildArgs:
    """A layer to be built from a directory or a tar: `prefix` is where its content goes in the root ("" is the root itself),
    `owner` (uid, gid) of all of it, `whiteouts` paths that it hides in the layers below (relative to the root)."""

    kind: LayerKind
    name: str
    source: Path
    prefix: bytes = b""
    owner: tuple[int, int] | None = None
    whiteouts: tuple[bytes, ...] = field(default=())


def open_path(path: Path, ref: str | None, wanted: Platform | None, work: Workshop) -> Source:
    """An image in the local filesystem: an OCI layout, a root filesystem's directory, or a tar (plain, gzip, zstd) of a root
    filesystem, of a layout, or by `docker save`. `ref` chooses among several images, `wanted` is the platform (None: this
    host's). Raises NotFound, InvalidArgument, Unsupported.
    """
    platform = wanted or host_platform()
    if path.is_dir():
        if (path / "oci-layout").is_file() and (path / "index.json").is_file():
            return open_layout(path, ref, platform, work)
        entries: Input = DirectoryInput(path, number=0, config=work.config, notes=work.notes)
        return Source([entries], ImageConfig(), f"dir:{path}", work.notes)
    if not path.is_file():
        raise NotFound(f"{path} does not exist", what="source")
    scratch = work.folder / "archive.tar"
    work.progress.step("unpack", path.stat().st_size)
    file = open_archive(path.open("rb", buffering=128 << 10), scratch, work.config, work.progress)
    unpacked = scratch if scratch.exists() else path
    image = image_in_archive(unpacked, f"archive:{path}", ref, platform, work)
    if image is not None:
        file.close()
        return image
    only = TarInput(file, number=0, config=work.config, notes=work.notes)
    return Source([only], ImageConfig(), f"tar:{path}", work.notes)


class Importer:
    """Makes layers in `layers` and names them in `names`."""

    def __init__(self, layers: LayerStore, names: NameStore, clock: Clock, config: ImportConfig | None = None) -> None:
        self._layers = layers
        self._names = names
        self._clock = clock
        self._config = config or ImportConfig()

    def workshop(self, folder: Path, progress: Progress) -> Workshop:
        """Tools for opening a source; `folder` is from LayerStore.scratch."""
        return Workshop(folder, progress, Kept(self._layers.spool, self._config.spool_bytes), self._config)

    def image(self, name: str, source: Source, work: Workshop) -> NameRecord:
        """Makes the layers of `source` into one base layer, or into several that lie on one another where they have more than
        `merge_bytes`; publishes them together and names the topmost; closes the source.

        Raises InvalidArgument, naming the path, for what an image must not hold.
        """
        try:
            check_name(name)
            work.progress.step("read layers", None)
            layers = [list(each.entries()) for each in source.inputs]
            groups = merged([_content_bytes(layer) for layer in layers], work.config.merge_bytes)
            made: list[Made] = []
            below: list[TreeEntry] = []
            for tree in flatten_groups([layers[number] for number in group] for group in groups):
                topmost = len(made) == len(groups) - 1
                under = tuple(each.digest for each in made)
                # Only the topmost is the image's own: what lies beneath is shared with images of another config.
                args = LayerArgs(LayerKind.BASE, source.config if topmost else ImageConfig(), under)
                entries = difference(below, tree) if made else tree
                made.append(make_layer(entries, source.inputs, args, work.folder / f"made-{len(made)}", work.progress))
                below = tree
            record = self._publish(name, made, source)
            work.kept.finish()
            return record
        finally:
            source.close()

    def layer(self, args: BuildArgs, progress: Progress) -> NameRecord:
        """Builds a workspace, toolkit or data layer. Deletions are `.wh.NAME` entries (OCI form) and `args.whiteouts`.

        Raises NotFound, InvalidArgument, Unsupported.
        """
        check_name(args.name)
        if args.kind is LayerKind.BASE:
            raise InvalidArgument("a base is made by `dsec image import`", field="kind")
        if args.kind is LayerKind.DATA and (args.whiteouts or args.prefix):
            raise InvalidArgument("a data layer is mounted alone: it has nothing to hide and no prefix", field="kind")
        with self._layers.scratch() as folder:
            work = self.workshop(folder, progress)
            source = self._open(args, work)
            try:
                progress.step("read", None)
                placed = _placed(source.inputs[0].entries(), args)
                tree = flatten([placed]) if args.kind is LayerKind.DATA else overlay_layer(placed, args.whiteouts)
                made = make_layer(tree, source.inputs, LayerArgs(args.kind), folder / "made", progress)
                return self._publish(args.name, [made], source)
            finally:
                source.close()

    def _open(self, args: BuildArgs, work: Workshop) -> Source:
        if args.source.is_dir():
            below: Input = DirectoryInput(args.source, number=0, config=work.config, notes=work.notes)
            return Source([below], ImageConfig(), f"dir:{args.source}", work.notes)
        if not args.source.is_file():
            raise NotFound(f"{args.source} does not exist", what="source")
        raw = args.source.open("rb", buffering=128 << 10)
        work.progress.step("unpack", args.source.stat().st_size)
        file = open_archive(raw, work.folder / "archive.tar", work.config, work.progress)
        archive = TarInput(file, number=0, config=work.config, notes=work.notes)
        return Source([archive], ImageConfig(), f"tar:{args.source}", work.notes)

    def _publish(self, name: str, made: Sequence[Made], source: Source) -> NameRecord:
        def give_name(digest: str) -> None:
            notes, now = source.notes.all(), self._clock.now()
            self._names.set(NameRecord(name=name, digest=digest, origin=source.origin, created=now, notes=notes))

        self._layers.publish(made, give_name)
        return self._names.record(name)


def _content_bytes(layer: Sequence[TreeEntry]) -> int:
    return sum(entry.content.size for entry in layer if entry.content is not None)


def _placed(entries: Iterator[TreeEntry], args: BuildArgs) -> Iterator[TreeEntry]:
    """Entries below the prefix and with the owner asked for. The root of a layer that others lie under keeps 0755, 0:0:
    overlayfs shows the topmost directory's attributes, and those of a build folder are not meant for `/`."""
    prefix = b"/".join(components(args.prefix.lstrip(b"/")))
    for entry in entries:
        parts = components(entry.path)
        if not parts and not prefix and args.kind is not LayerKind.DATA:
            continue
        changes: dict[str, object] = {}
        if prefix:
            changes["path"] = b"/".join((prefix, *parts))
            if entry.kind is EntryKind.LINK:
                changes["target"] = b"/".join((prefix, *components(entry.target)))
        if args.owner is not None:
            changes["uid"], changes["gid"] = args.owner
        yield replace(entry, **changes) if changes else entry
