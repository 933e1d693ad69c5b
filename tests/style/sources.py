"""What style tests look at: the repository's files, and Rust text with comments and strings blanked out."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "GENERATED",
    "ROOT",
    "allowed",
    "python_files",
    "repository_files",
    "rust_files",
    "rust_functions",
    "rust_plain",
]

ROOT = Path(__file__).resolve().parents[2]
# Made by tools/; held equal to their sources by a test, so no limit is theirs.
GENERATED = {"src/dsec/model/errors.py", "src/dsec/model/aether.py", "crates/proto/src/messages.rs"}
GENERATED_FOLDERS = ("src/dsec/sdk/_sync/",)


@cache
def repository_files() -> tuple[str, ...]:
    """Tracked files and new ones that git does not ignore, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    return tuple(sorted({name for name in listing.split("\0") if name and (ROOT / name).is_file()}))


def written(name: str) -> bool:
    return name not in GENERATED and not name.startswith(GENERATED_FOLDERS)


def python_files() -> list[str]:
    return [name for name in repository_files() if (name.endswith(".py") or name == "dev") and written(name)]


def rust_files() -> list[str]:
    return [name for name in repository_files() if name.endswith(".rs") and written(name)]


@cache
def allowed() -> dict[str, Any]:
    return tomllib.loads((ROOT / "tests/style/allowed.toml").read_text())


RUST_TOKENS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(?P<hashes>\#*)".*?"(?P=hashes)|\bb?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*"|'(?:\\.[^']*|[^'\\])'""",
    re.DOTALL,
)


def rust_plain(text: str) -> str:
    """The text with comments, strings and characters blanked out; lines stay where they are."""
    return RUST_TOKENS.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def rust_functions(text: str) -> list[tuple[str, int, int]]:
    """(name, first line, number of lines) of each function with a body."""
    plain, found = rust_plain(text), []
    for match in re.finditer(r"\bfn\s+(\w+)", plain):
        depth, index, nesting = 0, match.end(), 0
        while index < len(plain):
            char = plain[index]
            nesting += (char in "([") - (char in ")]")
            if char == ";" and depth == 0 and nesting == 0:
                break
            depth += (char == "{") - (char == "}")
            if char == "}" and depth == 0:
                first = plain.count("\n", 0, match.start()) + 1
                found.append((match[1], first, plain.count("\n", 0, index) + 2 - first))
                break
            index += 1
    return found
