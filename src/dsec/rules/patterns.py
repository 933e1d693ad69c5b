"""Patterns of paths: those of COPY, of a .dockerignore, and of what a commit scrubs.

In a name `*` is any text, `?` one character, `[a-z]` one of these and `[^a-z]` none of them, `\\` takes the next one as it is. `**` as a
whole name is any number of names, at the end one or more. Matching takes time linear in pattern times path, whatever they are: both may come from a tenant.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from dsec.model.errors import InvalidArgument

__all__ = ["Ignore", "PathPattern", "is_pattern"]

_LONGEST = 4096
_MOST = 10_000

_P = TypeVar("_P")
_T = TypeVar("_T")


class _Any:
    """Stands for `*` among tokens of a name, and for `**` among names."""


_ANY = _Any()
_Token = frozenset[str] | tuple[bool, tuple[tuple[str, str], ...]] | _Any


def is_pattern(text: str) -> bool:
    """Whether anything in it has a meaning beyond itself."""
    return any(letter in text for letter in "*?[\\")


def _class_of(text: str, at: int) -> tuple[tuple[bool, tuple[tuple[str, str], ...]], int]:
    """The token of the class that begins after "[" at `at`, and where it ends."""
    negated = text[at : at + 1] in ("^", "!")
    at += negated
    ranges: list[tuple[str, str]] = []
    while at < len(text):
        if text[at] == "]" and ranges:
            return (negated, tuple(ranges)), at + 1
        if text[at] == "\\":
            at += 1
        first = text[at : at + 1]
        if text[at + 1 : at + 2] == "-" and text[at + 2 : at + 3] not in ("", "]"):
            ranges.append((first, text[at + 2]))
            at += 3
        else:
            ranges.append((first, first))
            at += 1
    raise InvalidArgument(f"pattern {text[:100]!a}: [ without ]", field="pattern")


def _tokens(name: str) -> tuple[_Token, ...]:
    found: list[_Token] = []
    at = 0
    while at < len(name):
        letter = name[at]
        at += 1
        if letter == "*":
            if not found or found[-1] is not _ANY:
                found.append(_ANY)
        elif letter == "?":
            found.append((True, ()))
        elif letter == "[":
            token, at = _class_of(name, at)
            found.append(token)
        else:
            if letter == "\\":
                if at >= len(name):
                    raise InvalidArgument(f"pattern {name[:100]!a}: \\ at its end", field="pattern")
                letter = name[at]
                at += 1
            found.append(frozenset(letter))
    return tuple(found)


def _one(token: _Token, letter: str) -> bool:
    if isinstance(token, frozenset):
        return letter in token
    if isinstance(token, tuple):
        negated, ranges = token
        return negated != any(first <= letter <= last for first, last in ranges)
    return False


def _matches(pattern: Sequence[_P], items: Sequence[_T], fits: Callable[[_P, _T], bool]) -> bool:
    """Whether `items` are matched by `pattern`, in which _ANY takes any number: only the last one ever has to give way."""
    at = item = 0
    star, resume = -1, 0
    while item < len(items):
        if at < len(pattern) and pattern[at] is not _ANY and fits(pattern[at], items[item]):
            at, item = at + 1, item + 1
        elif at < len(pattern) and pattern[at] is _ANY:
            star, resume = at, item
            at += 1
        elif star >= 0:
            resume += 1
            at, item = star + 1, resume
        else:
            return False
    return all(token is _ANY for token in pattern[at:])


class PathPattern:
    """A pattern of relative or absolute paths; slashes at either end mean nothing. Raises InvalidArgument for one that is malformed, empty
    or over 4,096 characters."""

    def __init__(self, text: str) -> None:
        names = [name for name in text.split("/") if name not in ("", ".")]
        if not names or len(text) > _LONGEST or ".." in names or "\0" in text:
            raise InvalidArgument(f"{text[:100]!a} is no pattern of paths", field="pattern")
        self.text = text
        if names[-1] == "**":
            names.insert(-1, "*")
        plain = not is_pattern(names[0])
        self.first: str | None = names[0] if plain else None
        """The name that every path of the pattern begins with; None: there is no one such."""
        self._names: list[tuple[_Token, ...] | _Any] = [_ANY if name == "**" else _tokens(name) for name in names]

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the path of these names is one."""
        return _matches(self._names, names, _fits)

    def covers(self, names: Sequence[str]) -> bool:
        """Whether the path, or a folder that it is in, is one."""
        return any(self.matches(names[:length]) for length in range(1, len(names) + 1))


def _fits(pattern: tuple[_Token, ...] | _Any, name: str) -> bool:
    return isinstance(pattern, tuple) and _matches(pattern, name, _one)


class Ignore:
    """A .dockerignore. Source: the Docker build reference: of all lines that match a path or a folder it is in, the last one decides, and
    `!` takes back. Raises InvalidArgument for a malformed line or more than 10,000."""

    def __init__(self, text: str) -> None:
        lines = text.removeprefix("\ufeff").splitlines()
        if len(lines) > _MOST:
            raise InvalidArgument(f".dockerignore of more than {_MOST} lines", field="dockerignore")
        self._rules: list[tuple[bool, PathPattern]] = []
        for line in lines:
            bare = line.strip()
            if not bare or bare.startswith("#"):
                continue
            keeps, bare = bare.startswith("!"), bare.removeprefix("!").strip()
            if bare.strip("/") in ("", "."):
                continue
            self._rules.append((keeps, PathPattern(bare)))
        self.takes_back = any(keeps for keeps, _ in self._rules)

    def excludes(self, names: Sequence[str]) -> bool:
        """Whether the context is without the path of these names, relative to its root."""
        excluded = False
        for keeps, pattern in self._rules:
            if excluded == keeps and pattern.covers(names):
                excluded = not keeps
        return excluded
