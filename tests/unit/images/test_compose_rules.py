"""The OCI rules one by one (design rows IM4 and IM5), and what is refused by name."""

import pytest

from dsec.model.errors import InvalidArgument
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR, flatten, overlay_layer

K = EntryKind


def f(path: str, label: int = 1) -> TreeEntry:
    return TreeEntry(path=path.encode(), kind=K.FILE, content=Content(label))


def d(path: str, mode: int = 0o755) -> TreeEntry:
    return TreeEntry(path=path.encode(), kind=K.DIR, mode=mode)


def ln(path: str, target: str) -> TreeEntry:
    return TreeEntry(path=path.encode(), kind=K.LINK, target=target.encode())


def sym(path: str, target: str) -> TreeEntry:
    return TreeEntry(path=path.encode(), kind=K.SYMLINK, target=target.encode())


def names(*layers: list[TreeEntry]) -> list[str]:
    return [e.path.decode() for e in flatten(layers) if e.path]


def at(path: str, *layers: list[TreeEntry]) -> TreeEntry:
    return next(e for e in flatten(layers) if e.path == path.encode())


def test_deletions_and_what_comes_after_them() -> None:
    base = [d("d"), f("d/a"), f("d/b"), f("e")]
    assert names(base, [f(".wh.d")]) == ["e"]
    assert names(base, [f(".wh.d")], [f("d/c")]) == ["d", "d/c", "e"]
    assert names(base, [f(".wh.missing"), f("no/.wh.missing")]) == ["d", "d/a", "d/b", "e"]
    for layer in (
        [f("d/.wh..wh..opq"), f("d/n")],
        [f("d/n"), f("d/.wh..wh..opq")],
        [d("d"), f("d/n"), f("d/.wh..wh..opq")],
    ):
        assert names(base, layer) == ["d", "d/n", "e"]
    for layer in ([f("d/.wh.a"), f("d/a", 9)], [f("d/a", 9), f("d/.wh.a")]):
        assert names(base, layer) == ["d", "d/a", "d/b", "e"]
        content = at("d/a", base, layer).content
        assert content is not None and content.size == 9
    assert names(base, [d("d"), f("d/x"), f(".wh.d")]) == ["d", "d/x", "e"]


def test_types_swap() -> None:
    base = [d("d"), f("d/a"), f("f")]
    assert names(base, [f("d")]) == ["d", "f"]
    assert names(base, [d("f"), f("f/x")]) == ["d", "d/a", "f", "f/x"]
    assert at("f", base, [sym("f", "d")]).kind is K.SYMLINK
    assert at("d", base, [sym("d", "f")]).kind is K.SYMLINK
    assert at("d", [sym("d", "/elsewhere")], [d("d"), f("d/x")]).kind is K.DIR


def test_duplicates_the_last_one_wins_and_directories_merge() -> None:
    content = at("f", [f("f", 1), f("f", 2)]).content
    assert content is not None and content.size == 2
    assert at("d", [d("d", 0o700), f("d/a"), d("d", 0o711)]).mode == 0o711
    assert names([d("d"), f("d/a"), d("./d/"), f("d//b")]) == ["d", "d/a", "d/b"]
    assert at("d", [d("d", 0o700), f("d/a")], [d("d", 0o2755)]).mode == 0o2755


def test_hard_links() -> None:
    a, b = at("a", [f("a", 7), ln("b", "a")]), at("b", [f("a", 7), ln("b", "a")])
    assert a.group == b.group != 0 and b.content == a.content
    early = [ln("b", "a"), f("a", 7)]
    assert at("b", early).content == at("a", early).content
    chain = [ln("c", "b"), ln("b", "a"), f("a", 7)]
    assert {at(n, chain).group for n in "abc"} == {at("a", chain).group}
    replaced = at("b", [f("a", 7), ln("b", "a")], [f("a", 8)])
    assert replaced.content is not None and replaced.content.size == 7 and replaced.group == 0
    lower = at("b", [f("a", 7)], [ln("b", "a")])
    assert lower.content is not None and lower.content.size == 7 and lower.group != 0
    for bad in (
        [ln("b", "nowhere")],
        [d("d"), ln("b", "d")],
        [ln("b", "b")],
        [ln("b", "../a")],
        [ln("b", "/a"), f("a")],
    ):
        with pytest.raises(InvalidArgument):
            flatten([bad])


def test_paths_through_symlinks_stay_inside() -> None:
    usr = [d("usr"), d("usr/lib"), sym("lib", "usr/lib"), sym("abs", "/usr"), sym("up", "../../../usr")]
    assert "usr/lib/x" in names(usr, [f("lib/x")])
    assert "usr/y" in names(usr, [f("abs/y")])
    assert "usr/z" in names(usr, [f("up/z")])
    assert "usr/lib/x" not in names(usr, [f("usr/lib/x")], [f("lib/.wh.x")])
    with pytest.raises(InvalidArgument, match="symlinks"):
        flatten([[sym("a", "b"), sym("b", "a"), f("a/x")]])
    # An opaque directory in place of a symlink hides nothing of what the symlink led to.
    assert "usr/keep" in names([d("usr"), f("usr/keep"), sym("s", "usr")], [d("s"), f("s/.wh..wh..opq")])


def test_missing_parents_are_made() -> None:
    assert at("a", [f("a/b")]).mode == 0o755
    assert at("tmp", [f("tmp/x")]).mode == 0o1777
    assert at("var/tmp", [f("var/tmp/x")]).mode == 0o1777
    assert at("root", [f("root/x")]).mode == 0o700
    assert flatten([])[0].mode == 0o755


@pytest.mark.parametrize(
    "bad",
    [
        f("/etc/passwd"), f("../x"), f("a/../../x"), f("a/.."), sym("s", ""), sym("s", "t" * 4096), f("a" * 256),
        f("x/" * 2048 + "y"), f("a\0b"), f(".wh."), f(".wh.."), f(".wh..."), f(".wh.a/b"),
        TreeEntry(path=b"w", kind=K.CHAR), TreeEntry(path=b".", kind=K.FILE, content=Content(0)),
        TreeEntry(path=b"x", kind=K.DIR, xattrs=(OPAQUE_XATTR,)),
        TreeEntry(path=b"x", kind=K.DIR, xattrs=((b"user.overlay.whiteout", b"y"),)),
    ],
    ids=lambda e: repr(e.path[:20]),
)  # fmt: skip
def test_refused_by_name(bad: TreeEntry) -> None:
    with pytest.raises(InvalidArgument):
        flatten([[bad]])
    with pytest.raises(InvalidArgument):
        flatten([[f("file"), f("file/below")]])


def test_aufs_leftovers_mean_nothing() -> None:
    assert names([d("a"), f(".wh..wh.aufs"), d(".wh..wh.plnk"), f(".wh..wh.plnk/1.2")]) == ["a"]


def test_kept_apart_deletions_take_overlayfs_form() -> None:
    layer = overlay_layer([d("d"), f("d/.wh..wh..opq"), f("d/x"), f(".wh.gone"), d("both"), f(".wh.both"), f("same"), f(".wh.same")],
                          [b"etc/motd"])  # fmt: skip
    found = {e.path.decode(): e for e in layer}
    assert OPAQUE_XATTR in found["d"].xattrs and OPAQUE_XATTR in found["both"].xattrs
    assert (found["gone"].kind, found["gone"].rdev) == (K.CHAR, (0, 0))
    assert found["etc/motd"].kind is K.CHAR and found["same"].kind is K.FILE
    with pytest.raises(InvalidArgument):
        overlay_layer([], [b""])
