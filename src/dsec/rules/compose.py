"""How layers become a tree: the OCI rules as a pure function over entries. Source: OCI image spec, layer.md.

Where the specification leaves room, these rules hold:

- Whiteouts and opaque marks of a layer act on the layers below it only, wherever they stand in the archive.
- A later entry of one layer replaces an earlier one of the same path; a directory over a directory keeps the children and
  takes the newest attributes, all of them.
- Directories on the way to a path are found through symlinks as a process in the sandbox would find them, never above its
  root; the last name is never followed. Missing ones are made (0755, root; /tmp and /var/tmp 1777, /root 0700).
- A hard link takes the inode that its target has at that point of the archive; when there is none yet, the one that it has
  at the layer's end. Replacing one name of an inode leaves the others alone.
- Absolute paths, "..", names of whiteout form that mean nothing, overlayfs's own attributes (trusted.overlay.*,
  user.overlay.*) and its whiteout device (character 0/0) are refused: InvalidArgument, naming the path.
"""

from collections.abc import Iterable, Iterator, Sequence

from dsec.model.errors import InvalidArgument
from dsec.model.tree import EntryKind, TreeEntry

__all__ = ["OPAQUE_XATTR", "components", "flatten", "flatten_groups", "overlay_layer", "shown"]

_WHITEOUT = b".wh."
_META = b".wh..wh."
_OPAQUE = b".wh..wh..opq"
_MAX_LINKS = 40
_MAX_PATH = 4096
_MAX_NAME = 255
_OWN_XATTRS = (b"trusted.overlay.", b"user.overlay.")
_IMPLICIT_MODES = {(b"tmp",): 0o1777, (b"var", b"tmp"): 0o1777, (b"root",): 0o700}
OPAQUE_XATTR = (b"trusted.overlay.opaque", b"y")

_Parts = tuple[bytes, ...]
_Xattrs = tuple[tuple[bytes, bytes], ...]


def shown(path: bytes) -> str:
    """A path for messages: never raises, escapes what is not text, at most 200 characters."""
    text = ascii(path.decode("utf-8", "backslashreplace")) if not path.isascii() else repr(path.decode())
    return text if len(text) <= 200 else text[:197] + "..."


def _refuse(path: bytes, why: str) -> InvalidArgument:
    return InvalidArgument(f"{shown(path)}: {why}", field="path")


def components(path: bytes) -> _Parts:
    """The names of an archive's path; "./" and doubled or trailing slashes mean nothing.

    Raises InvalidArgument for an absolute path, "..", a NUL, a name over 255 bytes or a path of 4,096 bytes and more.
    """
    if path.startswith(b"/"):
        raise _refuse(path, "absolute paths are refused")
    if len(path) >= _MAX_PATH:
        raise _refuse(path, "path of 4,096 bytes or more")
    parts = tuple([part for part in path.split(b"/") if part not in (b"", b".")])
    for part in parts:
        if part == b"..":
            raise _refuse(path, 'paths with ".." are refused')
        if len(part) > _MAX_NAME:
            raise _refuse(path, "name over 255 bytes")
    if b"\0" in path:
        raise _refuse(path, "NUL in a path")
    return parts


class _Node:
    """An inode of the tree being made; hard links are several names of one."""

    __slots__ = ("children", "entry")

    def __init__(self, entry: TreeEntry) -> None:
        self.entry = entry
        # Only a directory has names in it; the others share one dict that nothing is put into.
        self.children: dict[bytes, _Node] = {} if entry.kind is EntryKind.DIR else _NO_CHILDREN


_NO_CHILDREN: dict[bytes, _Node] = {}


def _implicit(parts: _Parts) -> TreeEntry:
    return TreeEntry(path=b"", kind=EntryKind.DIR, mode=_IMPLICIT_MODES.get(parts, 0o755))


class _Tree:
    """The tree while layers are laid over it."""

    def __init__(self) -> None:
        self.root = _Node(_implicit(()))

    def directory(self, parts: _Parts, path: bytes, *, make: bool) -> _Node | None:
        """The directory at `parts`, through symlinks. None when it is missing and not to be made."""
        stack, todo, links = [self.root], list(reversed(parts)), 0
        where: list[bytes] = []
        while todo:
            name = todo.pop()
            if name == b"..":
                if where:
                    stack.pop()
                    where.pop()
                continue
            found = stack[-1].children.get(name)
            if found is None:
                if not make:
                    return None
                found = stack[-1].children[name] = _Node(_implicit((*where, name)))
            if found.entry.kind is EntryKind.SYMLINK:
                links += 1
                if links > _MAX_LINKS:
                    raise _refuse(path, "too many symlinks on the way")
                if found.entry.target.startswith(b"/"):
                    stack, where = stack[:1], []
                todo.extend(part for part in reversed(found.entry.target.split(b"/")) if part not in (b"", b"."))
                continue
            if found.entry.kind is not EntryKind.DIR:
                if not make:
                    return None
                raise _refuse(path, "its parent is not a directory")
            stack.append(found)
            where.append(name)
        return stack[-1]

    def find(self, parts: _Parts, path: bytes) -> _Node | None:
        """What stands at `parts`; the last name is not followed."""
        if not parts:
            return self.root
        parent = self.directory(parts[:-1], path, make=False)
        return parent.children.get(parts[-1]) if parent is not None else None


class _Change:
    """One layer's entries, sorted into what it hides and what it holds."""

    def __init__(self, entries: Iterable[TreeEntry]) -> None:
        self.hidden: list[tuple[_Parts, bytes]] = []
        self.opaque: list[tuple[_Parts, bytes]] = []
        self.held: list[tuple[_Parts, TreeEntry]] = []
        self.directories: set[_Parts] = set()
        for entry in entries:
            self._sort(components(entry.path), entry)

    def _sort(self, parts: _Parts, entry: TreeEntry) -> None:
        if b".wh." in entry.path and any(part.startswith(_WHITEOUT) for part in parts):
            last = parts[-1]
            if last == _OPAQUE and not any(part.startswith(_WHITEOUT) for part in parts[:-1]):
                self.opaque.append((parts[:-1], entry.path))
                return
            if any(part.startswith(_META) for part in parts):
                return
            name = last.removeprefix(_WHITEOUT)
            if name in (b"", b".", b"..") or any(part.startswith(_WHITEOUT) for part in parts[:-1]) or name == last:
                raise _refuse(entry.path, "a name of whiteout form that means nothing")
            self.hidden.append(((*parts[:-1], name), entry.path))
            return
        _check(entry)
        self.held.append((parts, entry))
        if entry.kind is EntryKind.DIR:
            self.directories.add(parts)


def _check(entry: TreeEntry) -> None:
    for name, _ in entry.xattrs:
        if name.startswith(_OWN_XATTRS):
            raise _refuse(entry.path, f"attribute {shown(name)} belongs to overlayfs")
    if entry.kind is EntryKind.CHAR and entry.rdev == (0, 0):
        raise _refuse(entry.path, "character device 0/0 is overlayfs's whiteout; name the deletion instead")
    if entry.kind is EntryKind.SYMLINK and not 0 < len(entry.target) < _MAX_PATH:
        raise _refuse(entry.path, "symlink target empty or of 4,096 bytes or more")


class _Layering:
    """Lays one change over the tree. `anew`: directories put where another kind stood, so with nothing of lower layers in them."""

    def __init__(self, tree: _Tree, change: _Change) -> None:
        self.tree = tree
        self.change = change
        self.waiting: dict[tuple[int, bytes], tuple[_Node, bytes, TreeEntry]] = {}
        self.anew: list[_Node] = []

    def apply(self) -> None:
        for parts, entry in self.change.held:
            self._put(parts, entry)
        self._settle()

    def _put(self, parts: _Parts, entry: TreeEntry) -> None:
        if not parts:
            if entry.kind is not EntryKind.DIR:
                raise _refuse(entry.path, "the root can only be a directory")
            self.tree.root.entry = entry
            return
        parent = self.tree.directory(parts[:-1], entry.path, make=True)
        assert parent is not None
        name = parts[-1]
        waited = self.waiting.pop((id(parent), name), None)
        if entry.kind is EntryKind.LINK:
            self._link(parent, name, entry)
            return
        old = parent.children.get(name)
        if old is not None and old.entry.kind is EntryKind.DIR and entry.kind is EntryKind.DIR:
            old.entry = entry
            return
        parent.children[name] = made = _Node(entry)
        if entry.kind is EntryKind.DIR and (old is not None or waited is not None):
            self.anew.append(made)

    def _link(self, parent: _Node, name: bytes, entry: TreeEntry) -> None:
        target = self.tree.find(components(entry.target), entry.path)
        if target is None:
            parent.children.pop(name, None)
            self.waiting[id(parent), name] = (parent, name, entry)
            return
        if target.entry.kind is EntryKind.DIR:
            raise _refuse(entry.path, "hard link to a directory")
        parent.children[name] = target

    def _settle(self) -> None:
        """Links whose target came later, or never."""
        while self.waiting:
            before = len(self.waiting)
            pending, self.waiting = self.waiting, {}
            for parent, name, entry in pending.values():
                self._link(parent, name, entry)
            if len(self.waiting) == before:
                raise _refuse(entry.path, f"hard link to {shown(entry.target)}, which does not exist")


def _replaced(tree: _Tree, change: _Change, parts: _Parts) -> bool:
    """Whether a directory of the change stands where the tree has a symlink: nothing below belongs to lower layers then."""
    for length in range(1, len(parts) + 1):
        if parts[:length] in change.directories:
            there = tree.find(parts[:length], b"")
            if there is not None and there.entry.kind is EntryKind.SYMLINK:
                return True
    return False


def _hide(tree: _Tree, change: _Change) -> None:
    """Takes away what the change hides of the layers below; what is not there is hidden already."""
    for parts, path in change.opaque:
        directory = None if _replaced(tree, change, parts) else tree.directory(parts, path, make=False)
        if directory is not None:
            directory.children = {}
    for parts, path in change.hidden:
        parent = None if _replaced(tree, change, parts[:-1]) else tree.directory(parts[:-1], path, make=False)
        if parent is not None:
            parent.children.pop(parts[-1], None)


def _walk(tree: _Tree) -> list[TreeEntry]:
    """The tree as entries in the order of their paths' names, hard links grouped."""
    names: dict[int, int] = {}
    found: list[tuple[bytes, _Node]] = []
    stack: list[tuple[bytes, _Node]] = [(b"", tree.root)]
    while stack:
        path, node = stack.pop()
        found.append((path, node))
        names[id(node)] = names.get(id(node), 0) + 1
        below = path + b"/" if path else b""
        stack.extend((below + name, node.children[name]) for name in sorted(node.children, reverse=True))
    groups: dict[int, int] = {}
    out = []
    for path, node in found:
        if len(path) >= _MAX_PATH:
            raise _refuse(path, "path of 4,096 bytes or more")
        group = groups.setdefault(id(node), len(groups) + 1) if names[id(node)] > 1 else 0
        out.append(_placed(node.entry, path, group))
    return out


def _placed(entry: TreeEntry, path: bytes, group: int, xattrs: _Xattrs | None = None) -> TreeEntry:
    # By position: structs.replace is slower, and there may be hundreds of thousands.
    return TreeEntry(
        path, entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime, entry.mtime_ns, entry.rdev,
        entry.target, entry.xattrs if xattrs is None else xattrs, entry.content, group,
    )  # fmt: skip


def flatten(layers: Sequence[Iterable[TreeEntry]]) -> list[TreeEntry]:
    """One tree of all layers, lowest first: each entry's path cleaned, parents before children, hard links as groups.

    Raises InvalidArgument, naming the path, for what the rules above refuse.
    """
    return next(flatten_groups([layers]))


def flatten_groups(groups: Iterable[Sequence[Iterable[TreeEntry]]]) -> Iterator[list[TreeEntry]]:
    """The tree as it is after each group of layers, all groups before it included; for each as `flatten`."""
    tree = _Tree()
    for group in groups:
        for entries in group:
            change = _Change(entries)
            _hide(tree, change)
            _Layering(tree, change).apply()
        yield _walk(tree)


def overlay_layer(entries: Iterable[TreeEntry], whiteouts: Sequence[bytes] = ()) -> list[TreeEntry]:
    """A layer to be laid over others by overlayfs: its deletions stay in it, in overlayfs's form.

    Deletions are whiteout names among `entries`, and the paths in `whiteouts`. A deleted path becomes a character device
    0/0; where the layer holds a directory of that name too, marks one opaque, or puts one in place of an earlier entry of
    another kind, the directory gets OPAQUE_XATTR.
    """
    tree = _Tree()
    change = _Change(entries)
    change.hidden.extend((components(path), path) for path in whiteouts)
    layering = _Layering(tree, change)
    layering.apply()
    for made in layering.anew:
        _make_opaque(made)
    for parts, path in sorted(change.opaque, key=_depth):
        directory = _to_mark(tree, parts, path)
        if directory is not None:
            _make_opaque(directory)
    for parts, path in sorted(change.hidden, key=_depth):
        if not parts:
            raise _refuse(path, "the root cannot be deleted")
        parent = _to_mark(tree, parts[:-1], path)
        there = None if parent is None else parent.children.get(parts[-1])
        if parent is not None and there is None:
            parent.children[parts[-1]] = _Node(TreeEntry(path=b"", kind=EntryKind.CHAR, mode=0))
        elif there is not None and there.entry.kind is EntryKind.DIR:
            _make_opaque(there)
    return _walk(tree)


def _depth(mark: tuple[_Parts, bytes]) -> int:
    return len(mark[0])


def _to_mark(tree: _Tree, parts: _Parts, path: bytes) -> _Node | None:
    """The directory for a mark, made where it is missing; None where something above it hides all that the mark would."""
    hidden = False
    for length in range(len(parts) + 1):
        there = tree.find(parts[:length], path)
        if there is None:
            if hidden:
                return None
            break
        if there.entry.kind not in (EntryKind.DIR, EntryKind.SYMLINK):
            return None
        hidden = hidden or OPAQUE_XATTR in there.entry.xattrs
    return tree.directory(parts, path, make=True)


def _make_opaque(node: _Node) -> None:
    if OPAQUE_XATTR not in node.entry.xattrs:
        node.entry = _placed(node.entry, b"", 0, (*node.entry.xattrs, OPAQUE_XATTR))
