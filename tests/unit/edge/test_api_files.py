"""Files over the edge's HTTP API, on the fakes."""

import msgspec
import pytest
from rig import Rig


@pytest.mark.parametrize("size", [0, 1, 18_000, (3 << 20) + 1])
async def test_a_file_comes_back_as_it_went(rig: Rig, size: int) -> None:
    view = await rig.create()
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    pieces = [data[start : start + 65536] for start in range(0, size, 65536)] or [b""]
    written = await rig.call(view, "PUT", "/files", body=pieces, path="/a b")
    assert written.status == 200 and written.json()["size"] == size
    read = await rig.call(view, "GET", "/files", path="/a b")
    assert read.body == data and msgspec.json.decode(read.headers["x-dsec-file"])["size"] == size
    part = await rig.call(view, "GET", "/files", path="/a b", offset="1", length="10")
    assert part.body == data[1:11]
    assert not rig.agent(view).channels, "no connection is left open"
    assert rig.node.lifecycle.find(view.id).busy == 0


async def test_a_cut_upload_leaves_the_old_file(rig: Rig) -> None:
    """FI1: cut at half: the old file, and nothing recorded that a repeat could take for done."""
    view = await rig.create()
    await rig.call(view, "PUT", "/files", body=b"old", path="/f")
    for key in ({}, {"Idempotency-Key": "k"}):
        assert (await rig.call(view, "PUT", "/files", body=[b"ne"], cut=True, path="/f", headers=key)).status == 0
        assert rig.agent(view).files["/f"] == b"old"
    assert (await rig.call(view, "PUT", "/files", body=[b"ne", b"w"], path="/f", headers=key)).status == 200
    assert rig.agent(view).files["/f"] == b"new"
    repeat = await rig.call(view, "PUT", "/files", body=[b"n", b"ew"], path="/f", headers=key)
    assert repeat.status == 200 and repeat.json()["sha256"]
    other = await rig.call(view, "PUT", "/files", body=[b"other"], path="/f", headers=key)
    assert (other.status, other.json()["code"]) == (409, "conflict")
    assert rig.agent(view).files["/f"] == b"new"
    assert not rig.agent(view).channels


async def test_file_operations(rig: Rig) -> None:
    view = await rig.create()
    await rig.call(view, "PUT", "/files", body=b"abc", path="f", append="true")
    await rig.call(view, "PUT", "/files", body=b"def", path="/f", append="true")
    assert rig.agent(view).files == {"/f": b"abcdef"}
    assert (await rig.call(view, "GET", "/files/stat", path="/f")).json()["kind"] == "file"
    assert (await rig.call(view, "POST", "/files/mkdir", path="/d", mode="448")).json()["kind"] == "dir"
    assert (await rig.call(view, "POST", "/files/move", source="/f", target="/d/g")).json()["path"] == "/d/g"
    assert [each["path"] for each in (await rig.call(view, "GET", "/files/list", path="/d")).json()] == ["/d/g"]
    assert (await rig.call(view, "POST", "/files/remove", path="/d/g")).status == 204
    for method, rest, query, status in (
        ("GET", "/files", {"path": "/none"}, 404),
        ("GET", "/files/stat", {"path": "/none"}, 404),
        ("GET", "/files", {"path": "/f", "offset": "-1"}, 400),
        ("GET", "/files/stat", {"path": ""}, 400),
        ("GET", "/files/stat", {"path": "a\0"}, 400),
        ("GET", "/files/stat", {"path": "/" + "x" * 5000}, 400),
        ("GET", "/files/list", {"path": "/", "limit": "0"}, 400),
        ("POST", "/files/mkdir", {"path": "/", "mode": "99999"}, 400),
        ("GET", "/files/stat", {}, 400),
        ("GET", "/files/tree", {"path": "/"}, 422),
    ):
        assert (await rig.call(view, method, rest, **query)).status == status, (rest, query)
    assert rig.node.lifecycle.find(view.id).busy == 0 and not rig.agent(view).channels
