"""Commits of an edge on fakes: who may, under which names, and that nothing stays frozen."""

from pathlib import Path
from typing import Any

import pytest

from dsec.model.errors import ImageUnavailable
from dsec.ports.cluster import Principal
from dsec.testing.asgi import AsgiClient
from unit.edge.rig import PRINCIPAL, SPEC, Rig, running

MAKER = Principal(name="maker", project="root/team", permissions=PRINCIPAL.permissions | {"image.write"})
ROOT = Principal(name="root", project="root", permissions=MAKER.permissions)


async def commit(
    rig: Rig, sandbox: str, by: Principal, name: str = "team/made:1", key: str | None = None, **more: Any
) -> Any:
    client = AsgiClient(rig.node.api, by)
    headers = {"Idempotency-Key": key} if key else {}
    return await client.request("POST", f"/v1/sandboxes/{sandbox}/commit", json={"name": name, **more}, headers=headers)


async def test_a_commit_is_of_the_sandbox_and_its_layers(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        answer = await commit(rig, view.id, MAKER, scrub=["/x"], keep=["/y"])
        assert answer.status == 200
        assert answer.json()["layers"] == ["base", "team/made:1"]
        (seen,) = rig.commits.seen
        assert (seen.sandbox_id, seen.project, seen.most_bytes) == (view.id, "root/team", SPEC.disk_limit_mb << 20)
        assert rig.cell(view).taken == 0


@pytest.mark.parametrize(
    ("by", "name", "code"),
    [
        (PRINCIPAL, "team/made:1", "permission_denied"),
        (
            Principal(name="x", project="root/team", permissions=frozenset({"image.write"})),
            "team/x",
            "permission_denied",
        ),
        (MAKER, "made:1", "permission_denied"),
        (MAKER, "teams/made:1", "permission_denied"),
        (MAKER, "dsec-build/0", "permission_denied"),
        (Principal(name="o", project="root/other", permissions=MAKER.permissions), "other/made", "not_found"),
    ],
)
async def test_names_and_sandboxes_beyond_ones_reach_are_refused(
    tmp_path: Path, by: Principal, name: str, code: str
) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        answer = await commit(rig, view.id, by, name)
        assert answer.json()["code"] == code
        assert rig.commits.seen == []


async def test_root_names_images_as_it_likes(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        assert (await commit(rig, view.id, ROOT, "anything")).status == 200


async def test_what_can_be_known_is_refused_before_the_sandbox_is_looked_at(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        assert (await commit(rig, view.id, ROOT, "full")).json()["code"] == "busy"
        assert rig.commits.seen == []


async def test_a_failed_commit_leaves_nothing_frozen(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        rig.commits.fails = ImageUnavailable("planted")
        assert (await commit(rig, view.id, MAKER)).json()["code"] == "image_unavailable"
        assert rig.cell(view).taken == 0


async def test_a_repeated_request_commits_once(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        first = await commit(rig, view.id, MAKER, key="k")
        again = await commit(rig, view.id, MAKER, key="k")
        assert first.json() == again.json()
        assert len(rig.commits.seen) == 1
        other = await commit(rig, view.id, MAKER, name="team/other", key="k")
        assert other.json()["code"] == "conflict"


async def test_a_sandbox_that_has_ended_cannot_be_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        view = await rig.create()
        await rig.call(view, "DELETE")
        assert (await commit(rig, view.id, MAKER)).json()["code"] == "sandbox_lost"
