"""Ends by time against a plain model: activity, renewals, restarts and looks at any moments."""

from hypothesis import given
from hypothesis import strategies as st

from dsec.model.outcome import End
from dsec.rules import ttl

SECONDS = st.floats(0.01, 1000.0)
STEPS = st.lists(
    st.tuples(st.sampled_from(["active", "renew", "renew_own", "restart", "look"]), st.floats(0.0, 50.0), SECONDS),
    max_size=30,
)


@given(st.none() | SECONDS, st.none() | SECONDS, STEPS)
def test_any_history(
    idle_seconds: float | None, absolute_seconds: float | None, steps: list[tuple[str, float, float]]
) -> None:
    now, last = 100.0, 100.0
    ends = ttl.begin(idle_seconds, absolute_seconds, now)
    absolute = ends.absolute
    idle = ends.idle
    for step, later, seconds in steps:
        now += later
        if ttl.verdict(ends, False, now) is not None:
            break  # it has ended: nothing is asked of it any more
        match step:
            case "active":
                ends, last = ttl.active(ends, now), now
                idle = None if idle is None or idle_seconds is None else max(idle, now + idle_seconds)
            case "renew" | "renew_own":
                given_ = seconds if step == "renew" else None
                ends = ttl.renewed(ends, given_, now)
                idle = (
                    None if idle is None or idle_seconds is None else now + (idle_seconds if given_ is None else given_)
                )
            case "restart":
                before = ends
                ends = ttl.restored(ends, last, now)
                if idle is not None and before.idle is not None and ends.idle is not None and idle_seconds is not None:
                    granted = min(last + ttl.FLUSH_SECONDS, now) + idle_seconds
                    assert before.idle <= ends.idle <= max(before.idle, granted), "no more than was unrecorded"
                    idle = ends.idle
            case _:
                pass
        assert ends.absolute == absolute, "nothing moves the absolute end"
        assert ends.idle == idle
        for busy in (False, True):
            due = ttl.due(ends, busy)
            assert (ttl.verdict(ends, busy, now) is not None) == (due is not None and due <= now)
    if ends.absolute is not None:
        assert ttl.verdict(ends, True, ends.absolute) is End.EXPIRED
    if ends.idle is not None and (ends.absolute is None or ends.idle < ends.absolute):
        assert ttl.verdict(ends, False, ends.idle) is End.IDLE
        assert ttl.verdict(ends, True, ends.idle) is None, "it is in use"
