"""Time and randomness as arguments, so that rules and tests can be exact."""

from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    """`now`: Unix seconds for records and deadlines. `monotonic`: seconds for durations. `random`: n secret bytes."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    def random(self, n: int) -> bytes: ...
