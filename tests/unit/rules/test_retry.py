"""Retries: growing waits, an end, and a store's wish honoured as far as there is time."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.rules.retry import retry_delay

patient = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
chances = st.floats(0, 1)


@patient
@given(st.lists(chances, min_size=20, max_size=20), st.none() | st.floats(0, 30))
def test_it_ends_within_a_minute_of_waiting(given_chances: list[float], asked: float | None) -> None:
    waited, tries = 0.0, 0
    for tries, chance in enumerate(given_chances, 1):
        delay = retry_delay(tries, waited, chance, asked)
        if delay is None:
            break
        assert delay >= (asked or 0.0) and delay > 0
        waited += delay
    assert tries <= 6 and waited <= 60.0


@patient
@given(st.integers(1, 4), chances, chances)
def test_waits_grow_and_differ_by_chance(tries: int, one: float, other: float) -> None:
    first, second = retry_delay(tries, 0.0, one), retry_delay(tries + 1, 0.0, other)
    assert first is not None and second is not None
    assert 0.2 * 2**tries / 2 <= first <= 0.2 * 2**tries and 0.2 * 2**tries <= second <= 0.4 * 2**tries


def test_what_asks_for_too_long_is_given_up() -> None:
    assert retry_delay(1, 0.0, 0.5, 61.0) is None
    assert retry_delay(1, 50.0, 0.5, 11.0) is None
    assert retry_delay(1, 0.0, 0.5, 5.0) == 5.0
    assert retry_delay(6, 0.0, 0.5) is None
