"""Cutting data into chunks: they cover it, keep their bounds, begin where contents begin, and change only near a change."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.model.errors import InvalidArgument
from dsec.rules.chunks import BLOCK_BYTES, MAX_CHUNK_BYTES, Cutter, check_target

TARGETS = st.sampled_from([16 << 10, 32 << 10, 64 << 10, 128 << 10])
SIZES = st.one_of(st.integers(1, 9000), st.integers(1, 300_000), st.sampled_from([4096, 32 << 10, 64 << 10, 1 << 20]))


def hashed(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def cut(sizes: list[int], target: int, names: list[int] | None = None) -> list[int]:
    cutter = Cutter(target)
    for size, name in zip(sizes, names or range(len(sizes)), strict=True):
        cutter.add(size, hashed(name))
    return cutter.finish()


def starts(lengths: list[int]) -> set[int]:
    found, at = {0}, 0
    for length in lengths:
        at += length
        found.add(at)
    return found


def blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


@settings(max_examples=200, deadline=None)
@given(st.lists(SIZES, max_size=60), TARGETS)
def test_chunks_cover_the_data_within_their_bounds(sizes: list[int], target: int) -> None:
    lengths = cut(sizes, target)
    assert sum(lengths) == sum(map(blocks, sizes))
    assert all(0 < length * BLOCK_BYTES <= min(2 * target, MAX_CHUNK_BYTES) for length in lengths)
    cuts, at = starts(lengths), 0
    for size in sizes:
        end = at + blocks(size)
        inside = sorted(c for c in cuts if at < c < end)
        if size >= target:
            # A large content has chunks of its own, cut every target.
            each = target // BLOCK_BYTES
            assert at in cuts and end in cuts and inside == list(range(at + each, end, each))
        else:
            assert not inside
        at = end


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 12_000), min_size=30, max_size=60), st.integers(0, 99), TARGETS)
def test_groups_are_about_the_target(sizes: list[int], seed: int, target: int) -> None:
    names = [random.Random(seed * 1000 + n).randrange(1 << 40) for n in range(len(sizes))]
    lengths = cut(sizes, target, names)
    assert all(length * BLOCK_BYTES >= target // 4 for length in lengths[:-1])
    whole = sum(lengths) * BLOCK_BYTES
    assert len(lengths) <= 4 * whole / target + 1


def test_one_more_file_changes_few_chunks() -> None:
    dice = random.Random(3)
    names = list(range(4000))
    sizes = {n: dice.choice([300, 2000, 5000, 9000, 20_000, 50_000]) for n in (*names, 4000)}
    target = 32 << 10

    def chunks(order: list[int]) -> set[bytes]:
        whole = [bytes([n & 255, n >> 8]) * blocks(sizes[n]) for n in order]
        raw, found, at = b"".join(whole), set(), 0
        for length in cut([sizes[n] for n in order], target, order):
            found.add(raw[2 * at : 2 * (at + length)])
            at += length
        return found

    before = chunks(names)
    changed = []
    for _ in range(10):
        where = dice.randrange(len(names))
        changed.append(len(chunks([*names[:where], 4000, *names[where:]]) - before))
        changed.append(len(chunks([*names[:where], *names[where + 1 :]]) - before))
    assert sum(changed) / len(changed) < 4 and max(changed) < 16


def test_groups_have_the_target_on_average() -> None:
    dice = random.Random(5)
    for target in (16 << 10, 32 << 10, 64 << 10):
        lengths = cut([dice.choice([300, 2000, 5000, 9000, 12_000]) for _ in range(5000)], target)
        assert 0.75 * target < sum(lengths) * BLOCK_BYTES / len(lengths) < 1.3 * target


@pytest.mark.parametrize("target", [0, -1, 4096, 20_000, 256 << 10, (32 << 10) + 1])
def test_a_target_that_cannot_be_is_refused(target: int) -> None:
    with pytest.raises(InvalidArgument):
        check_target(target)
