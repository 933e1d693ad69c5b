"""A stream kept within a limit: its first half and its last half, and how many bytes there were."""

__all__ = ["Clipped"]


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
