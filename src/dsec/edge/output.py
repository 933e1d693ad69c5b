"""Output of commands on its way: kept within a limit, or passed on in pieces that are worth one."""

import asyncio
from collections.abc import AsyncIterator

from dsec.ports.agent import Channel, Frame

__all__ = ["Clipped", "joined"]

_PIECE = 1 << 17


async def joined(channel: Channel) -> AsyncIterator[Frame]:
    """Frames of a channel, output that is there already joined up to 128 KiB and a frame: a flood of short lines costs few turns,
    and other requests have theirs after each piece. Raises what `receive` raises."""
    waiting: Frame | None = None
    while True:
        frame, waiting = waiting if waiting is not None else await channel.receive(), None
        if type(frame) is tuple:
            parts, size = [frame[1]], len(frame[1])
            while size < _PIECE and channel.answered:
                more = await channel.receive()
                if type(more) is not tuple or more[0] != frame[0]:
                    waiting = more
                    break
                parts.append(more[1])
                size += len(more[1])
            frame = (frame[0], b"".join(parts))
        yield frame
        await asyncio.sleep(0)


class Clipped:
    """Holds at most `limit` bytes of what is added, and a little more while it is being added to."""

    __slots__ = ("_head", "_head_most", "_tail", "_tail_most", "total")

    def __init__(self, limit: int) -> None:
        self._head_most = limit - limit // 2
        self._tail_most = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Takes the stream's next bytes."""
        self.total += len(data)
        room = self._head_most - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_most:
            self._tail += data[-self._tail_most :]
            if len(self._tail) > 2 * self._tail_most:
                del self._tail[: -self._tail_most]

    @property
    def truncated(self) -> bool:
        """True where the middle is missing."""
        return self.total > self._head_most + self._tail_most

    def value(self) -> bytes:
        """What is kept."""
        if not self._tail:
            return bytes(self._head)
        return bytes(self._head + self._tail[-self._tail_most :])
