"""`dsec doctor`: the exit status and what a person reads."""

import json

import pytest
from click.testing import CliRunner

from dsec.cli import doctor, up
from dsec.kernel.probe import Doctor, Mechanism, Rung, too_old
from dsec.model.errors import Unsupported

FIT = Mechanism(name="rootfs", using="idmapped", rungs=(Rung(name="idmapped", ok=True, why="by descriptor"),))
UNFIT = Mechanism(
    name="pool", using=None, rungs=(Rung(name="btrfs", ok=False, why="no btrfs"),), advice="install btrfs-progs"
)
EXTRA = Mechanism(name="lsm", using=None, rungs=(Rung(name="apparmor", ok=False, why="not there"),), needed=False)
PATHS = Mechanism(name="image-paths", using="fuse", rungs=(Rung(name="fuse", ok=True),), needed=False)


@pytest.mark.parametrize(("mechanisms", "ok"), [((FIT, EXTRA), True), ((FIT, UNFIT), False)])
def test_what_is_said(monkeypatch: pytest.MonkeyPatch, mechanisms: tuple[Mechanism, ...], ok: bool) -> None:
    found = Doctor(mechanisms=mechanisms, backends={"container": "" if ok else "missing: pool"}, ok=ok)
    monkeypatch.setattr(doctor, "examine", lambda _: found)
    monkeypatch.setattr(doctor, "image_paths", lambda *_: PATHS)
    plain = CliRunner().invoke(doctor.command, [])
    assert plain.exit_code == (0 if ok else 1)
    assert ("sandboxes can run here" if ok else "sandboxes cannot run here") in plain.output
    assert "uses idmapped: by descriptor" in plain.output
    assert ok or "try: install btrfs-progs" in plain.output
    shown = json.loads(CliRunner().invoke(doctor.command, ["--json"]).output)
    assert (shown["mechanisms"][-1]["name"] == "image-paths") is ok, "paths are tried where sandboxes can run"
    assert shown["ok"] is ok
    assert shown["mechanisms"][0] == {
        "name": "rootfs", "using": "idmapped", "rungs": [{"name": "idmapped", "ok": True, "why": "by descriptor"}],
        "needed": True, "advice": "",
    }  # fmt: skip


def test_an_older_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_old("6.13.0-rc1") == too_old("7.0") == ""
    assert "6.13 is needed" in too_old("6.12.9-amd64")
    monkeypatch.setattr("platform.release", lambda: "5.15.0-91-generic")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(Unsupported, match=r"this is Linux 5\.15\.0-91-generic"):
        up.command.main(["--state", "/nonexistent"], standalone_mode=False)
