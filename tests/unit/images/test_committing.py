"""Commits into a store: bounds, names and shares, from plain folders in place of writable layers."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from dsec.images.committing import CommitSettings, Committer
from dsec.model.errors import InvalidArgument, QuotaExceeded
from dsec.model.layers import Composition, ImageConfig
from dsec.model.views import CommitRequest
from dsec.ports.images import Changed
from imagekit import CLOCK, Shelf


class Place:
    """A committer on a store, and a folder of changes."""

    def __init__(self, folder: Path, **settings: int) -> None:
        self.shelf = Shelf(folder / "state")
        self.upper = folder / "upper"
        self.upper.mkdir()
        self.committer = Committer(self.shelf.layers, self.shelf.names, CLOCK, CommitSettings(**settings))
        composition = Composition(layers=(), config=ImageConfig(user="u"))
        self.changed = Changed(
            sandbox_id="s", project="root/team", directory=str(self.upper), composition=composition, most_bytes=1 << 24
        )


async def test_a_commit_is_named_and_whose_it_is_is_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (place.upper / "f").write_text("x")
    report = await place.committer.commit(CommitRequest(name="team/a:1"), place.changed)
    record = place.shelf.names.record("team/a:1")
    assert (record.digest, record.project, record.origin) == (report.digest, "root/team", "sandbox:s")
    assert place.shelf.layers.manifest(report.digest).config.user == "u"
    own = CommitRequest(name="b", config=ImageConfig(user="v"))
    second = await place.committer.commit(own, replace(place.changed, project="root"))
    assert place.shelf.names.record("b").project == ""
    assert place.shelf.layers.manifest(second.digest).config.user == "v"


async def test_a_project_holds_no_more_than_its_share(tmp_path: Path) -> None:
    place = Place(tmp_path, project_mb=1)
    (place.upper / "f").write_bytes(b"1" * 700_000)
    await place.committer.commit(CommitRequest(name="team/a"), place.changed)
    before = place.shelf.layers.digests()
    (place.upper / "f").write_bytes(b"2" * 700_000)
    with pytest.raises(QuotaExceeded):
        await place.committer.commit(CommitRequest(name="team/b"), place.changed)
    assert place.shelf.layers.digests() == before
    await place.committer.commit(CommitRequest(name="team/a"), place.changed)  # in place of what the name held
    await place.committer.commit(CommitRequest(name="c"), replace(place.changed, project="root"))
    place.shelf.names.remove("team/a")
    await place.committer.commit(CommitRequest(name="team/b"), place.changed)


async def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for request in (
        CommitRequest(name="/x"),
        CommitRequest(name="a", scrub=("[",)),
        CommitRequest(name="a", keep=("..",)),
    ):
        with pytest.raises(InvalidArgument):
            place.committer.check(request)


async def test_a_commit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, entries=5)
    for number in range(9):
        (place.upper / str(number)).touch()
    with pytest.raises(InvalidArgument):
        await place.committer.commit(CommitRequest(name="a"), place.changed)
    assert place.shelf.layers.digests() == []
    assert list((tmp_path / "state/tmp").glob("import-*")) == []


async def test_an_image_of_too_many_layers_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    many = replace(place.changed.composition, layers=tuple(f"sha256:{n:064x}" for n in range(400)))
    with pytest.raises(QuotaExceeded):
        await place.committer.commit(CommitRequest(name="a"), replace(place.changed, composition=many))
