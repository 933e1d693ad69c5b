"""The host's clocks and random numbers."""

import os
import time

__all__ = ["SystemClock"]


class SystemClock:
    """The Clock port on this host."""

    def now(self) -> float:
        """Unix seconds."""
        return time.time()  # noqa: TID251 - the one place

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def random(self, n: int) -> bytes:
        """`n` secret bytes of the kernel's generator."""
        return os.urandom(n)
