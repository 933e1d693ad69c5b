"""Patterns of paths, and the files that a build or a commit leaves out by them."""

import time

import pytest

from dsec.model.errors import InvalidArgument
from dsec.model.tree import EntryKind
from dsec.rules.patterns import Ignore, PathPattern
from dsec.rules.scrub import SOCKETS, Scrub


def names(path: str) -> list[str]:
    return path.strip("/").split("/")


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("/a/b", "a/b", True), ("a/*", "a/b", True), ("a/*", "a/b/c", False), ("a/**", "a/b/c", True), ("a/**", "a", False),
        ("**/c", "a/b/c", True), ("**/c", "c", True), ("a/**/c", "a/c", True), ("[a-c]?", "bz", True), ("[^a-c]?", "bz", False),
        ("[!a]", "b", True), ("a\\*", "a*", True), ("a\\*", "ab", False), ("*.py", "x.py", True), ("*.py", "x.pyc", False), ("[]]", "]", True),
    ],
)  # fmt: skip
def test_patterns(pattern: str, path: str, fits: bool) -> None:
    assert PathPattern(pattern).matches(names(path)) is fits


@pytest.mark.parametrize("pattern", ["", "/", "a/../b", "[", "[a", "a\\", "x" * 5000, "a\0b"])
def test_malformed_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument):
        PathPattern(pattern)


def test_a_pattern_made_to_be_slow_is_not() -> None:
    pattern, began = PathPattern("*a" * 100 + "b"), time.perf_counter()
    assert not pattern.matches(["a" * 250])
    assert not PathPattern("/".join(["**", "a"] * 50 + ["b"])).matches(["a"] * 400)
    assert time.perf_counter() - began < 2.0


def test_of_an_ignore_file_the_last_line_that_fits_decides() -> None:
    ignore = Ignore("# all of it\n*.log\n!keep.log\nbuild\n!build/keep\n\nsrc/**/*.tmp\n")
    excluded = [
        p
        for p in ("a.log", "keep.log", "sub/a.log", "build", "build/x/y", "build/keep", "src/a/b.tmp", "src/a.py")
        if ignore.excludes(names(p))
    ]
    assert excluded == ["a.log", "build", "build/x/y", "src/a/b.tmp"]


def test_a_commit_scrubs_what_the_platform_put_there_and_keeps_what_it_is_told_to() -> None:
    scrub = Scrub(["/opt/*.log"], ["/tmp/result"])
    assert scrub.rule(["etc", "hosts"], EntryKind.FILE) == "/etc/hosts"
    assert scrub.rule(["opt", "a.log"], EntryKind.FILE) == "/opt/*.log"
    assert scrub.rule(["tmp", "x"], EntryKind.FILE) == "/tmp/**"
    assert scrub.rule(["tmp"], EntryKind.DIR) is None
    assert scrub.rule(["home", "u", ".cache", "pip", "x"], EntryKind.FILE) == "/home/*/.cache/pip/**"
    assert scrub.rule(["var", "log", "x"], EntryKind.FILE) is None
    assert scrub.rule(["anywhere"], EntryKind.SOCKET) == SOCKETS
    assert scrub.keeps(["tmp", "result", "deep"])
    assert not scrub.keeps(["tmp", "other"])
    assert Scrub([], [], defaults=False).rule(["tmp", "x"], EntryKind.FILE) is None
    assert Scrub([], [], defaults=False).rule(["etc", "resolv.conf"], EntryKind.FILE) == "/etc/resolv.conf"


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        Scrub(["/a"] * 201, [])
