"""Layers that stay apart: what lies over a tree so that overlayfs shows another one, and which layers are merged.

The difference is made of two flattened trees, so what overlayfs shows of both layers is the upper tree by construction: hard links
are one inode, folders have the attributes that they have at the end, and what came through a symlink is where it led to. Source of
what overlayfs does: the kernel's Documentation/filesystems/overlayfs.rst.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR

__all__ = ["difference", "merged"]


def merged(sizes: Sequence[int], most: int) -> list[range]:
    """Which neighbours among layers of `sizes` bytes, lowest first, become one: as many as have at most `most` bytes together.

    A layer that alone has more stays alone. There is at least one group; it is empty where there are no layers.
    """
    groups, start, total = [], 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > most:
            groups.append(range(start, number))
            start, total = number, 0
        total += size
    return [*groups, range(start, len(sizes))]


def difference(below: Sequence[TreeEntry], above: Sequence[TreeEntry]) -> list[TreeEntry]:
    """The layer that, laid over the flattened tree `below` by overlayfs, shows the flattened tree `above`.

    Deletions are character devices 0/0; a folder of which nothing of below is left is marked opaque instead. All names of an inode
    whose names changed are in it, so that they stay one inode. Parents come before their children, names are sorted.
    """
    old = {entry.path: entry for entry in below}
    new = {entry.path: entry for entry in above}
    old_names, new_names = _names(below), _names(above)
    changed: dict[bytes, TreeEntry] = {}
    for entry in above:
        before = old.get(entry.path)
        if before is None or not _same(before, entry) or old_names.get(entry.path) != new_names.get(entry.path):
            changed[entry.path] = entry
    for path, gone in _deletions(below, old, new).items():
        changed[path] = gone
    changed.setdefault(b"", new[b""])
    for path in [*changed]:
        parent = path.rpartition(b"/")[0]
        while parent not in changed:
            changed[parent] = new[parent]
            parent = parent.rpartition(b"/")[0]
    _mark_opaque(old, new, changed)
    return sorted(changed.values(), key=lambda entry: entry.path.split(b"/") if entry.path else [])


def _same(one: TreeEntry, other: TreeEntry) -> bool:
    """Whether both are the same but for the number of their inode."""
    return one == other or (one.group != other.group and replace(one, group=other.group) == other)


def _names(tree: Sequence[TreeEntry]) -> dict[bytes, frozenset[bytes]]:
    """All names of the inode of each path that has more than one."""
    groups: dict[int, list[bytes]] = {}
    for entry in tree:
        if entry.group:
            groups.setdefault(entry.group, []).append(entry.path)
    return {path: names for paths in groups.values() for names in [frozenset(paths)] for path in paths}


def _deletions(
    below: Sequence[TreeEntry], old: dict[bytes, TreeEntry], new: dict[bytes, TreeEntry]
) -> dict[bytes, TreeEntry]:
    """A whiteout for each path that is gone from a folder which is still one."""
    gone = {}
    for entry in below:
        if entry.path and entry.path not in new:
            parent = new.get(entry.path.rpartition(b"/")[0])
            if parent is not None and parent.kind is EntryKind.DIR:
                gone[entry.path] = TreeEntry(path=entry.path, kind=EntryKind.CHAR, mode=0)
    return gone


def _mark_opaque(old: dict[bytes, TreeEntry], new: dict[bytes, TreeEntry], changed: dict[bytes, TreeEntry]) -> None:
    """One mark on a folder instead of a whiteout for each of its names, where none of the names below is left."""
    left: set[bytes] = set()
    lost: dict[bytes, list[bytes]] = {}
    for path in old:
        if path:
            parent = path.rpartition(b"/")[0]
            if path in new:
                left.add(parent)
            elif path in changed:
                lost.setdefault(parent, []).append(path)
    for parent, paths in lost.items():
        if parent and parent not in left:
            entry = changed[parent]
            changed[parent] = replace(entry, xattrs=(*entry.xattrs, OPAQUE_XATTR))
            for path in paths:
                del changed[path]
