"""Output joined on its way: what arrives is what was sent, in order, in few pieces, and others have turns in between."""

import asyncio
from collections import deque
from types import TracebackType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.output import joined
from dsec.model import aether as wire
from dsec.model.errors import SandboxLost
from dsec.ports.agent import Frame


class Held:
    """A channel whose frames have all come already; then its sandbox is lost."""

    def __init__(self, frames: list[Frame]) -> None:
        self._frames = deque(frames)

    @property
    def answered(self) -> bool:
        return bool(self._frames)

    async def receive(self) -> Frame:
        if not self._frames:
            raise SandboxLost("gone")
        return self._frames.popleft()

    async def __aenter__(self) -> "Held":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._frames.clear()

    async def send(self, data: bytes) -> None: ...
    async def end_of_input(self) -> None: ...
    def frames(self):  # type: ignore[no-untyped-def]
        raise NotImplementedError


async def taken(frames: list[Frame]) -> tuple[list[Frame], int]:
    """All that `joined` gives, and how many turns another task had meanwhile."""
    got: list[Frame] = []
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    with pytest.raises(SandboxLost):
        async for frame in joined(Held(frames)):
            got.append(frame)
    beside.cancel()
    return got, turns


PIECE = st.tuples(st.sampled_from([wire.FRAME_STDOUT, wire.FRAME_STDERR]), st.binary(max_size=70_000))
LOST = st.builds(wire.LostReply, stream=st.just("stdout"), offset=st.integers(0, 9))


@given(st.lists(PIECE | LOST, max_size=30))
def test_nothing_is_lost_added_or_moved(frames: list[Frame]) -> None:
    def flat(some: list[Frame]) -> list[object]:
        found: list[object] = []
        for frame in some:
            if not isinstance(frame, tuple):
                found.append(frame)
            elif found and isinstance(found[-1], tuple) and found[-1][0] == frame[0]:
                found[-1] = (frame[0], found[-1][1] + frame[1])
            else:
                found.append(frame)
        return found

    got, _ = asyncio.run(taken(frames))
    assert flat(got) == flat(frames)
    assert all(len(frame[1]) < (1 << 17) + 70_000 for frame in got if isinstance(frame, tuple))


async def test_a_flood_of_lines_costs_few_turns_and_leaves_some() -> None:
    lines: list[Frame] = [(wire.FRAME_STDOUT, b"y\n" * 2048)] * 512
    got, turns = await taken(lines)
    assert len(got) == 512 * 4096 >> 17
    assert turns >= len(got)
