"""`dsec image push|pull|sync|sign|keys|prune`: what they print, and how they end."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import storekit  # noqa: F401 - starts obstore's threads before a test counts descriptors
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


def test_images_in_shared_stores(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.tar"
    source.write_bytes(tar([folder("d"), file("d/a", b"alpha" * 5000)]))
    run("image", "import", "base:1", str(source))
    store, second = f"file://{tmp_path}/store", f"file://{tmp_path}/second"
    assert "InvalidArgument" in run("image", "push", "base:1", code=1).stderr  # no store is configured
    public, again = (CliRunner().invoke(_verbs, ["image", "keys", str(tmp_path / "key")]).stdout.strip() for _ in "12")
    assert public.startswith("ed25519:") and again == public
    pushed = json.loads(run("image", "push", "--json", "--store", store, "base:1").stdout)
    assert pushed["layers"][0]["new_chunks"] == pushed["layers"][0]["chunks"] > 0
    assert "0 of 1 layers new" in run("image", "push", "--store", store, "base:1").stderr
    run("image", "sync", store, second, "--compression", "none")
    listed = tmp_path / "stores.toml"
    listed.write_text(f'[second]\nurl = "{second}"\nkeys = ["{public}"]\n')
    listed.chmod(0o600)
    run("image", "remove", "base:1")
    run("cache", "gc")
    monkeypatch.setenv("DSEC_IMAGES_STORES", str(listed))
    assert "PermissionDenied" in run("image", "pull", "base:1", code=1).stderr
    run("image", "sign", "--key", str(tmp_path / "key"), "--store", "second", "base:1")
    pulled = json.loads(run("image", "pull", "--json", "base:1").stdout)
    assert pulled["digest"] == pushed["digest"] and pulled["signed_by"] == [public]
    assert json.loads(run("image", "inspect", "base:1").stdout)["record"]["digest"] == pushed["digest"]
    done = json.loads(run("image", "prune", "--json", store).stdout)
    assert done == {"layers": 0, "items": 0, "freed_bytes": 0, "marked": 0}
