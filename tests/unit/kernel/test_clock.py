"""The host's clock is the host's."""

import time

from dsec.kernel.clock import SystemClock


def test_the_clock() -> None:
    clock = SystemClock()
    assert abs(clock.now() - time.time()) < 1.0
    first = clock.monotonic()
    assert clock.monotonic() >= first
    assert len(clock.random(16)) == 16 and clock.random(16) != clock.random(16)
