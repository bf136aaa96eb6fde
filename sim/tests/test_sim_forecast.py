"""What demand is expected to rise by, against a slow reference."""

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.sim.forecast import LEAST_S, SPAN_S, STEP_S, Surges

demands = st.lists(st.floats(0, 100), min_size=2, max_size=120)


def seen(values: list[float], every_s: float = STEP_S) -> tuple[Surges, float]:
    """What is remembered of looks at regular times, and the time of the last."""
    surges, now = Surges(), 0.0
    for number, value in enumerate(values):
        now = number * every_s
        surges = surges.observe(now, value)
    return surges, now


@given(demands, st.floats(0, 400), st.floats(0.01, 1))
def test_it_is_the_rise_that_covers_the_share_of_all_moments(values: list[float], lead_s: float, share: float) -> None:
    surges, now = seen(values)
    times = [number * STEP_S for number in range(len(values))]
    rises = sorted(
        max(later for at, later in zip(times, values, strict=True) if begun <= at <= begun + lead_s) - value
        for begun, value in zip(times, values, strict=True)
        if begun + lead_s <= now
    )
    known = now >= max(LEAST_S, 2 * lead_s)
    expected = rises[math.ceil(share * len(rises)) - 1] if known else 0.0
    assert surges.rise(now, lead_s, share) == expected


@given(demands, st.floats(1, 100), st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)))
def test_more_caution_and_a_longer_wait_never_expect_less(
    values: list[float], lead_s: float, shares: tuple[float, float]
) -> None:
    surges, now = seen(values)
    low, high = sorted(shares)
    assert 0 <= surges.rise(now, lead_s, low) <= surges.rise(now, lead_s, high) <= max(values) - min(values)
    assert surges.rise(now, lead_s, 1.0) <= surges.rise(now, 2 * lead_s, 1.0) or now < max(LEAST_S, 4 * lead_s)


def test_even_demand_asks_for_nothing_and_an_hour_is_remembered() -> None:
    surges, now = seen([5.0] * 100)
    assert surges.rise(now, 60.0, 0.99) == 0.0
    surges = surges.observe(now + STEP_S, 9.0)
    assert surges.rise(now + 100, 60.0, 1.0) == 4.0
    for number in range(1, 400):
        surges = surges.observe(now + STEP_S + number * STEP_S, 5.0)
    assert surges.rise(surges.samples[-1][0], 60.0, 1.0) == 0.0
    assert len(surges.samples) <= SPAN_S / STEP_S + 1


def test_looks_that_are_close_together_count_once_with_the_highest() -> None:
    surges, _ = seen([1.0, 3.0, 2.0, 4.0], every_s=STEP_S / 2)
    assert surges.samples == ((0.0, 3.0), (STEP_S, 4.0))
