"""A Dockerfile's text as instructions and stages. Source: the Dockerfile reference, of which this is a subset.

Known: FROM, RUN, COPY, ADD, ENV, WORKDIR, USER, ARG, SHELL, ENTRYPOINT, CMD, LABEL, EXPOSE, here-documents of RUN, COPY and ADD, the
`escape` directive, comments. Everything else is refused by name, with file and line: nothing of a file is passed over in silence.
"""

import json
import re
from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from dsec.model.build import Dockerfile, Heredoc, Instruction, Stage
from dsec.model.errors import DSecError, InvalidArgument, Unsupported
from dsec.rules.dockerwords import expand, split_words

__all__ = ["FLAGS", "located", "parse_dockerfile"]

FLAGS: dict[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"network"}),
    "COPY": frozenset({"from", "chown", "chmod", "link"}),
    "ADD": frozenset({"chown", "chmod", "link"}),
    **dict.fromkeys(
        ("ENV", "WORKDIR", "USER", "ARG", "SHELL", "ENTRYPOINT", "CMD", "LABEL", "EXPOSE"), frozenset[str]()
    ),
}
"""The instructions that are known, and the flags of each."""

_JSON_FORM = frozenset({"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD"})
_HEREDOCS = frozenset({"RUN", "COPY", "ADD"})
_DIRECTIVE = re.compile(r"#[ \t]*([A-Za-z][A-Za-z0-9_-]*)[ \t]*=[ \t]*(.*?)[ \t]*")
_DIRECTIVES = frozenset({"escape", "syntax", "check"})
_HEREDOC = re.compile(r"[0-9]*<<(-?)([^<\s]+)")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9._-]*")
_LONGEST = 1 << 20
_LINES = 20_000
_STAGES = 100

_L = TypeVar("_L", bound=DSecError)


def located(error: _L, name: str, line: int) -> _L:
    """The same error with file and line, as text and as fields."""
    if "line" in error.fields:
        return error
    return type(error)(f"{name}:{line}: {error.detail}", **{**error.fields, "file": name, "line": line})


def _directives(lines: list[str]) -> dict[str, str]:
    """Those of the first lines, up to the first that is none."""
    found: dict[str, str] = {}
    for line in lines:
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None or match[1].lower() not in _DIRECTIVES or match[1].lower() in found:
            break
        found[match[1].lower()] = match[2]
    return found


class _Lines:
    """The file's lines, read instruction by instruction."""

    def __init__(self, lines: list[str], escape: str) -> None:
        self._lines = lines
        self._escape = escape
        self._continues = re.compile(re.escape(escape) + r"[ \t]*\Z")
        self.number = 0

    def logical(self) -> tuple[int, str] | None:
        """The next instruction's first line number and its text, lines joined; None at the end."""
        parts: list[str] = []
        first = 0
        while self.number < len(self._lines):
            line = self._lines[self.number]
            self.number += 1
            bare = line.strip()
            if not bare or bare.startswith("#"):
                continue  # between the lines of an instruction too
            first = first or self.number
            cut = self._continues.search(line)
            if cut is None:
                return first, "".join([*parts, line]).strip()
            parts.append(line[: cut.start()])
        return (first, "".join(parts).strip()) if parts else None

    def heredoc(self, name: str, *, strip_tabs: bool, expand_it: bool) -> Heredoc:
        """The lines up to one that is `name` alone. Raises InvalidArgument where there is none."""
        body: list[str] = []
        while self.number < len(self._lines):
            line = self._lines[self.number].removesuffix("\r")
            self.number += 1
            line = line.lstrip("\t") if strip_tabs else line
            if line == name:
                return Heredoc(name=name, text="".join(f"{each}\n" for each in body), expand=expand_it)
            body.append(line)
        raise InvalidArgument(f"here-document without its end {name}", field="dockerfile")


def _flags(word: str, rest: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """The flags at the beginning of an instruction's text, and what follows them."""
    found: list[tuple[str, str]] = []
    while rest.startswith("--"):
        flag, _, after = rest.partition(" ")
        if flag == "--":
            return tuple(found), after.lstrip()
        name, sign, value = flag[2:].partition("=")
        if name not in FLAGS[word]:
            raise Unsupported(f"{word} --{name} is not known here", what="flag")
        if not sign and name == "link":
            value = "true"
        elif not sign or not value:
            raise InvalidArgument(f"{word} --{name} needs =VALUE", field="dockerfile")
        if name in dict(found):
            raise InvalidArgument(f"{word} --{name} is given twice", field="dockerfile")
        found.append((name, value))
        rest = after.lstrip()
    return tuple(found), rest


def _json_form(text: str) -> tuple[str, ...] | None:
    """The list of texts that `text` is in JSON; None where it is none, which makes it the shell form."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        return None
    return tuple(found)


def _heredocs(text: str, lines: _Lines, escape: str) -> tuple[Heredoc, ...]:
    if "<<" not in text:
        return ()
    try:
        words = split_words(text, escape)
    except InvalidArgument:
        return ()  # a shell's own quoting, which is the shell's to judge
    found = []
    for word in words:
        match = _HEREDOC.fullmatch(word)
        if match is None:
            continue
        name = expand(match[2], {}, escape) if "$" not in match[2] else match[2]
        if not name:
            raise InvalidArgument("here-document without a name", field="dockerfile")
        found.append(lines.heredoc(name, strip_tabs=bool(match[1]), expand_it=name == match[2]))
    return tuple(found)


def _instruction(line: int, text: str, lines: _Lines, escape: str) -> Instruction:
    word, rest = [*re.split(r"[ \t]+", text, maxsplit=1), ""][:2]
    word = word.upper()
    if word not in FLAGS:
        known = ", ".join(sorted(FLAGS))
        shown = word if word.isalpha() and len(word) < 20 else ascii(word[:40])
        raise Unsupported(f"{shown} is no instruction known here; known are {known}", what="instruction")
    flags, rest = _flags(word, rest)
    if not rest:
        raise InvalidArgument(f"{word} without anything after it", field="dockerfile")
    heredocs = _heredocs(rest, lines, escape) if word in _HEREDOCS else ()
    argv = _json_form(rest) if word in _JSON_FORM and not heredocs else None
    if argv is not None and not argv and word not in ("CMD", "ENTRYPOINT"):
        raise InvalidArgument(f"{word} with an empty list", field="dockerfile")
    return Instruction(line=line, word=word, text=rest, flags=flags, argv=argv, heredocs=heredocs)


def _arguments(text: str, values: Mapping[str, str], escape: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for word in split_words(text, escape):
        name, sign, value = word.partition("=")
        found.append((name, expand(value, values, escape) if sign else None))
    return found


def _from(one: Instruction, values: Mapping[str, str], escape: str) -> Stage:
    words = [expand(word, values, escape) for word in split_words(one.text, escape)]
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
        raise InvalidArgument("FROM is FROM IMAGE, or FROM IMAGE AS NAME", field="dockerfile")
    if not words[0]:
        raise InvalidArgument("FROM without an image: its ARG has no value", field="dockerfile")
    name = words[2].lower() if len(words) == 3 else ""
    if name and not _STAGE_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:100]!a} cannot name a stage: letters, digits and ._- after a letter", field="dockerfile"
        )
    platform = expand(dict(one.flags).get("platform", ""), values, escape)
    return Stage(line=one.line, base=words[0], name=name, platform=platform)


class _Stages:
    """Puts instructions into stages. `given`: build arguments by name; `always`: values that FROM may name without an ARG."""

    def __init__(self, given: Mapping[str, str], always: Mapping[str, str], escape: str) -> None:
        self._given = given
        self._always = always
        self._escape = escape
        self.globals: dict[str, str | None] = {}
        self.stages: list[Stage] = []

    def add(self, one: Instruction) -> None:
        if one.word == "FROM":
            if len(self.stages) >= _STAGES:
                raise InvalidArgument(f"more than {_STAGES} stages", field="dockerfile")
            stage = _from(one, self._values(), self._escape)
            if stage.name and any(stage.name == other.name for other in self.stages):
                raise InvalidArgument(f"two stages are named {stage.name}", field="dockerfile")
            self.stages.append(stage)
        elif self.stages:
            last = self.stages[-1]
            self.stages[-1] = replace(last, instructions=(*last.instructions, one))
        elif one.word == "ARG":
            for name, value in _arguments(one.text, self._values(), self._escape):
                self.globals[name] = self._given.get(name, value)
        else:
            raise InvalidArgument(f"{one.word} before the first FROM; only ARG may be", field="dockerfile")

    def _values(self) -> dict[str, str]:
        return {**self._always, **{name: value for name, value in self.globals.items() if value is not None}}


def parse_dockerfile(text: str, name: str, given: Mapping[str, str], always: Mapping[str, str]) -> Dockerfile:
    """The Dockerfile `text`, at most 1 MiB in 20,000 lines. `name`: of the file, for errors. `given`: build arguments. `always`: values
    that FROM may use without declaring them (TARGETPLATFORM and the like).

    Raises InvalidArgument for what is malformed and Unsupported for what is not known, both with `file` and `line`.
    """
    if len(text) > _LONGEST or text.count("\n") > _LINES:
        raise InvalidArgument(f"{name}: more than {_LONGEST} characters or {_LINES} lines", field="dockerfile")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape = _directives(lines).get("escape", "\\")
    if escape not in ("\\", "`"):
        raise InvalidArgument(f"{name}:1: the escape character is \\ or `", field="dockerfile", file=name, line=1)
    reader, stages = _Lines(lines, escape), _Stages(given, always, escape)
    while (found := reader.logical()) is not None:
        line, joined = found
        try:
            stages.add(_instruction(line, joined, reader, escape))
        except (InvalidArgument, Unsupported) as error:
            raise located(error, name, line) from error
    if not stages.stages:
        raise InvalidArgument(f"{name}: no FROM in it", field="dockerfile", file=name, line=1)
    return Dockerfile(name=name, escape=escape, globals=stages.globals, stages=tuple(stages.stages))
