"""`dsec image` and `dsec layer`: what they print, as text and JSON, and how they end."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dsec.cli import _verbs
from imagekit import file, folder, tar


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def call(*words: str, code: int = 0) -> Result:
        group, verb, *rest = words
        result = CliRunner().invoke(_verbs, [group, verb, "--state", str(tmp_path / "state"), *rest])
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "root.tar"
    path.write_bytes(tar([folder("etc"), file("etc/f", b"data")]))
    return path


def test_import_list_inspect_tag_remove_gc(run: Any, source: Path) -> None:
    record = json.loads(run("image", "import", "--json", "base:1", str(source)).stdout)
    assert record["name"] == "base:1" and record["digest"].startswith("sha256:")
    run("image", "tag", "base:1", "other@2")
    run("image", "tag", record["digest"], "third")
    listed = json.loads(run("image", "list", "--json").stdout)
    assert [view["name"] for view in listed] == ["base:1", "other@2", "third"]
    assert listed[0]["layer"] == {
        "digest": record["digest"], "kind": "base", "entries": 3, "content_bytes": 4,
        "stored_bytes": listed[0]["layer"]["stored_bytes"], "origin": f"tar:{source}",
    }  # fmt: skip
    text = run("image", "list").stdout
    assert "base:1" in text and record["digest"][7:19] in text
    shown = json.loads(run("image", "inspect", "third").stdout)
    assert shown["manifest"]["kind"] == "base" and shown["record"]["digest"] == record["digest"]
    run("image", "remove", "base:1", "other@2")
    assert json.loads(run("cache", "gc", "--json").stdout)["removed"] == []
    run("image", "remove", "third")
    assert json.loads(run("cache", "gc", "--json", "--dry-run").stdout)["removed"] == [record["digest"]]
    assert json.loads(run("cache", "gc", "--json").stdout)["removed"] == [record["digest"]]
    assert json.loads(run("image", "list", "--json").stdout) == []


def test_layers(run: Any, source: Path, tmp_path: Path) -> None:
    run(
        "layer",
        "build",
        "--kind",
        "toolkit",
        "--prefix",
        "/opt/t",
        "--chown",
        "7:8",
        "--whiteout",
        "/etc/motd",
        "t@1",
        str(source),
    )
    run("image", "import", "base", str(source))
    (view,) = json.loads(run("layer", "list", "--json").stdout)
    assert view["name"] == "t@1" and view["layer"]["kind"] == "toolkit" and view["layer"]["entries"] == 7
    run("layer", "build", "--kind", "base", "x", str(source), code=2)
    run("layer", "build", "--kind", "data", "--chown", "root", "x", str(source), code=2)
    run("layer", "build", "--kind", "data", "--prefix", "/x", "x", str(source), code=1)


def test_errors_are_typed(run: Any, source: Path, tmp_path: Path) -> None:
    assert "NotFound" in run("image", "import", "x", "./missing", code=1).stderr
    assert "NotFound" in run("image", "import", "x", "ubuntu:22.04", code=1).stderr
    assert "NotFound" in run("image", "inspect", "x", code=1).stderr
    assert "InvalidArgument" in run("image", "import", "../x", str(source), code=1).stderr
    bad = io.BytesIO()
    with tarfile.open(fileobj=bad, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../escape"))
    (tmp_path / "bad.tar").write_bytes(bad.getvalue())
    assert "../escape" in run("image", "import", "x", str(tmp_path / "bad.tar"), code=1).stderr
    run("image", "import", "--username", "u", "x", "r.example/a", code=2)
    run("image", "import", code=2)


@pytest.mark.root
def test_verify(run: Any, source: Path, tmp_path: Path) -> None:
    digest = json.loads(run("image", "import", "--json", "base", str(source)).stdout)["digest"]
    run("image", "tag", "base", "same")
    (first, second) = json.loads(run("image", "verify", "--json").stdout)
    assert first["ok"] and second["ok"] and first["report"]["bytes_read"] == 4
    assert "as they were" in run("image", "verify", "base").stdout
    data = tmp_path / "state/layers" / digest.removeprefix("sha256:") / "data"
    data.write_bytes(b"Data" + data.read_bytes()[4:])
    result = run("image", "verify", "base", code=125)
    assert "etc/f" in result.stdout and "other bytes" in result.stdout and "ImageUnavailable" in result.stderr


@pytest.mark.root
def test_volumes(run: Any) -> None:
    run("volume", "create", "shared", "--limit-mb", "64")
    run("volume", "create", "shared", code=1)
    run("volume", "create", "../x", code=1)
    assert json.loads(run("volume", "list", "--json").stdout) == ["shared"]
    run("volume", "remove", "shared")
    run("volume", "remove", "shared", code=1)
    assert json.loads(run("volume", "list", "--json").stdout) == []
