"""What the documents say is so: paths exist, links lead somewhere, every room is named."""

import re

import pytest

from dsec.kernel.launch import CAPABILITIES
from style.sources import ROOT, repository_files

DOCUMENTS = [name for name in repository_files() if name.endswith(".md")]
TEXT = {name: (ROOT / name).read_text() for name in DOCUMENTS}


def test_paths_named_in_the_architecture_exist() -> None:
    named = re.findall(
        r"`((?:src|crates|tests|bench|examples|docs|schema|tools)/[\w./-]+)`", TEXT["docs/architecture.md"]
    )
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_names_every_room_and_crate() -> None:
    text = TEXT["docs/architecture.md"]
    rooms = {path.name for path in (ROOT / "src/dsec").iterdir() if path.is_dir() and not path.name.startswith("_")}
    crates = {path.parent.name for path in ROOT.glob("crates/*/Cargo.toml")}
    assert {f"src/dsec/{room}" for room in rooms if f"`src/dsec/{room}`" not in text} == set()
    assert {crate for crate in crates if f"`crates/{crate}`" not in text} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[name]) if "://" not in target]
    assert [target for target in targets if target and not ((ROOT / name).parent / target).exists()] == []


def test_every_word_of_the_tool_is_explained() -> None:
    words = re.findall(r'"([a-z-]+)": [a-z_]+[,}]', (ROOT / "dev").read_text())
    assert {"build", "test", "bench"} <= set(words)
    assert [word for word in words if f"./dev {word}" not in TEXT["CONTRIBUTING.md"]] == []


def test_every_test_that_a_threat_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT["docs/security.md"]))
    tests = "".join(
        (ROOT / name).read_text() for name in repository_files() if name.startswith("tests/") and name.endswith(".py")
    )
    assert len(named) > 12
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_the_capabilities_kept_are_those_documented() -> None:
    section = TEXT["docs/security.md"].split("## Capabilities")[1].split("Left out")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(CAPABILITIES)


def test_every_test_that_a_row_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT["docs/conformance.md"]))
    suite = [name for name in repository_files() if name.startswith("src/dsec/testing/suite/test_")]
    written = {test for name in suite for test in re.findall(r"^async def (test_\w+)", (ROOT / name).read_text(), re.M)}
    assert len(named) > 60
    assert named == written
