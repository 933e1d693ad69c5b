"""How chunks are put into packs, and how they are read back from them in few requests."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dsec.rules.chunkmap import MAX_PACK_BYTES, MAX_STORED_BYTES, Encoding, Place

__all__ = ["PACK_BYTES", "READ_BYTES", "READ_GAP", "Frame", "Packer", "Read", "plan_reads"]

PACK_BYTES = 16 << 20
"""A pack is closed once it has as many bytes; so it has less than MAX_PACK_BYTES."""
READ_BYTES = 8 << 20
"""Bytes of a range request at most."""
READ_GAP = 64 << 10
"""Bytes between two chunks that are rather read along than cost a request of their own."""
assert PACK_BYTES + MAX_STORED_BYTES <= MAX_PACK_BYTES


class Frame(NamedTuple):
    """A chunk as it is stored: its sha256, the encoding, and the stored bytes."""

    digest: bytes
    encoding: Encoding
    stored: bytes


class Packer:
    """Collects frames in the order given into packs of about `target` bytes; the same frames give the same packs."""

    def __init__(self, target: int = PACK_BYTES) -> None:
        self._target = target
        self._frames: list[Frame] = []
        self._bytes = 0

    def add(self, frame: Frame) -> list[Frame] | None:
        """Takes a frame; gives the frames of a pack when one is full."""
        self._frames.append(frame)
        self._bytes += len(frame.stored)
        return self.rest() if self._bytes >= self._target else None

    def rest(self) -> list[Frame]:
        """The frames that no pack has yet; none if there are none."""
        frames, self._frames, self._bytes = self._frames, [], 0
        return frames


class Read(NamedTuple):
    """One range request: `length` bytes from `offset` of a pack, and the chunks in it (number, place)."""

    pack: bytes
    offset: int
    length: int
    chunks: tuple[tuple[int, Place], ...]


def plan_reads(places: Iterable[tuple[int, Place]], limit: int = READ_BYTES, gap: int = READ_GAP) -> Iterator[Read]:
    """Range requests that cover `places`: pack by pack, neighbours together up to `limit` bytes, over gaps up to `gap`."""
    packs: dict[bytes, list[tuple[int, Place]]] = {}
    for number, place in places:
        packs.setdefault(place.pack, []).append((number, place))
    for chunks in packs.values():
        chunks.sort(key=lambda each: each[1].offset)
        run: list[tuple[int, Place]] = []
        for number, place in chunks:
            if run and not _joins(run, place, limit, gap):
                yield _read(run)
                run = []
            run.append((number, place))
        if run:
            yield _read(run)


def _joins(run: Sequence[tuple[int, Place]], place: Place, limit: int, gap: int) -> bool:
    last = run[-1][1]
    return place.offset <= last.offset + last.length + gap and place.offset + place.length - run[0][1].offset <= limit


def _read(run: list[tuple[int, Place]]) -> Read:
    first = run[0][1]
    # Hostile places may overlap, so that the last is not the one that ends last.
    end = max(place.offset + place.length for _, place in run)
    return Read(first.pack, first.offset, end - first.offset, tuple(run))
