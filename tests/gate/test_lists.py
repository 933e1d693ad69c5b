"""Lists of packages as of a date, and messages of DNS: properties that hold for whatever an index or a sandbox sends."""

import asyncio
import json

import dns.message
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.gate import goproxy, npm, pypi
from dsec.gate.names import Names
from dsec.gate.reach import Reach
from dsec.gate.refusal import Refused
from dsec.gate.resolver import Resolver
from dsec.gate.settings import GateSettings
from dsec.gate.tenants import Tenant, Tenants
from dsec.model.network import Address, Flow, NameRule, NetworkAnswer, Policy

DAYS = st.integers(1, 28).map(lambda day: f"2024-05-{day:02}T12:00:00.000Z")
BEFORE = pypi.seconds("2024-05-14T00:00:00Z")
VERSIONS = st.dictionaries(st.tuples(*[st.integers(0, 3)] * 3, st.sampled_from(["", "-rc.1", "-beta"])).map(lambda v: f"{v[0]}.{v[1]}.{v[2]}{v[3]}"),
                           st.one_of(DAYS, st.none(), st.just("soon")), max_size=8)  # fmt: skip


@given(VERSIONS)
def test_npm_shows_nothing_from_after_the_date_or_without_one(times: dict[str, str | None]) -> None:
    package = {
        "name": "x", "versions": {name: {"dist": {"tarball": f"http://r.test/x/-/x-{name}.tgz"}} for name in times},
        "time": {**times, "modified": "2024-06-01T00:00:00Z", "created": "2024-01-01T00:00:00Z"},
        "dist-tags": {"latest": max(times), "next": min(times)} if times else {},
    }  # fmt: skip
    shown = npm.visible(npm.parse(json.dumps(package).encode()), BEFORE)
    right = {
        name
        for name, at in times.items()
        if (moment := pypi.seconds(at)) is not None and BEFORE is not None and moment < BEFORE
    }
    assert set(shown["versions"]) == right
    assert set(shown["dist-tags"].values()) <= right
    assert ("latest" in shown["dist-tags"]) == bool(right)
    assert set(shown["time"]) - {"created", "modified"} == right
    text = json.dumps(shown)
    assert not any(
        at in text for name, at in times.items() if at and name not in right and at not in [times[one] for one in right]
    )


def test_latest_is_the_highest_release_and_not_a_candidate() -> None:
    times = {
        "1.9.0": "2024-05-01T00:00:00Z",
        "1.10.0": "2024-05-02T00:00:00Z",
        "2.0.0-rc.1": "2024-05-03T00:00:00Z",
        "2.0.0": "2024-06-01T00:00:00Z",
    }
    package = {"versions": {name: {} for name in times}, "time": times, "dist-tags": {"latest": "2.0.0"}}
    assert npm.visible(package, BEFORE)["dist-tags"] == {"latest": "1.10.0"}


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.one_of(DAYS, st.none(), st.just("soon")), st.booleans()),
        max_size=8,
    )
)
def test_a_python_index_shows_nothing_from_after_the_date_or_without_one(
    files: list[tuple[str, str | None, bool]],
) -> None:
    listed = [{"filename": f"{name}-{number}.whl", "url": f"f/{number}", "hashes": {"sha256": "0" * 64} if hashed else {"md5": "0" * 32}, "upload-time": at}
              for number, (name, at, hashed) in enumerate(files)]  # fmt: skip
    found = pypi.parse(pypi.JSON_TYPE, json.dumps({"files": listed}).encode(), "http://i.test/simple/x/")
    for number, (name, at, hashed) in enumerate(files):
        release = found.get(f"{name}-{number}.whl")
        assert (release is not None) == hashed
        if release is not None:
            assert release.visible(BEFORE) == (at in [f"2024-05-{day:02}T12:00:00.000Z" for day in range(1, 14)])
            assert release.url == f"http://i.test/simple/x/f/{number}"


@given(st.sampled_from([pypi.JSON_TYPE, "text/html"]), st.binary(max_size=300))
def test_a_broken_python_index_is_no_index(kind: str, content: bytes) -> None:
    try:
        assert pypi.parse(kind, content, "http://i.test/") == {} or kind == "text/html"
    except Refused as refused:
        assert refused.reason == "upstream"


@given(st.binary(max_size=200))
def test_a_broken_registry_is_no_registry(content: bytes) -> None:
    with pytest.raises(Refused):
        npm.parse(content)


MODULES = (
    st.lists(st.text("abXY.-_1", min_size=1, max_size=5), min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda m: ".." not in m)
)


@given(MODULES)
def test_module_paths_keep_their_case(module: str) -> None:
    path = goproxy.escaped(module)
    assert path == path.lower()
    assert goproxy.asked(f"{path}/@v/list") == goproxy.Asked(module, "list")
    assert goproxy.asked(f"{path}/@v/v1.0.0.zip") == goproxy.Asked(module, "zip", "v1.0.0")


@given(MODULES, MODULES)
def test_prefixes_end_at_path_boundaries(module: str, prefix: str) -> None:
    parts, wanted = module.split("/"), prefix.split("/")
    assert goproxy.within(module, [prefix]) == (parts[: len(wanted)] == wanted)


@given(st.text(max_size=60))
def test_other_paths_are_no_modules(path: str) -> None:
    try:
        asked = goproxy.asked(path)
    except Refused as refused:
        assert refused.reason == "not_found"
    else:
        assert ".." not in asked.module


QUERY = dns.message.make_query("a.test", "A", use_edns=0).to_wire()


@settings(max_examples=200)
@given(
    st.one_of(
        st.binary(max_size=100),
        st.tuples(st.integers(0, len(QUERY) - 1), st.binary(min_size=1, max_size=3)).map(
            lambda c: QUERY[: c[0]] + c[1] + QUERY[c[0] + len(c[1]) :]
        ),
    )
)
def test_whatever_a_sandbox_sends_gets_a_small_answer_or_none(data: bytes) -> None:
    async def answer() -> bytes:
        async def opened(slot: int, found: NetworkAnswer) -> None:
            raise AssertionError("nothing is allowed, so nothing is opened")

        def flow(slot: int, told: Flow, seconds: float) -> None:
            assert told.verdict == "refused"

        chosen = GateSettings(nameservers=("192.0.2.1",))
        tenant = Tenant(
            Address(slot=1, v4="100.96.0.2", v6="fd96::2"),
            Policy(names=(NameRule(pattern="far.from.any.test", ports=((80, 80),)),)),
            flow,
        )
        async with asyncio.TaskGroup() as group:
            tenants = Tenants(group, flow, 10, lambda where, error: None)
            return await Resolver(tenants, Names(chosen, Reach(), opened), chosen, ("100.96.0.1", "fd96::1")).answer(
                tenant, data, "udp"
            )

    found = asyncio.run(answer())
    assert len(found) <= 512
    assert not found or (found[:2] == data[:2] and found[2] & 0x80)


async def test_some_are_served_whatever_the_others_have() -> None:
    over, served = asyncio.Event(), dict[int, int]()

    async def work() -> None:
        await over.wait()

    async with asyncio.TaskGroup() as group:
        tenants = Tenants(group, lambda *_: None, 40, lambda where, error: None)
        for slot in range(4):
            address = Address(slot=slot, v4=f"100.96.1.{slot}", v6=f"fd00::{slot}")
            await tenants.set(address, Policy())
            tenant = tenants.at(address.v4)
            assert tenant is not None
            served[slot] = sum(tenants.serve(tenant, "connection", 30, work) for _ in range(100))
        over.set()
    assert served == {0: 30, 1: 16, 2: 16, 3: 16}
