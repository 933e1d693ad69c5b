"""Maps, known segments and packs: what is written is read back; what is not written so is refused; reads cover what is asked."""

import hashlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.model.errors import ImageUnavailable
from dsec.rules.chunkmap import MAX_PACK_BYTES, MAX_STORED_BYTES, ChunkMap, Encoding, Place, encode_map
from dsec.rules.known import (
    MAX_SEGMENT_BYTES,
    decode_segment,
    encode_segment,
    find_places,
    shard_names,
    shard_of,
    to_merge,
)
from dsec.rules.packs import READ_BYTES, READ_GAP, Frame, Packer, plan_reads

# A busy machine draws slowly; that is no fault of what is tested.
patient = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
packs = st.integers(0, 5).map(lambda n: hashlib.sha256(bytes([n])).digest())
places = st.builds(
    Place,
    packs,
    st.integers(0, MAX_PACK_BYTES - MAX_STORED_BYTES),
    st.integers(1, MAX_STORED_BYTES),
    st.sampled_from(Encoding),
)
digests = st.integers(0, 1 << 16).map(lambda n: hashlib.sha256(n.to_bytes(4, "big")).digest())


@patient
@given(st.lists(st.none() | places, max_size=40))
def test_a_map_says_what_was_put_in(given_places: list[Place | None]) -> None:
    raw = encode_map(given_places)
    read = ChunkMap(raw, len(given_places))
    assert [read.place(n) for n in range(len(read))] == given_places
    with pytest.raises(ImageUnavailable):
        ChunkMap(raw, len(given_places) + 1)
    with pytest.raises(ImageUnavailable):
        ChunkMap(raw + b"\0", len(given_places))


@patient
@given(st.lists(st.none() | places, min_size=1, max_size=10), st.data())
def test_a_damaged_map_is_refused_or_within_the_bounds(given_places: list[Place | None], data: st.DataObject) -> None:
    raw = bytearray(encode_map(given_places))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = ChunkMap(bytes(raw[: data.draw(st.integers(0, len(raw)))]), len(given_places))
    except ImageUnavailable:
        return
    for number in range(len(read)):
        place = read.place(number)
        if place is not None:
            assert 0 < place.length <= MAX_STORED_BYTES and place.offset + place.length <= MAX_PACK_BYTES


@patient
@given(st.dictionaries(digests, places, max_size=30), st.sets(digests, max_size=10), st.integers(0, 8))
def test_a_segment_says_what_was_put_in(known: dict[bytes, Place], wanted: set[bytes], bits: int) -> None:
    raw = encode_segment(known)
    assert dict(decode_segment(raw)) == known
    assert [digest for digest, _ in decode_segment(raw)] == sorted(known)
    assert find_places(raw, wanted | set(known)) == known
    assert find_places(raw, wanted) == {digest: known[digest] for digest in wanted & set(known)}
    assert all(shard_of(digest, bits) in shard_names(bits) for digest in known)


@patient
@given(st.dictionaries(digests, places, min_size=1, max_size=5), st.data())
def test_a_damaged_segment_is_refused_or_within_the_bounds(known: dict[bytes, Place], data: st.DataObject) -> None:
    raw = bytearray(encode_segment(known))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for broken in (bytes(raw), cut):
        try:
            found = list(decode_segment(broken))
        except ImageUnavailable:
            continue
        assert all(place.offset + place.length <= MAX_PACK_BYTES for _, place in found)


@patient
@given(st.lists(st.tuples(st.text("abcdef", min_size=4, max_size=8), st.integers(64, MAX_SEGMENT_BYTES)), max_size=60))
def test_merging_ends_and_stays_within_the_bound(segments: list[tuple[str, int]]) -> None:
    left, rounds = dict(segments), 0
    while chosen := to_merge(list(left.items())):
        total = sum(left.pop(name) for name in chosen)
        assert len(chosen) >= 8 and total <= MAX_SEGMENT_BYTES
        left[f"m{rounds}"] = total
        rounds += 1
        assert rounds < 60


frames = st.lists(
    st.integers(1, 4000).map(lambda n: Frame(hashlib.sha256(struct.pack("I", n)).digest(), Encoding.RAW, bytes(n)))
)


@patient
@given(frames, st.integers(1, 9000))
def test_packs_hold_every_frame_once_in_order(given_frames: list[Frame], target: int) -> None:
    packer, packed = Packer(target), []
    for frame in given_frames:
        if (full := packer.add(frame)) is not None:
            packed.append(full)
    packed.append(packer.rest())
    assert [frame for pack in packed for frame in pack] == given_frames
    assert packer.rest() == []
    for pack in packed[:-1]:
        total = sum(len(frame.stored) for frame in pack)
        assert target <= total < target + 4000


@patient
@given(st.lists(places, max_size=60), st.integers(MAX_STORED_BYTES, READ_BYTES), st.integers(0, READ_GAP))
def test_reads_cover_each_chunk_once_within_the_bounds(given_places: list[Place], limit: int, gap: int) -> None:
    asked = list(enumerate(given_places))
    reads = list(plan_reads(asked, limit, gap))
    assert sorted(chunk for read in reads for chunk in read.chunks) == sorted(asked)
    for read in reads:
        assert read.length <= limit
        for _, place in read.chunks:
            assert place.pack == read.pack
            assert read.offset <= place.offset and place.offset + place.length <= read.offset + read.length


def test_neighbours_are_read_together() -> None:
    pack = bytes(32)
    near = [(n, Place(pack, 1000 * n, 900, Encoding.ZSTD)) for n in range(10)]
    far = (10, Place(pack, 9900 + READ_GAP + 1, 900, Encoding.ZSTD))
    assert [len(read.chunks) for read in plan_reads([*near, far])] == [10, 1]
