"""A clock that moves only when told, and randomness from a seed."""

import hashlib
from collections.abc import Callable

__all__ = ["VirtualClock"]


class VirtualClock:
    """Implements ports.Clock. `start`: Unix seconds. `advance` moves both clocks and then calls
    `listeners`; the random bytes follow from `seed`."""

    def __init__(self, start: float = 1_800_000_000.0, seed: int = 0) -> None:
        self._start = start
        self._passed = 0.0
        self._seed = seed
        self._drawn = 0
        self.listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """Unix seconds."""
        return self._start + self._passed

    def monotonic(self) -> float:
        """Seconds since this clock was made."""
        return self._passed

    def random(self, n: int) -> bytes:
        """The next `n` bytes of the seed's sequence."""
        found = b""
        while len(found) < n:
            self._drawn += 1
            found += hashlib.sha256(f"{self._seed}/{self._drawn}".encode()).digest()
        return found[:n]

    def advance(self, seconds: float) -> None:
        """Lets `seconds` (not negative) pass."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._passed += seconds
        self._tell()

    def step(self, seconds: float) -> None:
        """Sets the Unix time forwards or back, as an administrator or NTP does; `monotonic` does not move."""
        self._start += seconds
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()
