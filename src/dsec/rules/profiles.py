"""Profiles of first touches: one run's order, merged over runs, and the ranges that a prefetch asks for.

A chunk's place is its mean rank over the runs that touched it. Chunks that at least half of the runs touched come first: what a
single run went astray for does not delay what all need. The order in which runs are merged does not matter.
"""

from collections.abc import Iterable, Sequence

from dsec.model.errors import InvalidArgument
from dsec.model.loading import ChunkRange, Profile

__all__ = ["MAX_CHUNKS", "check_profile", "first_profile", "merge_profiles", "merge_run", "ranges_of"]

MAX_CHUNKS = 1 << 20
_MAX_RUNS = 1 << 30


def first_profile(layer: str, touched: Sequence[int]) -> Profile:
    """The profile of one run; `touched`: chunks in the order of their touches, repeated ones count once. At most MAX_CHUNKS are kept."""
    order = tuple(dict.fromkeys(touched))[:MAX_CHUNKS]
    return Profile(
        layer=layer, version=1, runs=1, order=order, seen=(1,) * len(order), rank_sums=tuple(range(len(order)))
    )


def merge_run(profile: Profile | None, layer: str, touched: Sequence[int]) -> Profile:
    """`profile` with one more run. A run that touched nothing of the layer changes nothing. Raises InvalidArgument for another layer's profile."""
    run = first_profile(layer, touched)
    if profile is None:
        return run
    return profile if not run.order and profile.layer == layer else merge_profiles(profile, run)


def merge_profiles(one: Profile, other: Profile) -> Profile:
    """Both together: the runs add up, the version is one more than the higher. Raises InvalidArgument for profiles of different layers."""
    if one.layer != other.layer:
        raise InvalidArgument(f"a profile of {other.layer} says nothing of {one.layer}", field="layer")
    seen: dict[int, int] = {}
    sums: dict[int, int] = {}
    for profile in (one, other):
        for chunk, count, ranks in zip(profile.order, profile.seen, profile.rank_sums, strict=True):
            seen[chunk] = seen.get(chunk, 0) + count
            sums[chunk] = sums.get(chunk, 0) + ranks
    runs = one.runs + other.runs
    order = sorted(seen, key=lambda chunk: (2 * seen[chunk] < runs, sums[chunk] / seen[chunk], chunk))[:MAX_CHUNKS]
    return Profile(
        layer=one.layer,
        version=max(one.version, other.version) + 1,
        runs=runs,
        order=tuple(order),
        seen=tuple(seen[chunk] for chunk in order),
        rank_sums=tuple(sums[chunk] for chunk in order),
    )


def check_profile(profile: Profile, layer: str, chunks: int) -> Profile:
    """`profile` itself where it can be one of `layer`, which has `chunks` chunks. Raises InvalidArgument: it may come from a store."""
    order = profile.order
    fits = (
        profile.layer == layer
        and profile.version >= 1
        and 1 <= profile.runs <= _MAX_RUNS
        and len(order) == len(profile.seen) == len(profile.rank_sums) <= MAX_CHUNKS
        and len(set(order)) == len(order)
        and all(0 <= chunk < chunks for chunk in order)
        and all(1 <= count <= profile.runs for count in profile.seen)
        and all(0 <= ranks <= count * MAX_CHUNKS for ranks, count in zip(profile.rank_sums, profile.seen, strict=True))
    )
    if not fits:
        raise InvalidArgument(f"what is kept as a profile of {layer} is none", field="profile")
    return profile


def ranges_of(order: Iterable[int], gap: int = 0) -> list[ChunkRange]:
    """`order` as runs of neighbours, in its own order: a chunk that follows the one before, or leaves out at most `gap` after it, makes
    the range longer. No chunk outside of `order` is named unless it lies in such a gap."""
    found: list[list[int]] = []
    for chunk in order:
        if found and 0 <= chunk - found[-1][1] <= gap:
            found[-1][1] = chunk + 1
        else:
            found.append([chunk, chunk + 1])
    return [(first, end) for first, end in found]
