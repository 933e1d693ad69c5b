"""What an image of several layers shows, as overlayfs shows it: entries of composed layers laid one over the other.

A character device 0/0 hides what lies beneath it, a folder with OPAQUE_XATTR what lies beneath in it; anything but a folder over a folder
replaces it whole, a folder over a folder shows its own attributes and what both hold.
"""

from collections.abc import Iterable, Iterator

from dsec.model.errors import InvalidArgument
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR, shown

__all__ = ["Merged"]

_MAX_LINKS = 40


class _Node:
    __slots__ = ("children", "entry")

    def __init__(self, entry: TreeEntry) -> None:
        self.entry = entry
        self.children: dict[bytes, _Node] = {}


class Merged:
    """The tree of all layers laid so far, lowest first. Of an image without any: an empty root."""

    def __init__(self) -> None:
        self._root = _Node(TreeEntry(path=b"", kind=EntryKind.DIR, mode=0o755))

    def lay(self, entries: Iterable[TreeEntry]) -> None:
        """Lays a composed layer on top: parents before what is in them. Raises InvalidArgument for a layer that does not list them."""
        for entry in entries:
            self._put(entry)

    def _put(self, entry: TreeEntry) -> None:
        if not entry.path:
            self._root.entry = entry
            return
        *above, name = entry.path.split(b"/")
        parent = self._root
        for part in above:
            below = parent.children.get(part)
            if below is None:
                raise InvalidArgument(f"{shown(entry.path)}: the layer does not list the folder it is in", field="path")
            parent = below
        if entry.kind is EntryKind.CHAR and entry.rdev == (0, 0):
            parent.children.pop(name, None)
            return
        there = parent.children.get(name)
        if there is not None and there.entry.kind is EntryKind.DIR and entry.kind is EntryKind.DIR:
            there.entry = entry
            if OPAQUE_XATTR in entry.xattrs:
                there.children = {}
            return
        parent.children[name] = _Node(entry)

    def entries(self) -> Iterator[TreeEntry]:
        """All of it, parents first, names sorted; each under the path that its layer gave it."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node.entry
            stack.extend(node.children[name] for name in sorted(node.children, reverse=True))

    def find(self, names: tuple[bytes, ...]) -> TreeEntry | None:
        """What stands at the path of these names; no symlink is followed."""
        node: _Node | None = self._root
        for name in names:
            node = node.children.get(name) if node is not None else None
        return node.entry if node is not None else None

    def resolve(self, names: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Where a process in the image comes to by this path: symlinks followed, the last one too, never above the root. What does not
        exist is taken as it is written. A path through more than 40 symlinks stays as it is."""
        done: list[bytes] = []
        todo = list(reversed(names))
        links = 0
        while todo:
            name = todo.pop()
            if name == b"..":
                done = done[:-1]
                continue
            there = self.find((*done, name))
            if there is None or there.kind is not EntryKind.SYMLINK:
                done.append(name)
                continue
            links += 1
            if links > _MAX_LINKS:
                return names
            if there.target.startswith(b"/"):
                done = []
            todo.extend(part for part in reversed(there.target.split(b"/")) if part not in (b"", b"."))
        return tuple(done)
