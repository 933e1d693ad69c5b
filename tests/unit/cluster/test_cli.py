"""`dsec key` and `dsec project` against a served platform."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsec.cli import key, project
from dsec.model.errors import NotFound, QuotaExceeded, Unauthenticated, Unavailable
from unit.cluster.fakes import Platform, platform


class Terminal:
    def __init__(self, world: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self._patch = monkeypatch
        monkeypatch.setenv("DSEC_CREDENTIALS", str(tmp_path / "none.json"))
        monkeypatch.setenv("DSEC_URL", world.url)
        self.use(world.keys[0])

    def use(self, text: str) -> None:
        self._patch.setenv("DSEC_API_KEY", text)

    async def __call__(self, verb: object, *arguments: str) -> str:
        def call() -> str:
            done = CliRunner().invoke(verb.command, arguments)  # type: ignore[attr-defined]
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception
            assert done.exit_code == 0, done.output
            return done.output

        return await asyncio.to_thread(call)


async def test_keys_and_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with platform(tmp_path) as world:
        dsec = Terminal(world, monkeypatch, tmp_path)
        await dsec(project, "create", "root/team", "--sandboxes", "5")
        await dsec(project, "create", "root/team", "--sandboxes", "7", "--change")
        shown = json.loads(await dsec(project, "list", "--json"))
        assert [(item["path"], item["quota"]["sandboxes"]) for item in shown] == [("root", None), ("root/team", 7)]
        assert "sandboxes: 0 used, 0 delegated, of 7" in await dsec(project, "list")
        with pytest.raises(QuotaExceeded):
            await dsec(project, "create", "root/team/a", "--sandboxes", "8", "--memory-mb", "1")
        await dsec(key, "principal", "bob", "--project", "root/team", "--permission", "sandbox.read")
        text = (await dsec(key, "create", "--principal", "bob", "--note", "x")).strip()
        assert (await world.iam.authenticate(text)).name == "bob"
        listed = json.loads(await dsec(key, "list", "--json"))
        assert [item["note"] for item in listed] == ["first start", "x"]
        await dsec(key, "revoke", listed[1]["id"])
        with pytest.raises(NotFound):
            await dsec(key, "revoke", listed[1]["id"])
        await dsec(key, "remove-principal", "bob")
        await dsec(project, "remove", "root/team")
        dsec.use(text)
        with pytest.raises(Unauthenticated):
            await dsec(project, "list")
    with pytest.raises(Unavailable):
        await dsec(project, "list")
