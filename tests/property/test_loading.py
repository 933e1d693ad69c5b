"""Loading on demand, as rules: the path chosen, profiles merged over runs, what leaves the cache, counters that begin anew."""

import random
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument, Unsupported
from dsec.model.loading import Ladder, LayerCache, LayerReads, LoadMode, LoadPath, Mechanism, Profile, Way
from dsec.rules.eviction import choose_evictions, taken
from dsec.rules.loading import Place, choose_path, grown, sum_reads
from dsec.rules.profiles import check_profile, first_profile, merge_profiles, merge_run, ranges_of

RUN = st.lists(st.integers(0, 40), max_size=30)
LAYER = "sha256:" + "a" * 64


def merged(runs: list[list[int]]) -> Profile | None:
    profile = None
    for run in runs:
        profile = merge_run(profile, LAYER, run)
    return profile


@given(RUN)
def test_the_profile_of_one_run_is_its_order(run: list[int]) -> None:
    profile = first_profile(LAYER, run)
    assert profile.order == tuple(dict.fromkeys(run))
    assert check_profile(profile, LAYER, 41) is profile


@given(st.lists(RUN.filter(bool), min_size=1, max_size=4))
def test_the_order_of_runs_does_not_matter_and_none_is_lost(runs: list[list[int]]) -> None:
    found = [merged(list(order)) for order in permutations(runs)]
    assert found[0] is not None and all(other == found[0] for other in found)
    assert set(found[0].order) == {chunk for run in runs for chunk in run}
    assert merge_run(found[0], LAYER, []) is found[0]


@given(st.lists(RUN.filter(bool), min_size=1, max_size=5))
def test_what_half_of_the_runs_need_comes_before_what_fewer_do(runs: list[list[int]]) -> None:
    profile = merged(runs)
    assert profile is not None
    counts = {chunk: sum(chunk in run for run in runs) for chunk in profile.order}
    assert dict(zip(profile.order, profile.seen, strict=True)) == counts
    needed = [2 * counts[chunk] >= len(runs) for chunk in profile.order]
    assert needed == sorted(needed, reverse=True)
    assert profile.version == len(runs) and profile.runs == len(runs)


@given(st.permutations(range(20)), st.integers(2, 6))
def test_equal_runs_keep_their_order(run: list[int], times: int) -> None:
    profile = merged([list(run)] * times)
    assert profile is not None and profile.order == tuple(run)


@given(RUN, RUN)
def test_a_profile_is_of_one_layer(one: list[int], other: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        merge_profiles(first_profile(LAYER, one), first_profile("sha256:" + "b" * 64, other))


@pytest.mark.parametrize(
    "change",
    [
        {"layer": "sha256:" + "b" * 64}, {"version": 0}, {"runs": 0}, {"order": (1, 1, 2)}, {"order": (1, 2, 10)},
        {"order": (1, 2, -1)}, {"seen": (1, 1)}, {"seen": (1, 1, 9)}, {"rank_sums": (0, 1, -2)}, {"rank_sums": (0, 1)},
    ],
)  # fmt: skip
def test_a_profile_of_a_store_is_checked(change: dict[str, object]) -> None:
    profile = msgspec.structs.replace(first_profile(LAYER, [1, 2, 3]), **change)
    with pytest.raises(InvalidArgument):
        check_profile(profile, LAYER, 10)


@given(RUN, st.integers(0, 3))
def test_ranges_name_each_chunk_in_order_and_no_more_than_gaps(run: list[int], gap: int) -> None:
    order = list(dict.fromkeys(run))
    ranges = ranges_of(order, gap)
    named = [chunk for first, end in ranges for chunk in range(first, end)]
    assert all(first < end for first, end in ranges)
    if gap == 0:
        assert named == order
    else:
        assert set(order) <= set(named)
        assert len(named) <= len(order) * (gap + 1)


CACHES = st.lists(
    st.builds(
        LayerCache,
        layer=st.integers(0, 10**6).map(str),
        bytes_here=st.integers(0, 1000),
        data_here=st.integers(0, 1000),
        used=st.floats(0, 100),
        evictable=st.booleans(),
        live=st.booleans(),
        pinned=st.booleans(),
        pulled=st.booleans(),
    ).map(lambda each: msgspec.structs.replace(each, bytes_here=each.bytes_here + each.data_here)),
    max_size=12,
    unique_by=lambda each: each.layer,
)
MARKS = st.tuples(st.integers(0, 8000), st.integers(0, 8000)).map(lambda pair: (max(pair), min(pair)))


@given(CACHES, MARKS)
def test_eviction_spares_what_is_needed_and_stops_at_the_low_mark(
    layers: list[LayerCache], marks: tuple[int, int]
) -> None:
    high, low = marks
    chosen = choose_evictions(layers, high, low)
    if taken(layers) < high:
        assert chosen == []
    by_name = {layer.layer: layer for layer in layers}
    for each in chosen:
        layer = by_name[each.layer]
        assert layer.evictable and not layer.live and not layer.pinned
        assert not (each.forget and layer.pulled)
    rest = taken(layers) - sum(each.frees for each in chosen)
    assert rest >= 0
    spared = [
        layer for layer in layers
        if layer.evictable and not layer.live and not layer.pinned and layer.layer not in {e.layer for e in chosen}
        and layer.data_here
    ]  # fmt: skip
    assert taken(layers) < high or rest <= low or not spared
    # Each was needed: without the last one the low mark is not reached.
    if chosen:
        assert rest + chosen[-1].frees > low


@given(CACHES, MARKS)
def test_the_least_recently_used_go_first(layers: list[LayerCache], marks: tuple[int, int]) -> None:
    chosen = [each for each in choose_evictions(layers, *marks) if not each.forget]
    used = {layer.layer: layer.used for layer in layers}
    gone = {each.layer for each in chosen}
    stays = [
        layer for layer in layers
        if layer.evictable and not (layer.live or layer.pinned) and layer.data_here and layer.layer not in gone
    ]  # fmt: skip
    if gone and stays:
        assert max(used[name] for name in gone) <= min(layer.used for layer in stays)


@given(CACHES, MARKS)
def test_eviction_rests_between_the_marks(layers: list[LayerCache], marks: tuple[int, int]) -> None:
    """Hysteresis: what was evicted down to the low mark is not looked at again before the high mark."""
    high, low = marks
    if low >= high:
        return
    gone: dict[str, int] = {}
    for each in choose_evictions(layers, high, low):
        gone[each.layer] = gone.get(each.layer, 0) + each.frees
    after = [
        msgspec.structs.replace(
            layer, bytes_here=layer.bytes_here - gone.get(layer.layer, 0), data_here=0 if layer.layer in gone else layer.data_here
        )
        for layer in layers
    ]  # fmt: skip
    if taken(after) <= low:
        assert choose_evictions(after, high, low) == []


@given(
    st.sampled_from(LoadMode), st.sampled_from(Mechanism), st.fixed_dictionaries({path: st.booleans() for path in LoadPath}),
    st.sampled_from(["file:///srv/store", "s3://bucket/a", "oci://host/b"]), st.sampled_from(["", "/srv/store/v2/plain/ab"]),
)  # fmt: skip
def test_the_path_is_what_was_asked_or_a_reason(
    asked: LoadMode, mechanism: Mechanism, host: dict[LoadPath, bool], url: str, plain: str
) -> None:
    ladder = Ladder(ways=tuple(Way(path=path, ok=ok, why="" if ok else f"no {path} here") for path, ok in host.items()))
    catching = {
        Mechanism.AUTO: [LoadPath.FANOTIFY, LoadPath.FUSE],
        Mechanism.FANOTIFY: [LoadPath.FANOTIFY],
        Mechanism.FUSE: [LoadPath.FUSE],
    }[mechanism]
    expected = {
        LoadMode.WHOLE: [LoadPath.WHOLE],
        LoadMode.SHARED: [LoadPath.SHARED] if host[LoadPath.SHARED] and url.startswith("file:") and plain else [],
        LoadMode.ON_DEMAND: [path for path in catching if host[path]],
    }[asked]
    try:
        assert choose_path(asked, mechanism, ladder, Place(url=url, plain=plain)) is expected[0]
    except Unsupported as refused:
        assert expected == []
        assert refused.detail.partition(": ")[2]


COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(COUNTS)
def test_counters_that_begin_anew_are_added_up(steps: list[int]) -> None:
    """After a restart all that is counted is new, as far as it can be told: a count that is past the old one already looks like growth."""
    restarts = random.Random(sum(steps))
    now, truth = 0, 0
    total, before = LayerReads(size=1), None
    for step in steps:
        now = step if restarts.random() < 0.3 and step < now else now + step
        truth += step
        reading = LayerReads(size=1, errors=now, wait_us_max=step)
        total = sum_reads(total, grown(before, reading))
        before = reading
    assert total.errors == truth
    assert total.wait_us_max == max(steps)
