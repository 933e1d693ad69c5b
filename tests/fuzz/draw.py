"""Values out of a fuzzer's bytes; zeros once they are used up."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Reads its bytes from the front, so that what a fuzzer changes late in an input changes late choices only."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def bytes(self, most: int) -> bytes:
        taken = self._data[self._at : self._at + most]
        self._at += len(taken)
        return taken

    def number(self, width: int = 1) -> int:
        return int.from_bytes(self.bytes(width), "big")

    def below(self, end: int) -> int:
        return self.number(1 if end <= 256 else 2 if end <= 65_536 else 4) % max(1, end)

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def once_in(self, count: int) -> bool:
        """True for one byte value in `count`; never when the bytes are used up."""
        return self.number() % count == 1

    def rest(self) -> bytes:
        return self.bytes(len(self._data))
