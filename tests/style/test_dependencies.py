"""Each thing we depend on has a row in docs/dependencies.md that says why."""

import re
import tomllib

from style.sources import ROOT


def documented() -> set[str]:
    rows = (ROOT / "docs/dependencies.md").read_text().splitlines()
    return {name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def python_names() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    return {re.split(r"[\s\[<>=!~;]", name)[0] for name in listed}


def rust_names() -> set[str]:
    names: set[str] = set()
    for manifest in [ROOT / "Cargo.toml", *ROOT.glob("crates/*/Cargo.toml")]:
        content = tomllib.loads(manifest.read_text())
        tables = [content, content.get("workspace", {}), *content.get("target", {}).values()]
        for table in tables:
            for kind in ("dependencies", "dev-dependencies", "build-dependencies"):
                names |= set(table.get(kind, {}))
    return {name for name in names if not name.startswith("dsec-")}


def system_names() -> set[str]:
    text = (ROOT / "dev").read_text()
    blocks = re.findall(r"^(?:SYSTEM|FUZZING|PEERS) = \{(.*?)\}$", text, re.DOTALL | re.MULTILINE)
    return set(re.findall(r'"([a-z0-9+.-]+)": \(', "\n".join(blocks)))


def test_each_dependency_has_its_reason() -> None:
    wanted = python_names() | rust_names() | system_names()
    assert {"msgspec", "serde", "btrfs-progs", "crun"} <= wanted
    assert wanted - documented() == set()


def test_no_row_for_what_is_gone() -> None:
    rows = documented() - python_names() - rust_names() - system_names()
    assert rows <= {"hatchling", "rust", "python"}, rows
