"""Names of layers: STATE/images/<escaped name>.json, each a NameRecord; a name is changed by renaming a new file over it."""

import os
import re
import urllib.parse
from pathlib import Path

import msgspec

from dsec.images.store import LayerStore
from dsec.model.errors import Conflict, ImageUnavailable, InvalidArgument, NotFound
from dsec.model.layers import LayerKind, LayerManifest, NameRecord
from dsec.model.views import ImageView, LayerView
from dsec.ports.clock import Clock

__all__ = ["BUILD_PREFIX", "NameStore", "check_name"]

BUILD_PREFIX = "dsec-build/"
"""Names that begin so are of builds: a step's layer by its key. No list shows them."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/:@+-]*[A-Za-z0-9])?")
_MAX = 128
_SUFFIX = ".json"


def check_name(name: str) -> str:
    """`name` itself, if it can name a layer: "name", "name:tag" or "name@version", with slashes; at most 128 characters.

    Raises InvalidArgument.
    """
    if len(name) > _MAX or not _NAME.fullmatch(name) or ".." in name or "//" in name or name.startswith("sha256:"):
        raise InvalidArgument(
            f"{name[:200]!a} is not a name: letters, digits and ._/:@+- between letters or digits, at most {_MAX}",
            field="name",
        )
    return name


class NameStore:
    """The names below the state directory `state`. Safe to use from several processes; each sees the others' changes at once."""

    def __init__(self, state: Path, layers: LayerStore, clock: Clock) -> None:
        self._folder = state / "images"
        self._layers = layers
        self._clock = clock
        # What a name's file said, while it is the same file: a lookup costs one stat.
        self._seen: dict[str, tuple[str, int, int, NameRecord]] = {}

    def record(self, name: str) -> NameRecord:
        """What `name` stands for; a layer's digest stands for itself. Raises NotFound and InvalidArgument."""
        known = self._seen.get(name)
        if known is not None:
            try:
                found = os.stat(known[0])
            except FileNotFoundError:
                del self._seen[name]
            else:
                if (found.st_ino, found.st_mtime_ns) == known[1:3]:
                    return known[3]
        if name.startswith("sha256:"):
            self._layers.manifest(name)
            return NameRecord(name=name, digest=name)
        return self._read(name)

    def has(self, name: str) -> bool:
        """Whether `name` stands for something here. Raises InvalidArgument for what can be no name."""
        try:
            self.record(name)
        except NotFound:
            return False
        return True

    def _read(self, name: str) -> NameRecord:
        path = self._path(name)
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                record = msgspec.json.decode(file.read(), type=NameRecord)
        except FileNotFoundError:
            text = f"no image or layer is named {name!a}; `dsec image list` shows the names"
            raise NotFound(text, what="image") from None
        except msgspec.DecodeError as error:
            raise ImageUnavailable(f"the record of {name!a} is damaged: {error}") from error
        if len(self._seen) >= 65_536:
            self._seen.clear()
        self._seen[name] = (str(path), found.st_ino, found.st_mtime_ns, record)
        return record

    def resolve(self, name: str, kind: LayerKind) -> tuple[str, LayerManifest]:
        """The digest and manifest of the layer `name`, which must be of `kind`. Raises NotFound, Conflict, ImageUnavailable."""
        record = self.record(name)
        try:
            manifest = self._layers.manifest(record.digest)
        except NotFound as error:
            raise ImageUnavailable(f"the layer of {name!a} is missing in the store: {record.digest}") from error
        if manifest.kind is not kind:
            raise Conflict(f"{name!a} is a {manifest.kind} layer, and is asked for as {kind}", what="kind")
        return record.digest, manifest

    def set(self, record: NameRecord) -> None:
        """Gives a layer a name; the name then stands for it alone. Raises InvalidArgument for what cannot be a name."""
        path = self._path(check_name(record.name))
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = path.with_name(f".{self._clock.random(8).hex()}")
        with self._layers.naming():
            if not self._layers.exists(record.digest):
                raise NotFound(f"no layer {record.digest} in the store", what="layer")
            try:
                with fresh.open("xb") as file:
                    file.write(msgspec.json.encode(record))
                    file.flush()
                    os.fsync(file.fileno())
                fresh.rename(path)
            finally:
                fresh.unlink(missing_ok=True)

    def tag(self, name: str, new: str) -> None:
        """Gives the layer of `name` the name `new` too. Raises NotFound and InvalidArgument."""
        self.set(msgspec.structs.replace(self.record(name), name=check_name(new)))

    def remove(self, name: str) -> None:
        """Forgets a name; the layer stays until `dsec cache gc`, and running sandboxes are not touched. Raises NotFound."""
        try:
            self._path(check_name(name)).unlink()
        except FileNotFoundError:
            raise NotFound(f"no image or layer is named {name!a}", what="image") from None

    def all(self) -> list[NameRecord]:
        """All names, sorted."""
        if not self._folder.is_dir():
            return []
        names = [
            urllib.parse.unquote(e.name.removesuffix(_SUFFIX)) for e in os.scandir(self._folder) if e.name[0] != "."
        ]
        found = []
        for name in sorted(names):
            try:
                found.append(self.record(name))
            except NotFound:
                continue  # removed by another process in between
        return found

    def views(self) -> list[ImageView]:
        """All names with their layers, for people and programs. Left out: those of builds' steps, and names whose layers are missing, damaged, or of another
        version."""
        found = []
        for record in self.all():
            if record.name.startswith(BUILD_PREFIX):
                continue
            try:
                found.append(self._view(record))
            except (NotFound, ImageUnavailable):
                continue
        return found

    def view(self, name: str) -> ImageView:
        """One name with its layers. Raises NotFound and ImageUnavailable."""
        record = self.record(name)
        try:
            return self._view(record)
        except NotFound as error:
            raise ImageUnavailable(f"a layer of {name!a} is missing in the store: {error.detail}") from error

    def _view(self, record: NameRecord) -> ImageView:
        manifest = self._layers.manifest(record.digest)
        manifests = [manifest, *(self._layers.manifest(digest) for digest in manifest.below)]
        blobs = [blob for each in manifests for blob in (each.meta, each.data, each.files, each.index)]
        layer = LayerView(
            digest=record.digest,
            kind=manifest.kind,
            entries=sum(each.entries for each in manifests),
            content_bytes=sum(each.content_bytes for each in manifests),
            stored_bytes=sum(blob.size for blob in blobs),
            origin=record.origin,
        )
        return ImageView(name=record.name, layer=layer, project=record.project)

    def _path(self, name: str) -> Path:
        return self._folder / (urllib.parse.quote(check_name(name), safe="") + _SUFFIX)
