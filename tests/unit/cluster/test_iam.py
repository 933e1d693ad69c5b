"""IAM on SQLite: keys, permissions, quota that outlives a restart."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.cluster import tables
from dsec.cluster.iam import SqlIam
from dsec.cluster.keys import RANDOM_BYTES, make_key, matches
from dsec.cluster.tables import open_database
from dsec.cluster.tenants import Tenants
from dsec.model.errors import (
    Busy,
    Conflict,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    RuntimeFailure,
    Unauthenticated,
)
from dsec.model.spec import SandboxSpec
from dsec.model.tenancy import Amount, KeySpec, PrincipalSpec, ProjectSpec, Quota
from dsec.rules.access import PERMISSIONS

SPEC = SandboxSpec(container_image="x", memory_limit_mb=100)


class Clock:
    """Time that moves when told; bytes that never repeat."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.count = 0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def random(self, n: int) -> bytes:
        self.count += 1
        return self.count.to_bytes(4, "big").ljust(n, b"\x5a")


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.first: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.iam = SqlIam(self.path, self.clock)
        self.iam.open(self.first.append)
        self.tenants = Tenants(self.iam, self.clock)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "iam.db")
    yield world
    world.iam.close()


async def test_the_first_start_makes_one_root_key_and_the_second_none(world: World) -> None:
    root = await world.iam.authenticate(world.first[0])
    assert (root.name, root.project, root.permissions) == ("root", "root", frozenset(PERMISSIONS))
    world.iam.close()
    world.restart()
    assert len(world.first) == 1
    assert await world.iam.authenticate(world.first[0]) == root


async def test_a_crash_before_the_first_key_is_kept_repeats_the_first_start(tmp_path: Path) -> None:
    def crash(_text: str) -> None:
        raise OSError("disk full")

    iam = SqlIam(tmp_path / "iam.db", Clock())
    with pytest.raises(OSError, match="disk full"):
        iam.open(crash)
    iam.close()
    kept: list[str] = []
    iam.open(kept.append)
    assert (await iam.authenticate(kept[0])).name == "root"
    iam.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k: "",
        lambda k: k[:-1],
        lambda k: k + "\n",
        lambda k: k[:-1] + ("0" if k[-1] != "0" else "1"),
        lambda k: k.upper(),
        lambda k: "dsec_" + "0" * 16 + k[21:],
    ],
)
async def test_a_bad_key_is_refused(world: World, spoil: object) -> None:
    with pytest.raises(Unauthenticated):
        await world.iam.authenticate(spoil(world.first[0]))  # type: ignore[operator]


async def test_no_secret_is_in_the_database(world: World) -> None:
    secret = world.first[0].split("_")[2]
    await world.iam.authenticate(world.first[0])
    world.iam.close()
    for file in world.path.parent.iterdir():
        assert secret.encode() not in file.read_bytes()
        assert bytes.fromhex(secret) not in file.read_bytes()
    assert world.path.stat().st_mode & 0o777 == 0o600


def test_a_key_matches_its_own_record_only() -> None:
    one, first = make_key(bytes(range(RANDOM_BYTES)))
    two, second = make_key(bytes(range(1, RANDOM_BYTES + 1)))
    assert matches(one, first) and matches(two, second)
    assert not matches(one, second) and not matches(two, first)


async def test_revocation_and_removal_are_immediate(world: World) -> None:
    root = await world.iam.authenticate(world.first[0])
    world.tenants.create_principal(root, PrincipalSpec(name="bob", project="root", permissions=("sandbox.read",)))
    one = world.tenants.create_key(root, KeySpec(principal="bob"))
    two = world.tenants.create_key(root, KeySpec(principal="bob"))
    assert (await world.iam.authenticate(one.text)).permissions == {"sandbox.read"}
    await world.iam.authenticate(two.text)
    world.tenants.revoke_key(root, one.key.id)
    with pytest.raises(Unauthenticated):
        await world.iam.authenticate(one.text)
    world.tenants.remove_principal(root, "bob")
    with pytest.raises(Unauthenticated):
        await world.iam.authenticate(two.text)


async def test_a_key_ends_by_itself(world: World) -> None:
    root = await world.iam.authenticate(world.first[0])
    key = world.tenants.create_key(root, KeySpec(ttl=10.0))
    world.clock.time += 9.9
    await world.iam.authenticate(key.text)
    world.clock.time += 0.2
    with pytest.raises(Unauthenticated, match="expired"):
        await world.iam.authenticate(key.text)


async def test_delegation_does_not_grow(world: World) -> None:
    tenants, iam = world.tenants, world.iam
    root = await iam.authenticate(world.first[0])
    tenants.create_project(root, ProjectSpec(path="root/team"))
    tenants.create_project(root, ProjectSpec(path="root/other"))
    lead = PrincipalSpec(
        name="lead",
        project="root/team",
        permissions=("principal.manage", "key.manage", "sandbox.read", "project.manage"),
    )
    tenants.create_principal(root, lead)
    by = await iam.authenticate(tenants.create_key(root, KeySpec(principal="lead")).text)
    for spec in (
        PrincipalSpec(name="x", project="root/team", permissions=("sandbox.create",)),
        PrincipalSpec(name="x", project="root/other", permissions=("sandbox.read",)),
        PrincipalSpec(name="x", project="root", permissions=()),
    ):
        with pytest.raises(PermissionDenied):
            tenants.create_principal(by, spec)
    with pytest.raises(NotFound):
        tenants.create_key(by, KeySpec(principal="root"))
    tenants.create_principal(root, PrincipalSpec(name="strong", project="root/team", permissions=("sandbox.create",)))
    with pytest.raises(PermissionDenied):
        tenants.create_key(by, KeySpec(principal="strong"))
    with pytest.raises(PermissionDenied):
        tenants.create_key(by, KeySpec(permissions=("sandbox.create",)))
    narrow = await iam.authenticate(tenants.create_key(by, KeySpec(permissions=("sandbox.read",))).text)
    assert narrow.permissions == {"sandbox.read"}
    with pytest.raises(PermissionDenied):
        tenants.create_key(narrow, KeySpec())
    with pytest.raises(PermissionDenied):
        tenants.set_quota(by, ProjectSpec(path="root/team", quota=Quota()))
    assert [view.path for view in tenants.projects(root)] == ["root", "root/other", "root/team"]
    assert {view.name for view in tenants.principals(by)} == {"lead", "strong"}
    assert {view.principal for view in tenants.keys(by)} == {"lead"}
    assert len(tenants.keys(root)) == 3


async def test_quota_is_typed_idempotent_and_outlives_a_restart(world: World) -> None:
    root = await world.iam.authenticate(world.first[0])
    world.tenants.create_project(root, ProjectSpec(path="root/team", quota=Quota(sandboxes=2)))
    for _ in range(3):
        await world.iam.reserve("root/team", "s1", SPEC)
    await world.iam.reserve("root/team", "s2", SPEC)
    with pytest.raises(QuotaExceeded) as caught:
        await world.iam.reserve("root/team", "s3", SPEC)
    assert (caught.value.dimension, caught.value.quota) == ("sandboxes", 2)
    before = dict(world.iam.accounts)
    world.iam.close()
    world.restart()
    assert world.iam.accounts == before
    assert world.iam.held() == {"s1", "s2"}
    for _ in range(2):
        await world.iam.release("s1")
    await world.iam.reserve("root/team", "s3", SPEC)
    assert world.iam.accounts["root/team"].used == Amount(sandboxes=2, memory_mb=200, cpu_milli=2000, disk_mb=8192)
    with pytest.raises(NotFound):
        await world.iam.reserve("root/nowhere", "s4", SPEC)


async def test_a_full_disk_is_busy_and_holds_what_it_cannot_give_back(world: World) -> None:
    """A stop that has done its work is not to fail for it, and what was held is given back once there is room."""
    root = await world.iam.authenticate(world.first[0])
    await world.iam.reserve(root.project, "kept", SPEC)
    before = dict(world.iam.accounts)
    database = world.iam.database
    with database.begin():
        pages = database.exec_driver_sql("PRAGMA page_count").scalar()
        database.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(Busy):
        for number in range(5000):
            await world.iam.reserve(root.project, f"s{number}", SPEC)
    for name in world.iam.held() - {"kept"}:
        await world.iam.release(name)
    assert world.iam.accounts == before
    with database.begin():
        database.exec_driver_sql("PRAGMA query_only=ON")
    await world.iam.release("kept")
    assert world.iam.held() == {"kept"} and world.iam.accounts == before
    with pytest.raises(RuntimeFailure):
        await world.iam.reserve(root.project, "new", SPEC)
    with database.begin():
        database.exec_driver_sql("PRAGMA query_only=OFF")
    await world.iam.release("kept")
    assert not world.iam.held()


async def test_projects(world: World) -> None:
    tenants = world.tenants
    root = await world.iam.authenticate(world.first[0])
    tenants.set_quota(root, ProjectSpec(path="root", quota=Quota(sandboxes=10)))
    with pytest.raises(InvalidArgument):
        tenants.create_project(root, ProjectSpec(path="root/a"))
    tenants.create_project(root, ProjectSpec(path="root/a", quota=Quota(sandboxes=6)))
    with pytest.raises(Conflict):
        tenants.create_project(root, ProjectSpec(path="root/a", quota=Quota(sandboxes=1)))
    with pytest.raises(NotFound):
        tenants.create_project(root, ProjectSpec(path="root/b/c"))
    with pytest.raises(QuotaExceeded):
        tenants.create_project(root, ProjectSpec(path="root/b", quota=Quota(sandboxes=5)))
    tenants.create_project(root, ProjectSpec(path="root/a/b", quota=Quota(sandboxes=2)))
    with pytest.raises(Conflict):
        tenants.remove_project(root, "root/a")
    with pytest.raises(QuotaExceeded):
        tenants.set_quota(root, ProjectSpec(path="root/a", quota=Quota(sandboxes=1)))
    tenants.create_principal(root, PrincipalSpec(name="bob", project="root/a/b", permissions=()))
    with pytest.raises(Conflict):
        tenants.remove_project(root, "root/a/b")
    tenants.remove_principal(root, "bob")
    tenants.remove_project(root, "root/a/b")
    tenants.remove_project(root, "root/a")
    world.iam.close()
    world.restart()
    assert [(v.path, v.quota.sandboxes, v.delegated.sandboxes) for v in world.tenants.projects(root)] == [
        ("root", 10, 0)
    ]


async def test_authorise(world: World) -> None:
    root = await world.iam.authenticate(world.first[0])
    world.tenants.create_project(root, ProjectSpec(path="root/a"))
    world.tenants.create_principal(root, PrincipalSpec(name="bob", project="root/a", permissions=("sandbox.read",)))
    bob = await world.iam.authenticate(world.tenants.create_key(root, KeySpec(principal="bob")).text)
    await world.iam.authorise(bob, "sandbox.read", "root/a")
    for permission, project in [("sandbox.create", "root/a"), ("sandbox.read", "root"), ("sandbox.read", "root/ab")]:
        with pytest.raises(PermissionDenied):
            await world.iam.authorise(bob, permission, project)
    with pytest.raises(NotFound):
        await world.iam.authorise(bob, "sandbox.read", "root/a/gone")
    assert (await world.iam.me(bob)).permissions == ("sandbox.read",)


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    database = open_database(tmp_path / "iam.db")
    with database.begin():
        database.execute(tables.schema.update().values(version=99))
    database.engine.dispose()
    with pytest.raises(RuntimeFailure, match="schema 99"):
        open_database(tmp_path / "iam.db")


async def test_a_known_key_costs_microseconds(world: World) -> None:
    await world.iam.authenticate(world.first[0])
    best = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(200):
            await world.iam.authenticate(world.first[0])
        best = min(best, (time.perf_counter() - begin) / 200)
    assert best < 50e-6
