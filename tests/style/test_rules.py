"""Rules of the code that imports and types cannot show."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from style.sources import ROOT, allowed, python_files, repository_files, rust_files, rust_plain

BANNED_NAMES = {"manager", "utils", "util", "common", "helper", "helpers", "base", "handler"}
# Crates in which `unsafe` may be written; pyo3's macros in native make some that no text shows.
UNSAFE_CRATES = {"sys", "native"}
# Rooms that must not know by which mechanism a sandbox is made.
MECHANISM_FREE = (
    "src/dsec/model/",
    "src/dsec/ports/",
    "src/dsec/cluster/",
    "src/dsec/edge/lifecycle",
    "src/dsec/rules/lifecycle",
)
MECHANISMS = re.compile(r"overlay|erofs|qemu|firecracker", re.IGNORECASE)


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def stale(section: str, used: set[str]) -> set[str]:
    return set(allowed()[section]) - used


def test_no_import_inside_a_function() -> None:
    found = set()
    for name in python_files():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
                found |= {f"{name}::{node.name}"} if inner else set()
    assert found - set(allowed()["function_imports"]) == set()
    assert stale("function_imports", found) == set()


def test_names_say_what_a_thing_is() -> None:
    found = {
        n
        for n in python_files() + rust_files()
        if BANNED_NAMES & set().union(*map(words, Path(n).with_suffix("").parts))
    }
    for name in python_files():
        classes = [node for node in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(node, ast.ClassDef)]
        found |= {f"{name}::{node.name}" for node in classes if BANNED_NAMES & words(node.name)}
    for name in rust_files():
        types = re.findall(r"\b(?:struct|enum|trait|type)\s+(\w+)", rust_plain((ROOT / name).read_text()))
        found |= {f"{name}::{kind}" for kind in types if BANNED_NAMES & words(kind)}
    assert found - set(allowed()["names"]) == set()
    assert stale("names", found) == set()


def unsafe_without_reason(text: str) -> list[int]:
    """Lines with `unsafe` that have no SAFETY comment directly above (attributes and comment lines may lie between)."""
    lines, missing = text.splitlines(), []
    for number, plain in enumerate(rust_plain(text).splitlines()):
        if not re.search(r"\bunsafe\b", plain):
            continue
        above = number - 1
        while above >= 0 and lines[above].strip().startswith(("//", "#[")):
            if "SAFETY:" in lines[above] or "# Safety" in lines[above]:
                break
            above -= 1
        if above < 0 or not lines[above].strip().startswith(("//", "#[")):
            missing.append(number + 1)
    return missing


def test_every_unsafe_says_why_it_is_sound() -> None:
    wrong = [f"{name}:{line}" for name in rust_files() for line in unsafe_without_reason((ROOT / name).read_text())]
    assert wrong == []


def test_unsafe_scan_sees_a_missing_reason() -> None:
    assert unsafe_without_reason("// SAFETY: x\n#[inline]\nunsafe fn a() {}\n\nlet b = unsafe { 1 };\n") == [5]


def test_unsafe_lives_in_sys() -> None:
    found = {
        name
        for name in rust_files()
        if name.split("/")[1] not in UNSAFE_CRATES and re.search(r"\bunsafe\b", rust_plain((ROOT / name).read_text()))
    }
    assert found - set(allowed()["unsafe_outside_sys"]) == set()
    assert stale("unsafe_outside_sys", found) == set()


def test_crates_forbid_unsafe_code() -> None:
    wrong = []
    for manifest in ROOT.glob("crates/*/Cargo.toml"):
        roots = [path for path in [manifest.parent / "src/lib.rs", manifest.parent / "src/main.rs"] if path.is_file()]
        if manifest.parent.name in UNSAFE_CRATES or str(roots[0].relative_to(ROOT)) in allowed()["unsafe_outside_sys"]:
            continue
        wrong += [str(path.relative_to(ROOT)) for path in roots if "#![forbid(unsafe_code)]" not in path.read_text()]
    assert wrong == []


def test_mechanisms_stay_in_their_rooms() -> None:
    wrong = []
    for name in repository_files():
        if name.startswith(MECHANISM_FREE) and name.endswith(".py"):
            lines = enumerate((ROOT / name).read_text().splitlines(), 1)
            wrong += [f"{name}:{number}: {line.strip()}" for number, line in lines if MECHANISMS.search(line)]
    assert wrong == []


def test_modules_say_what_they_export() -> None:
    """Modules of the package have __all__, but for empty ones, and tests, which pytest finds by their names."""
    wrong = []
    for name in python_files():
        body = ast.parse((ROOT / name).read_text()).body
        defines = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)]
        names = [
            target.id
            for n in defines
            if isinstance(n, ast.Assign)
            for target in n.targets
            if isinstance(target, ast.Name)
        ]
        exempt = name.endswith("__main__.py") or Path(name).name.startswith("test_")
        if name.startswith("src/dsec/") and defines and "__all__" not in names and not exempt:
            wrong.append(name)
    assert wrong == []


def test_no_workplace_in_files() -> None:
    """No address of a package registry and no path of the machine the code was written on."""
    hosts = [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("deb.debian", "org"),
        ("npmjs", "org"),
        ("golang", "org"),
        ("maven", "org"),
    ]
    hosts += [("static.crates", "io"), ("index.crates", "io"), ("repo.maven.apache", "org")]
    paths = ["/work/" + tail for tail in ("main", "wt", "shared", r"\.library", r"\.mirror")] + [
        "/root/" + r"\.(?:cargo|pyenv)"
    ]
    pattern = re.compile("|".join([*(re.escape(".".join(host)) for host in hosts), *paths]))
    wrong = []
    for name in repository_files():
        text = (ROOT / name).read_bytes().decode(errors="replace")
        wrong += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert wrong == []


GENERATORS = [
    name
    for name in repository_files()
    if name.startswith("tools/") and name.endswith(".py") and "--check" in (ROOT / name).read_text()
]


@pytest.mark.parametrize("generator", GENERATORS)
def test_generated_files_equal_their_sources(generator: str) -> None:
    done = subprocess.run(
        [sys.executable, generator, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_rule_is_kept() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
