"""COPY and ADD without running anything: which files of a tree are taken, and the layer that they make over an image.

Source: the Dockerfile reference. A folder's content is copied, not the folder; a file goes to the destination's name, or into it where it
ends with a slash or is a folder already; folders that are missing on the way are made. Symlinks of the image are followed on the way to the
destination, as a process in it would; those among what is copied are copied.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dsec.model.errors import InvalidArgument, NotFound
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR, components, shown
from dsec.rules.merged import Merged
from dsec.rules.patterns import PathPattern, is_pattern

__all__ = ["Owner", "Picked", "Target", "make_parents", "pick", "place"]

_Names = tuple[bytes, ...]
Owner = tuple[int, int]


class Picked(Struct, frozen=True):
    """A source that was found: its own entry, and, of a folder, those of all that is in it, by their path below it."""

    name: bytes
    entry: TreeEntry
    inside: tuple[tuple[bytes, TreeEntry], ...] = ()


class Target(Struct, frozen=True, kw_only=True):
    """Where a copy goes: `dest` absolute, a slash at its end says folder; `owner` of all of it; `mode` of all of it, None: its own."""

    dest: str
    owner: Owner
    mode: int | None = None


def pick(tree: Merged, sources: Sequence[str]) -> list[Picked]:
    """What `sources` (paths and patterns from the tree's root; ".." never leads above it) stand for, in their order and that of names.

    Raises NotFound for one that stands for nothing.
    """
    listed = list(tree.entries())
    found: list[Picked] = []
    for source in sources:
        names = _within(source)
        if is_pattern(source) and names:
            pattern = PathPattern("/".join(names))
            matches = [
                e for e in listed if e.path and pattern.matches(e.path.decode("utf-8", "surrogateescape").split("/"))
            ]
        else:
            wanted = tree.resolve(tuple(name.encode("utf-8", "surrogateescape") for name in names))
            entry = tree.find(wanted)
            matches = [entry] if entry is not None else []
        if not matches:
            raise NotFound(f"{source!a}: no such file or folder to copy", what="source")
        found.extend(_picked(each, listed) for each in matches)
    return found


def _within(source: str) -> list[str]:
    names: list[str] = []
    for name in source.split("/"):
        if name == "..":
            names = names[:-1]
        elif name not in ("", "."):
            names.append(name)
    return names


def _picked(entry: TreeEntry, listed: Sequence[TreeEntry]) -> Picked:
    name = entry.path.rpartition(b"/")[2]
    if entry.kind is not EntryKind.DIR:
        return Picked(name, entry)
    prefix = entry.path + b"/" if entry.path else b""
    inside = [
        (e.path[len(prefix) :], e) for e in listed if e.path.startswith(prefix) and e.path != entry.path and e.path
    ]
    return Picked(name, entry, tuple(inside))


class _Layer:
    """The layer being made over `lower`: entries by the names of their paths."""

    def __init__(self, lower: Merged, owner: Owner) -> None:
        self.lower = lower
        self.owner = owner
        self.made: dict[_Names, TreeEntry] = {(): _plain(lower.find(()))}

    def kind_at(self, names: _Names) -> EntryKind | None:
        """What is there, in this layer or beneath it."""
        there = self.made.get(names) or self.lower.find(names)
        return there.kind if there is not None else None

    def parents(self, names: _Names) -> None:
        """The folder `names` and those above it: as they are beneath, or new ones of the owner."""
        for length in range(1, len(names) + 1):
            path = names[:length]
            if path in self.made and self.made[path].kind is EntryKind.DIR:
                continue
            there = self.made.get(path) or self.lower.find(path)
            if there is not None and there.kind is not EntryKind.DIR:
                raise InvalidArgument(f"/{shown(b'/'.join(path))} is no folder", field="dest")
            uid, gid = self.owner
            new = TreeEntry(path=b"", kind=EntryKind.DIR, mode=0o755, uid=uid, gid=gid)
            self.made[path] = _plain(there) if there is not None else new

    def put(self, names: _Names, entry: TreeEntry) -> None:
        """One entry at its place; a folder where one is already stays as that is."""
        there = self.kind_at(names)
        if entry.kind is EntryKind.DIR:
            if there is EntryKind.DIR:
                self.parents(names)
                return
            if there is not None:
                raise InvalidArgument(
                    f"/{shown(b'/'.join(names))}: a folder cannot be copied over what is none", field="dest"
                )
        elif there is EntryKind.DIR:
            raise InvalidArgument(
                f"/{shown(b'/'.join(names))}: only a folder can be copied over a folder", field="dest"
            )
        self.parents(names[:-1])
        self.made[names] = entry

    def entries(self) -> list[TreeEntry]:
        """All of it, composed; empty where nothing was made."""
        if len(self.made) == 1:
            return []
        for names in self.made:
            components(b"/".join(names))
        return [replace(self.made[names], path=b"/".join(names)) for names in sorted(self.made)]


def _plain(entry: TreeEntry | None) -> TreeEntry:
    """A folder of the layers beneath as this one shows it again: with its attributes, and not hiding what is in it."""
    if entry is None:
        return TreeEntry(path=b"", kind=EntryKind.DIR, mode=0o755)
    return replace(entry, xattrs=tuple(pair for pair in entry.xattrs if pair != OPAQUE_XATTR), group=0)


def _names(path: str) -> _Names:
    return components(path.lstrip("/").encode("utf-8", "surrogateescape"))


def make_parents(lower: Merged, path: str, owner: Owner) -> list[TreeEntry]:
    """The layer that makes the folder `path` and those on the way to it; empty where it is there. Raises InvalidArgument."""
    names = lower.resolve(_names(path))
    there = lower.find(names)
    if there is not None and there.kind is EntryKind.DIR:
        return []
    layer = _Layer(lower, owner)
    layer.parents(names)
    return layer.entries()


def place(
    lower: Merged, picked: Sequence[Picked], target: Target, unpack: Callable[[TreeEntry], Iterable[TreeEntry] | None]
) -> list[TreeEntry]:
    """The layer that puts what was picked over `lower`, composed. `unpack` gives the content of an archive that is to be unpacked, a composed
    tree whose owners stay, and None for any other file.

    Raises InvalidArgument for several things at a destination that is no folder, and for a folder over a file or a file over one.
    """
    layer = _Layer(lower, target.owner)
    dest = lower.resolve(_names(target.dest))
    folder = target.dest.endswith("/") or layer.kind_at(dest) is EntryKind.DIR or not dest
    if len(picked) > 1 and not folder:
        raise InvalidArgument("several sources need a destination that ends with a slash", field="dest")
    for each in picked:
        if each.entry.kind is EntryKind.DIR:
            layer.parents(dest)
            for below, entry in each.inside:
                layer.put((*dest, *below.split(b"/")), _owned(entry, target))
            continue
        content = unpack(each.entry) if each.entry.kind is EntryKind.FILE else None
        if content is not None:
            layer.parents(dest)
            for entry in content:
                if entry.path:
                    layer.put((*dest, *entry.path.split(b"/")), entry)
        else:
            layer.put((*dest, each.name) if folder else dest, _owned(each.entry, target))
    return layer.entries()


def _owned(entry: TreeEntry, target: Target) -> TreeEntry:
    uid, gid = target.owner
    mode = entry.mode if target.mode is None or entry.kind is EntryKind.SYMLINK else target.mode
    xattrs = tuple(pair for pair in entry.xattrs if pair != OPAQUE_XATTR)
    return replace(entry, uid=uid, gid=gid, mode=mode, xattrs=xattrs, group=0)
