"""A server killed at each place, on its way up, at work and on the way down; each time it comes back and keeps its word."""

import asyncio
import json
import random
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

import dsec
from dsec.testing.chaos import SETTINGS, until_death
from dsec.testing.failpoints import FailingNode, declared
from dsec.testing.node import NodeFailed
from dsec.testing.witness import Faults, Witness
from recovery.conftest import with_client
from recovery.scenario import scenario

pytestmark = pytest.mark.root

SAMPLE = 6
LIVING = 3
# Declared places that a server never comes to, and why.
ELSEWHERE = {
    "native.erofs_image": "only an import makes an image, and that is a command of its own",
    "native.assemble": "only an import's check of a layer and benchmarks assemble without a launch",
    "native.subvolume_snapshot": "no operation of a server takes a snapshot yet",
}
NETWORKED = "no sandbox of this scenario has a network: tests/network/test_fabric_life.py ends servers that have some"
ELSEWHERE |= dict.fromkeys(
    [f"journal.{name}" for name in ("group_number", "set_network")]
    + [
        f"native.{name}"
        for name in (
            "PinnedMap", "PolicyHook", "RouterLinks", "exchange_in", "make_netns", "run_in", "socket_in", "this_netns",
        )
    ],
    NETWORKED,
)  # fmt: skip


async def _settled(witness: Witness, client: dsec.DSecClient) -> None:
    """As many sandboxes as there should be: each kill may leave one more, and each counts without end."""
    for _ in range(LIVING - len(witness.subjects)):
        await witness.create(client)
    for subject in list(witness.subjects.values())[: max(0, len(witness.subjects) - LIVING)]:
        await witness.stop(subject)


async def _rejoined(witness: Witness, client: dsec.DSecClient) -> None:
    await witness.rejoin(client)
    await _settled(witness, client)


async def _all(witness: Witness, client: dsec.DSecClient) -> None:
    await witness.rejoin(client)
    await scenario(witness, client)


def _killed_at(node: FailingNode, witness: Witness, place: str) -> bool:
    """Whether the server died at `place` while the scenario ran."""
    died = False

    async def attempt(client: dsec.DSecClient) -> None:
        nonlocal died
        await witness.rejoin(client)
        node.arm(place)
        died = await until_death(node, scenario(witness, client))

    with_client(node, attempt)
    return died


def _came_back(node: FailingNode, witness: Witness, place: str) -> None:
    node.restart()
    try:
        with_client(node, witness.verify)
        with_client(node, lambda client: _rejoined(witness, client))
    except Faults as faults:
        pytest.fail(f"after a kill at {place}: {faults}\n{node.log}")


def _traced(node: FailingNode, witness: Witness) -> tuple[set[str], set[str]]:
    """Places met on the way up, with sandboxes to take over, and those met by the scenario."""
    with_client(node, lambda client: _settled(witness, client))
    node.restart()
    up = node.reached()
    with_client(node, witness.verify)
    with_client(node, lambda client: _all(witness, client))
    now = node.reached()
    return set(up), {name for name, count in now.items() if count > up.get(name, 0)}


def _strike(node: FailingNode, witness: Witness, up: Iterable[str], at_work: Iterable[str]) -> list[str]:
    """Kills at each place; those that were not met again."""
    missed = []
    for place in at_work:
        if _killed_at(node, witness, place):
            _came_back(node, witness, place)
        else:
            missed.append(place)
    for place in up:
        node.kill()
        try:
            node.start_at(place)
            missed.append(place)
        except NodeFailed:
            _came_back(node, witness, place)
    return missed


@pytest.mark.timeout(300)
def test_a_server_killed_at_places_drawn_by_lot_keeps_its_word(node: FailingNode, witness: Witness) -> None:
    up, at_work = _traced(node, witness)
    draw = random.Random(witness.random.random())
    launch = [name for name in declared() if name.startswith("native.launch.at.")]
    chosen = draw.sample(sorted(at_work), SAMPLE) + draw.sample(launch, 2)
    _strike(node, witness, draw.sample(sorted(up), 2), chosen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_killed_at_every_place_keeps_its_word(node: FailingNode, witness: Witness) -> None:
    up, at_work = _traced(node, witness)
    launch = {name for name in declared() if name.startswith("native.launch.at.")}
    missed = _strike(node, witness, sorted(up), sorted(at_work | launch))
    assert missed == []


def _first_start(state: Path) -> set[str]:
    node = FailingNode(state, **SETTINGS)
    with node:
        return set(node.reached())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_declared_place_is_met(node: FailingNode, witness: Witness, tmp_path: Path) -> None:
    up, at_work = _traced(node, witness)
    met = up | at_work | _first_start(tmp_path / "n") | _down(node, tmp_path / "trace")
    shutil.rmtree(tmp_path / "n")
    wanted = {name for name in declared() if not name.startswith("native.launch.at.")}
    missing = {name for name in wanted - met if name.rpartition(".")[0] not in ELSEWHERE}
    assert missing == set()
    stale = {name for name in ELSEWHERE if f"{name}.before" in met}
    assert stale == set(), "these are met after all"


def _down(node: FailingNode, trace: Path) -> set[str]:
    """Places met by `dsec down` after the server was killed."""
    node.kill()
    assert node.dsec_at("", "down", "--state", str(node.state), trace=trace) == 0
    return set(json.loads(trace.read_bytes()))


def _sandboxes(node: FailingNode, witness: Witness) -> None:
    node.restart()
    witness.subjects.clear()

    async def two(client: dsec.DSecClient) -> None:
        await asyncio.gather(witness.create(client), witness.create(client))

    with_client(node, two)
    node.kill()


def _down_at(node: FailingNode, witness: Witness, places: Iterable[str]) -> None:
    for place in places:
        _sandboxes(node, witness)
        assert node.dsec_at(place, "down", "--state", str(node.state)) == -signal.SIGKILL, place
        assert node.dsec_at("", "down", "--state", str(node.state)) == 0
        left = {where: names for where, names in witness.traces().items() if names}
        assert left == {}, f"down was killed at {place}"


@pytest.mark.timeout(300)
def test_a_down_killed_at_places_drawn_by_lot_leaves_nothing_when_repeated(
    node: FailingNode, witness: Witness, tmp_path: Path
) -> None:
    _sandboxes(node, witness)
    places = sorted(_down(node, tmp_path / "trace"))
    _down_at(node, witness, witness.random.sample(places, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_down_killed_at_every_place_leaves_nothing_when_repeated(
    node: FailingNode, witness: Witness, tmp_path: Path
) -> None:
    _sandboxes(node, witness)
    _down_at(node, witness, sorted(_down(node, tmp_path / "trace")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_first_start_killed_at_every_place_is_begun_again(tmp_path: Path, rootfs: Path) -> None:
    places = sorted(_first_start(tmp_path / "n"))
    shutil.rmtree(tmp_path / "n")
    for number, place in enumerate(places):
        node = FailingNode(tmp_path / f"{number}", **SETTINGS)
        with pytest.raises(NodeFailed):
            node.start_at(place)
        with node:
            node.dsec("image", "import", "--state", str(node.state), "box", str(rootfs))
            with_client(node, _full_disk)
        shutil.rmtree(node.state)


async def _full_disk(client: dsec.DSecClient) -> None:
    """The disk limit holds: quotas were turned on by one of the two starts."""
    box = await client.run_container(dsec.DSecContainerRunArgs(container_image="box", disk_limit_mb=16))
    result = await box.run_shell("cat /dev/zero > /root/x")
    assert result.outcome == "disk_limit", result
    await box.stop()
