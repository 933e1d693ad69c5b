"""How much in how long. No clock: the time is an argument."""

__all__ = ["Bucket"]


class Bucket:
    """Lets `rate` a second through, and `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Whether one more may go at `now` (seconds, never going back)."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
