"""When a request to a store is worth another try."""

__all__ = ["RETRIED_STATUSES", "retry_delay"]

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses that may pass by themselves."""
_FIRST, _LONGEST, _TRIES, _IN_ALL = 0.2, 10.0, 6, 60.0


def retry_delay(tries: int, waited: float, chance: float, asked: float | None = None) -> float | None:
    """Seconds to wait before the next try after `tries` that failed; None to give up.

    `waited`: seconds waited so far; `chance`: from 0 to 1, spreads clients that failed together; `asked`: seconds that the store
    asks for (Retry-After), honoured if there is as much time left.
    """
    longest = min(_LONGEST, _FIRST * 2.0 ** min(tries, 32))
    delay = longest * (0.5 + chance / 2)
    if asked is not None:
        delay = max(delay, asked)
    return delay if tries < _TRIES and waited + delay <= _IN_ALL else None
