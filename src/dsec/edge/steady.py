"""The edge's time: Unix seconds that no step of the host's clock moves while the host is up."""

from dsec.ports.clock import Clock

__all__ = ["SteadyClock"]


class SteadyClock:
    """Implements ports.clock.Clock over another: `now` is the host's clock when it was set, and from then on runs with
    `monotonic`. `offset`: seconds from `monotonic` to `now`, of an earlier run of the same boot; None: as the host says now."""

    def __init__(self, clock: Clock, offset: float | None = None) -> None:
        self._clock = clock
        self.offset = clock.now() - clock.monotonic() if offset is None else offset

    def now(self) -> float:
        """Unix seconds."""
        return self._clock.monotonic() + self.offset

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._clock.monotonic()

    def random(self, n: int) -> bytes:
        """`n` secret bytes."""
        return self._clock.random(n)

    def ahead(self) -> float:
        """Seconds that this time is ahead of the host's clock: what that was stepped back since, less what forwards."""
        return self.now() - self._clock.now()
