"""Layers kept apart show through overlayfs what flattening them gives: names, attributes, contents and inodes."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dsec.model.errors import InvalidArgument
from dsec.model.tree import EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR, flatten, flatten_groups
from dsec.rules.difference import difference, merged
from property.test_compose import LAYERS

K = EntryKind


def overlaid(lower: dict[bytes, TreeEntry], upper: Sequence[TreeEntry]) -> dict[bytes, TreeEntry]:
    """What overlayfs shows, by its documentation: a lower layer's folder is merged with an upper one, everything else is hidden."""
    shown = dict(lower)
    for entry in upper:
        before = shown.get(entry.path)
        both = entry.kind is K.DIR and before is not None and before.kind is K.DIR
        if not both or OPAQUE_XATTR in entry.xattrs:
            for path in [p for p in shown if p.startswith(entry.path + b"/")]:
                del shown[path]
        if entry.kind is K.CHAR and entry.rdev == (0, 0):
            shown.pop(entry.path, None)
            continue
        kept = tuple(pair for pair in entry.xattrs if pair != OPAQUE_XATTR)
        # An inode is one within a layer: its number is made unlike those of the other layers.
        shown[entry.path] = replace(entry, xattrs=kept, group=entry.group and entry.group + 1000 * (1 + len(lower)))
    return shown


def seen(tree: Sequence[TreeEntry]) -> tuple[dict[bytes, TreeEntry], set[frozenset[bytes]]]:
    groups: dict[int, set[bytes]] = {}
    for entry in tree:
        if entry.group:
            groups.setdefault(entry.group, set()).add(entry.path)
    return {e.path: replace(e, group=0) for e in tree}, {frozenset(names) for names in groups.values()}


@settings(max_examples=250, deadline=None)
@given(LAYERS.filter(bool), st.integers(0, 60))
def test_overlaid_layers_show_what_flattening_gives(layers: list[list[TreeEntry]], most: int) -> None:
    try:
        wanted = flatten(layers)
    except InvalidArgument:
        return
    groups = merged([sum(e.content.size if e.content else 0 for e in layer) for layer in layers], most)
    states = list(flatten_groups([[layers[n] for n in group] for group in groups]))
    assert states[-1] == wanted
    shown = {e.path: e for e in states[0]}
    for below, above in pairwise(states):
        upper = difference(below, above)
        assert [e.path for e in upper] == [
            e.path for e in sorted(upper, key=lambda e: e.path.split(b"/") if e.path else [])
        ]
        paths = {e.path for e in upper}
        assert len(paths) == len(upper) and all(p.rpartition(b"/")[0] in paths for p in paths)
        shown = overlaid(shown, upper)
    assert seen(list(shown.values())) == seen(wanted)


def entry(path: str, kind: EntryKind = K.FILE, mode: int = 0o644) -> TreeEntry:
    return TreeEntry(path=path.encode(), kind=kind, mode=mode)


def test_only_what_changed_is_in_the_upper_layer() -> None:
    below = flatten([[entry("a/x"), entry("a/y"), entry("b/z"), entry("c")]])
    above = flatten([below, [entry("a/.wh.x"), entry("c", mode=0o600), entry("d/e")]])
    upper = difference(below, above)
    assert [(e.path, e.kind) for e in upper] == [
        (b"", K.DIR), (b"a", K.DIR), (b"a/x", K.CHAR), (b"c", K.FILE), (b"d", K.DIR), (b"d/e", K.FILE),
    ]  # fmt: skip
    assert [e.path for e in difference(below, below)] == [b""]


def test_a_folder_that_lost_all_is_marked_once() -> None:
    below = flatten([[entry(f"d/{n}") for n in range(9)]])
    above = flatten([below, [entry("d/.wh..wh..opq"), entry("d/new")]])
    upper = {e.path: e for e in difference(below, above)}
    assert set(upper) == {b"", b"d", b"d/new"} and OPAQUE_XATTR in upper[b"d"].xattrs


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 100))
def test_neighbours_are_merged_up_to_the_bound(sizes: list[int], most: int) -> None:
    groups = merged(sizes, most)
    assert [n for group in groups for n in group] == list(range(len(sizes)))
    for group in groups:
        assert len(group) <= 1 or sum(sizes[n] for n in group) <= most
    for one, two in pairwise(groups):
        assert sum(sizes[n] for n in one) + sizes[two[0]] > most
    # What lies beneath does not depend on what lies above: images on one base share its layers.
    assert merged(sizes[: groups[-1].start], most) == (groups[:-1] or [range(0)])
