"""Placement: what is chosen fits; more room never turns yes to no; load spreads."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model.errors import Busy, Unsupported
from dsec.model.plan import Capabilities
from dsec.model.spec import SandboxSpec
from dsec.rules.placement import Candidate, choose, fits, with_recent

MIB = 1 << 20
CONTAINER = (Capabilities(backend="container", available=True),)
candidate = st.builds(
    Candidate,
    edge=st.integers(0, 9),
    healthy=st.booleans(),
    backends=st.sampled_from(
        [CONTAINER, (), (Capabilities(backend="container", available=False, why_not={"x": "no btrfs"}),)]
    ),
    sandboxes=st.integers(0, 4),
    sandbox_capacity=st.integers(0, 4),
    memory_bytes=st.integers(0, 8).map(lambda n: n * 512 * MIB),
    memory_committed=st.integers(0, 8).map(lambda n: n * 512 * MIB),
)
candidates = st.lists(candidate, max_size=6, unique_by=lambda c: c.edge)
spec = st.integers(1, 5).map(lambda n: SandboxSpec(container_image="x", memory_limit_mb=n * 512))
nonce = st.integers(0, 2**64 - 1)


def answer(edges: list[Candidate], spec: SandboxSpec, nonce: int, k: int = 2) -> int | None:
    try:
        return choose(edges, spec, k=k, nonce=nonce, retry_after=1.0)
    except (Busy, Unsupported):
        return None


@given(candidates, spec, nonce)
def test_what_is_chosen_fits(edges: list[Candidate], spec: SandboxSpec, nonce: int) -> None:
    chosen = answer(edges, spec, nonce)
    able = [c for c in edges if c.backends == CONTAINER and fits(c, spec)]
    if chosen is None:
        assert not able
    else:
        assert chosen in {c.edge for c in able}


@given(candidates, spec, nonce, st.data())
def test_more_room_never_turns_yes_to_no(
    edges: list[Candidate], spec: SandboxSpec, nonce: int, data: st.DataObject
) -> None:
    if answer(edges, spec, nonce) is None:
        return
    index = data.draw(st.integers(0, len(edges) - 1))
    old = edges[index]
    larger = msgspec.structs.replace(
        old, memory_bytes=old.memory_bytes + 512 * MIB, sandbox_capacity=old.sandbox_capacity + 1, healthy=True
    )
    assert answer([*edges[:index], larger, *edges[index + 1 :]], spec, nonce) is not None


@given(candidates, spec, nonce)
def test_with_k_of_all_the_least_loaded_is_taken(edges: list[Candidate], spec: SandboxSpec, nonce: int) -> None:
    chosen = answer(edges, spec, nonce, k=len(edges) + 1)
    if chosen is not None:
        loads = {c.edge: c.load for c in edges if c.backends == CONTAINER and fits(c, spec)}
        assert loads[chosen] == min(loads.values())


def make(edge: int, **changes: object) -> Candidate:
    empty = Candidate(
        edge=edge,
        healthy=True,
        backends=CONTAINER,
        sandboxes=0,
        sandbox_capacity=1000,
        memory_bytes=1000 * 512 * MIB,
        memory_committed=0,
    )
    return msgspec.structs.replace(empty, **changes)


def test_own_placements_spread_before_the_next_report() -> None:
    asked = SandboxSpec(container_image="x", memory_limit_mb=512)
    placed: dict[int, list[int]] = {n: [] for n in range(8)}
    for turn in range(400):
        edges = [with_recent(make(n), sizes) for n, sizes in placed.items()]
        chosen = choose(edges, asked, k=2, nonce=(turn * 0x9E3779B97F4A7C15) % 2**64, retry_after=1.0)
        placed[chosen].append(512 * MIB)
    counts = sorted(len(sizes) for sizes in placed.values())
    assert counts[0] >= 45 and counts[-1] <= 55


def test_refusals_are_named() -> None:
    asked = SandboxSpec(container_image="x")
    with pytest.raises(Unsupported, match="no btrfs"):
        choose(
            [make(1, backends=(Capabilities(backend="container", available=False, why_not={"pool": "no btrfs"}),))],
            asked,
            k=2,
            nonce=0,
            retry_after=1.0,
        )
    with pytest.raises(Unsupported, match="network"):
        choose([make(1)], SandboxSpec(container_image="x", network_rules={"pypi": True}), k=2, nonce=0, retry_after=1.0)
    with pytest.raises(Unsupported, match="memory_limit_mb"):
        choose([make(1, memory_bytes=MIB)], asked, k=2, nonce=0, retry_after=1.0)
    with pytest.raises(Busy) as caught:
        choose([make(1, sandboxes=1000)], asked, k=2, nonce=0, retry_after=2.5)
    assert caught.value.retry_after == 2.5
    with pytest.raises(Busy):
        choose([], asked, k=2, nonce=0, retry_after=1.0)
