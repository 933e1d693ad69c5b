"""COPY over an image: what it takes, where that goes, and what the layer shows again of what lies beneath."""

import pytest
from msgspec.structs import replace

from dsec.model.errors import InvalidArgument, NotFound
from dsec.model.tree import Content, EntryKind, TreeEntry
from dsec.rules.compose import OPAQUE_XATTR, flatten
from dsec.rules.copying import Target, make_parents, pick, place
from dsec.rules.merged import Merged

K = EntryKind


def entry(path: str, kind: EntryKind = K.FILE, **more: object) -> TreeEntry:
    made = TreeEntry(path=path.encode(), kind=kind, content=Content(1) if kind is K.FILE else None)
    return replace(made, **more)


def tree(*entries: TreeEntry) -> Merged:
    """A tree with the folders on the way made."""
    made = Merged()
    made.lay(flatten([entries]))
    return made


def layer(lower: Merged, source: Merged, sources: list[str], dest: str, **more: object) -> dict[str, TreeEntry]:
    target = Target(dest=dest, owner=(0, 0), mode=None)
    made = place(lower, pick(source, sources), replace(target, **more), lambda _: None)
    assert [e.path.split(b"/") for e in made] == sorted(e.path.split(b"/") for e in made)
    return {e.path.decode(): e for e in made}


EMPTY = tree()
SOURCE = tree(
    entry("a.py", mode=0o755, uid=7, gid=7), entry("b.txt"), entry("d/x"), entry("d/sub/y"), entry("link", K.SYMLINK, target=b"d"),
    entry("d/up", K.SYMLINK, target=b"../a.py"),
)  # fmt: skip


def test_a_file_goes_to_a_name_or_into_a_folder() -> None:
    assert set(layer(EMPTY, SOURCE, ["a.py"], "/opt/new")) == {"", "opt", "opt/new"}
    assert set(layer(EMPTY, SOURCE, ["a.py"], "/opt/")) == {"", "opt", "opt/a.py"}
    assert set(layer(tree(entry("opt", K.DIR)), SOURCE, ["a.py"], "/opt")) == {"", "opt", "opt/a.py"}


def test_owner_and_mode_are_the_steps_own() -> None:
    plain = layer(EMPTY, SOURCE, ["a.py"], "/a")["a"]
    assert (plain.uid, plain.gid, plain.mode) == (0, 0, 0o755)
    made = layer(EMPTY, SOURCE, ["d"], "/o/", owner=(5, 6), mode=0o700)
    assert {(e.uid, e.gid) for path, e in made.items() if path} == {(5, 6)}
    assert {e.mode for path, e in made.items() if path.startswith("o/") and e.kind is not K.SYMLINK} == {0o700}


def test_a_folders_content_is_copied_and_not_the_folder() -> None:
    assert set(layer(EMPTY, SOURCE, ["d"], "/o")) == {"", "o", "o/x", "o/sub", "o/sub/y", "o/up"}
    assert layer(EMPTY, SOURCE, ["d"], "/o")["o/up"].target == b"../a.py"
    assert set(layer(EMPTY, SOURCE, ["."], "/")) == {
        "",
        "a.py",
        "b.txt",
        "d",
        "d/x",
        "d/sub",
        "d/sub/y",
        "d/up",
        "link",
    }


def test_a_source_named_through_a_symlink_is_what_that_leads_to() -> None:
    assert "o/x" in layer(EMPTY, SOURCE, ["link"], "/o")
    assert layer(EMPTY, SOURCE, ["d/up"], "/o/")["o/a.py"].kind is K.FILE


def test_nothing_leads_out_of_the_tree() -> None:
    source = tree(entry("s", K.SYMLINK, target=b"../../../../etc"), entry("etc/x"))
    assert "o/x" in layer(EMPTY, source, ["../../s"], "/o")


def test_patterns_take_all_that_they_match_and_need_a_folder() -> None:
    assert set(layer(EMPTY, SOURCE, ["*.*"], "/o/")) == {"", "o", "o/a.py", "o/b.txt"}
    with pytest.raises(InvalidArgument, match="slash"):
        layer(EMPTY, SOURCE, ["*.*"], "/o")
    with pytest.raises(NotFound):
        layer(EMPTY, SOURCE, ["*.md"], "/o/")
    with pytest.raises(NotFound):
        layer(EMPTY, SOURCE, ["gone"], "/o/")


def test_folders_beneath_are_shown_again_as_they_are() -> None:
    acl = (b"user.x", b"y")
    lower = tree(entry("opt", K.DIR, mode=0o2775, uid=3, gid=4, xattrs=(acl,)))
    made = layer(lower, SOURCE, ["d"], "/opt", owner=(9, 9))
    assert (made["opt"].mode, made["opt"].uid, made["opt"].xattrs) == (0o2775, 3, (acl,))
    assert made["opt/sub"].uid == 9


def test_the_way_to_the_destination_goes_through_the_images_symlinks() -> None:
    lower = tree(
        entry("run/lock", K.DIR),
        entry("var/run", K.SYMLINK, target=b"/run"),
        entry("var/up", K.SYMLINK, target=b"../../../run"),
    )
    assert "run/x/a.py" in layer(lower, SOURCE, ["a.py"], "/var/run/x/")
    assert "run/a.py" in layer(lower, SOURCE, ["a.py"], "/var/up/")
    assert make_parents(lower, "/var/run/lock", (0, 0)) == []
    assert [e.path for e in make_parents(lower, "/var/run/new/deep", (4, 5))] == [
        b"",
        b"run",
        b"run/new",
        b"run/new/deep",
    ]


def test_files_and_folders_do_not_replace_each_other() -> None:
    lower = tree(entry("o/x/deep"), entry("f"))
    with pytest.raises(InvalidArgument):
        layer(lower, SOURCE, ["d"], "/o")  # d/x is a file, o/x a folder
    with pytest.raises(InvalidArgument):
        layer(lower, SOURCE, ["d"], "/f/")
    with pytest.raises(InvalidArgument):
        make_parents(lower, "/f/x", (0, 0))


def test_an_archive_is_unpacked_with_its_own_owners() -> None:
    inside = flatten([[entry("in/it", uid=42)]])
    made = place(EMPTY, pick(SOURCE, ["b.txt"]), Target(dest="/o", owner=(1, 1), mode=None), lambda _: inside)
    assert [(e.path, e.uid) for e in made] == [(b"", 0), (b"o", 1), (b"o/in", 0), (b"o/in/it", 42)]


def test_layers_are_merged_as_overlayfs_shows_them() -> None:
    made = Merged()
    made.lay(flatten([[entry("a/1"), entry("b/2"), entry("c/3"), entry("e")]]))
    made.lay([
        entry("", K.DIR), entry("a", K.DIR, mode=0o700), entry("a/new"), entry("b", K.DIR, xattrs=(OPAQUE_XATTR,)), entry("b/own"),
        TreeEntry(path=b"c", kind=K.CHAR), entry("e", K.DIR), entry("e/f"),
    ])  # fmt: skip
    assert [e.path.decode() for e in made.entries()] == ["", "a", "a/1", "a/new", "b", "b/own", "e", "e/f"]
    found = made.find((b"a",))
    assert found is not None
    assert found.mode == 0o700


def test_a_layer_that_does_not_list_its_folders_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Merged().lay([entry("a/b")])


def test_symlinks_in_a_circle_end() -> None:
    lower = tree(entry("a", K.SYMLINK, target=b"b"), entry("b", K.SYMLINK, target=b"a"))
    assert lower.resolve((b"a", b"x")) == (b"a", b"x")
