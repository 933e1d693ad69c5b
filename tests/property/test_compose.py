"""Composing layers equals applying the OCI rules, one by one, to a dict of paths."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import flatten, overlay_layer

K = EntryKind
LIMIT = 40


class Refused(Exception):
    pass


class Reference:
    """Paths are text, the tree maps each to an inode's name; symlinks are resolved by rewriting the text."""

    def __init__(self) -> None:
        self.tree: dict[str, int] = {"": 0}
        self.nodes: dict[int, tuple[K, int, str]] = {0: (K.DIR, 0, "")}

    def kind(self, path: str) -> K | None:
        return self.nodes[self.tree[path]][0] if path in self.tree else None

    def new(self, kind: K, label: int, target: str) -> int:
        self.nodes[len(self.nodes)] = (kind, label, target)
        return len(self.nodes) - 1

    def delete(self, path: str) -> None:
        for name in [n for n in self.tree if n == path or n.startswith(path + "/")]:
            del self.tree[name]

    def real(self, text: str, make: bool) -> str | None:
        """The directory that `text` leads to, or None."""
        for _ in range(LIMIT + 1):
            done = ""
            parts = [p for p in text.split("/") if p not in ("", ".")]
            for index, part in enumerate(parts):
                if part == "..":
                    done = done.rpartition("/")[0]
                    continue
                here = f"{done}/{part}".lstrip("/")
                kind = self.kind(here)
                if kind is None:
                    if not make:
                        return None
                    self.tree[here] = self.new(K.DIR, 0, "")
                elif kind is K.SYMLINK:
                    target = self.nodes[self.tree[here]][2]
                    start = "" if target.startswith("/") else done
                    text = "/".join([start, target, *parts[index + 1 :]])
                    break
                elif kind is not K.DIR:
                    if not make:
                        return None
                    raise Refused
                done = here
            else:
                return done
        raise Refused

    def lay(self, layer: Sequence[TreeEntry]) -> None:
        listed = {e.path.decode() for e in layer if e.kind is K.DIR and b".wh." not in e.path}
        marks = [e.path.decode() for e in layer if b".wh." in e.path]
        for mark in sorted(marks, key=lambda m: not m.endswith(".wh..wh..opq")):
            parent, _, name = mark.rpartition("/")
            steps = parent.split("/") if parent else []
            prefixes = ["/".join(steps[: n + 1]) for n in range(len(steps))]
            if any(p in listed and self.kind_at(p) is K.SYMLINK for p in prefixes):
                continue
            place = self.real(parent, make=False)
            if place is None:
                continue
            if name == ".wh..wh..opq":
                for child in [n for n in self.tree if n and n.rpartition("/")[0] == place]:
                    self.delete(child)
            else:
                self.delete(f"{place}/{name.removeprefix('.wh.')}".lstrip("/"))
        late: dict[str, TreeEntry] = {}
        for entry in layer:
            if b".wh." not in entry.path:
                self.put(entry, late)
        while late:
            now, late = late, {}
            for path, entry in now.items():
                self.link(path, entry, late)
            if len(late) == len(now):
                raise Refused

    def kind_at(self, path: str) -> K | None:
        parent, _, name = path.rpartition("/")
        place = self.real(parent, make=False)
        return None if place is None else self.kind(f"{place}/{name}".lstrip("/"))

    def put(self, entry: TreeEntry, late: dict[str, TreeEntry]) -> None:
        label = entry.content.size if entry.content else entry.mode
        parent, _, name = entry.path.decode().rpartition("/")
        place = self.real(parent, make=True)
        path = f"{place}/{name}".lstrip("/")
        late.pop(path, None)
        if entry.kind is K.LINK:
            self.link(path, entry, late)
            return
        node = self.new(entry.kind, label, entry.target.decode())
        if not (entry.kind is K.DIR and self.kind(path) is K.DIR):
            self.delete(path)
            # A link that waited below what is gone now can no longer be seen.
            for gone in [p for p in late if p.startswith(path + "/")]:
                self.gone.append(late.pop(gone))
        self.tree[path] = node

    gone: list[TreeEntry] = []

    def link(self, path: str, entry: TreeEntry, late: dict[str, TreeEntry]) -> None:
        parent, _, name = entry.target.decode().rpartition("/")
        place = self.real(parent, make=False)
        target = None if place is None else f"{place}/{name}".lstrip("/")
        if target is None or target not in self.tree:
            self.delete(path)
            late[path] = entry
            return
        if self.kind(target) is K.DIR:
            raise Refused
        node = self.tree[target]
        if target != path:
            self.delete(path)
        self.tree[path] = node

    def seen(self) -> tuple[dict[str, tuple[K, int, str]], set[frozenset[str]]]:
        by_node: dict[int, set[str]] = {}
        for path, node in self.tree.items():
            by_node.setdefault(node, set()).add(path)
        groups = {frozenset(paths) for paths in by_node.values() if len(paths) > 1}
        return {path: self.nodes[node] for path, node in self.tree.items()}, groups


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
TARGETS = st.sampled_from(["a", "b", "/c", "../a", "b/c", "/a/b", "../../c", "."])


@st.composite
def entry(draw: st.DrawFn) -> TreeEntry:
    path = draw(PATHS)
    kind = draw(st.sampled_from([K.FILE, K.FILE, K.DIR, K.DIR, K.SYMLINK, K.LINK, None, None]))
    label = draw(st.integers(1, 0o7777))
    if kind is None:
        parent, _, name = path.rpartition("/")
        mark = draw(st.sampled_from([f".wh.{name}", ".wh..wh..opq"]))
        return TreeEntry(path=f"{parent}/{mark}".lstrip("/").encode(), kind=K.FILE, content=Content(0))
    target = draw(TARGETS) if kind is K.SYMLINK else draw(PATHS) if kind is K.LINK else ""
    content = Content(label) if kind is K.FILE else None
    return TreeEntry(
        path=path.encode(), kind=kind, mode=0 if content else label, target=target.encode(), content=content
    )


LAYERS = st.lists(st.lists(entry(), max_size=8), max_size=4)


def ours(layers: Sequence[Sequence[TreeEntry]]) -> tuple[dict[str, tuple[K, int, str]], set[frozenset[str]]] | None:
    try:
        composed = flatten(layers)
    except InvalidArgument:
        return None
    groups: dict[int, set[str]] = {}
    for e in composed:
        if e.group:
            groups.setdefault(e.group, set()).add(e.path.decode())
    found = {
        e.path.decode(): (e.kind, e.content.size if e.content else 0 if not e.path else e.mode, e.target.decode())
        for e in composed
    }
    return found, {frozenset(paths) for paths in groups.values()}


@settings(max_examples=250, deadline=None)
@given(LAYERS)
def test_composing_equals_the_rules_on_dicts(layers: list[list[TreeEntry]]) -> None:
    reference = Reference()
    reference.gone = []
    try:
        for layer in layers:
            reference.lay(layer)
        wanted = reference.seen()
    except Refused:
        wanted = None
    found = ours(layers)
    if wanted is None or reference.gone:
        # A layer with a link below what it replaces itself contradicts itself: either answer is refused by some tool.
        return
    assert found is not None
    implicit = {path for path, (kind, label, _) in wanted[0].items() if kind is K.DIR and label == 0}
    assert {p: v for p, v in found[0].items() if p not in implicit} == {
        p: v for p, v in wanted[0].items() if p not in implicit
    }
    assert implicit <= set(found[0])
    assert found[1] == wanted[1]


@settings(max_examples=100, deadline=None)
@given(LAYERS)
def test_what_the_rules_refuse_is_refused(layers: list[list[TreeEntry]]) -> None:
    reference = Reference()
    reference.gone = []
    try:
        for layer in layers:
            reference.lay(layer)
    except Refused:
        if not reference.gone:
            with pytest.raises(InvalidArgument):
                flatten(layers)


@settings(max_examples=50, deadline=None)
@given(LAYERS)
def test_parents_come_first_and_names_are_sorted(layers: list[list[TreeEntry]]) -> None:
    if ours(layers) is None:
        return
    seen: set[bytes] = set()
    for e in flatten(layers):
        assert e.path not in seen
        assert not e.path or e.path.rpartition(b"/")[0] in seen
        seen.add(e.path)


def given_as(*paths: str) -> list[TreeEntry]:
    """Files, and directories where a path ends in a slash."""
    return [
        TreeEntry(path=p.rstrip("/").encode(), kind=K.DIR, mode=0o755)
        if p.endswith("/")
        else TreeEntry(path=p.encode(), kind=K.FILE, content=Content(1))
        for p in paths
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(entry(), max_size=6), st.lists(entry(), max_size=6))
@example(given_as("b/b/b/"), given_as("b", "b/"))
@example(given_as("b/c", "a"), given_as("b", "b/", "b/", "b/x"))
@example(given_as("a/b/b"), given_as("a", "a/", "a/b/.wh.b"))
@example(given_as("a", "a"), given_as("a/a/.wh.b", "a", "a/"))
@example(given_as(), given_as("b", "b/a/.wh..wh..opq", "b/"))
@example(given_as("b/a/x"), given_as("b", "b/a/.wh.x"))
def test_a_layer_kept_apart_shows_the_same_as_one_flattened(lower: list[TreeEntry], upper: list[TreeEntry]) -> None:
    """overlayfs over (lower, overlay_layer(upper)) equals flatten([lower, upper]), where no symlink is on the way."""
    if any(e.kind in (K.SYMLINK, K.LINK) for e in lower + upper):
        return
    # A deletion in a directory that the layer does not list makes that directory, as overlayfs has no other form for it.
    upper = [TreeEntry(path=p, kind=K.DIR) for p in sorted(parents(upper))] + upper
    together = ours([lower, upper])
    if together is None:
        return
    try:
        below, above = flatten([lower]), overlay_layer(upper)
    except InvalidArgument:
        return
    merged = merge({e.path.decode(): e for e in below}, {e.path.decode(): e for e in above})
    assert merged == set(together[0])


def parents(entries: Sequence[TreeEntry]) -> set[bytes]:
    marks = [e.path.split(b"/")[:-1] for e in entries if b".wh." in e.path]
    return {b"/".join(parts[: n + 1]) for parts in marks for n in range(len(parts))}


def merge(lower: dict[str, TreeEntry], upper: dict[str, TreeEntry]) -> set[str]:
    """The names that overlayfs shows, by its documentation."""
    hidden: set[str] = set()
    for path, e in upper.items():
        opaque = any(name == b"trusted.overlay.opaque" for name, _ in e.xattrs)
        below = lower.get(path)
        if e.kind is not K.DIR or opaque or (below is not None and below.kind is not K.DIR):
            hidden |= {p for p in lower if p.startswith(path + "/") or not path}
        if e.kind is K.CHAR or (below is not None and below.kind is not e.kind):
            hidden.add(path)
    return {p for p in lower if p not in hidden} | {p for p, e in upper.items() if e.kind is not K.CHAR}
