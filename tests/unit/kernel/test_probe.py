"""The doctor's findings: by trying, with a reason for each, and nothing left behind."""

import os
from pathlib import Path

import pytest

from dsec.kernel import probe
from dsec.kernel.errors import KernelError
from dsec.kernel.probe import Doctor, examine


def by_name(found: Doctor) -> dict[str, probe.Mechanism]:
    return {mechanism.name: mechanism for mechanism in found.mechanisms}


@pytest.mark.root
def test_this_host_can_run_containers(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert found.ok, [m for m in found.mechanisms if m.using is None]
    assert found.backends["container"] == ""
    assert found.backends["microvm"] != ""
    names = by_name(found)
    assert {"namespaces", "rootfs", "writable-layers", "image-loading", "cgroups", "seccomp", "kernel"} <= set(names)
    assert names["cgroups"].using in ("v2", "hybrid")
    assert all(rung.why for mechanism in found.mechanisms for rung in mechanism.rungs)
    assert os.listdir(tmp_path) == []


@pytest.mark.root
def test_a_missing_mechanism_is_named_and_the_rest_is_still_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise KernelError("mount", "erofs", 19)

    monkeypatch.setattr(probe, "mount_erofs", refuse)
    found = examine(tmp_path)
    assert not found.ok
    assert found.backends["container"] == "missing: image-loading, rootfs"
    assert by_name(found)["image-loading"].rungs[0].why == "mount erofs: No such device"
    assert by_name(found)["cgroups"].using is not None


def test_an_old_kernel_is_refused_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.1.0-13-amd64")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = examine(tmp_path)
    assert not found.ok
    assert "6.13" in by_name(found)["kernel"].rungs[0].why
    assert by_name(found)["privilege"].using is None
