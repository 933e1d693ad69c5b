"""When a sandbox ends by time: the idle end, which activity and renewal move, and the absolute end, which nothing moves."""

from msgspec import Struct

from dsec.model.outcome import End

__all__ = ["ATTACHED", "FLUSH_SECONDS", "Deadlines", "active", "begin", "due", "renewed", "restored", "verdict"]

FLUSH_SECONDS = 1.0
"""How stale the activity in the journal may be, hence how much a restart adds to an idle end."""


ATTACHED = float("inf")
"""Recorded as the time of its activity while a call or command is in it: until when is only known when it leaves."""


class Deadlines(Struct, frozen=True):
    """Unix seconds; None: never. `idle_seconds` is what one activity gives at least."""

    idle_seconds: float | None
    idle: float | None
    absolute: float | None


def begin(idle_seconds: float | None, absolute_seconds: float | None, now: float) -> Deadlines:
    """The ends of a sandbox asked for at `now`."""
    idle = None if idle_seconds is None else now + idle_seconds
    return Deadlines(idle_seconds, idle, None if absolute_seconds is None else now + absolute_seconds)


def active(deadlines: Deadlines, at: float) -> Deadlines:
    """After activity at `at`: the idle end is at least `idle_seconds` away. Activity never shortens what a renewal gave."""
    if deadlines.idle_seconds is None or deadlines.idle is None:
        return deadlines
    end = at + deadlines.idle_seconds
    return deadlines if end <= deadlines.idle else Deadlines(deadlines.idle_seconds, end, deadlines.absolute)


def renewed(deadlines: Deadlines, ttl: float | None, now: float) -> Deadlines:
    """After a renewal: the idle end is `ttl` (None: the sandbox's own idle time) from now, sooner or later than it was.

    A sandbox that never idles out stays so; the absolute end stays where it is.
    """
    if deadlines.idle_seconds is None:
        return deadlines
    return Deadlines(deadlines.idle_seconds, now + (deadlines.idle_seconds if ttl is None else ttl), deadlines.absolute)


def restored(deadlines: Deadlines, last_active: float | None, now: float) -> Deadlines:
    """After a restart at `now`: activity in the last FLUSH_SECONDS before it may be unrecorded, so that much is granted. Where
    a call or command was under way (ATTACHED), nobody knows until when: its idle time begins anew."""
    if last_active is None:
        return deadlines
    return active(deadlines, min(last_active + FLUSH_SECONDS, now))


def due(deadlines: Deadlines, busy: bool) -> float | None:
    """When `verdict` may next be other than None; while `busy` (a call or attached command runs) the idle end waits."""
    ends = [end for end in (None if busy else deadlines.idle, deadlines.absolute) if end is not None]
    return min(ends, default=None)


def verdict(deadlines: Deadlines, busy: bool, now: float) -> End | None:
    """The end that has come at `now`, if one has."""
    if deadlines.absolute is not None and now >= deadlines.absolute:
        return End.EXPIRED
    if not busy and deadlines.idle is not None and now >= deadlines.idle:
        return End.IDLE
    return None
