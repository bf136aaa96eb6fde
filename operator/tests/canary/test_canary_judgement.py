"""When a canary is said to do worse, and when nothing is said."""

from bisect import bisect_left
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import LATENCY_EDGES_S
from penstock.operator.canary.judgement import Limits, compare
from penstock.operator.canary.tally import Tally

BUCKETS = len(LATENCY_EDGES_S) + 1
LIMITS = Limits(min_requests=20, error_share=0.05, ttft_ratio=1.5, ttft_share=0.95)
ERRORS_ONLY = replace(LIMITS, ttft_ratio=None)


def times(**counts: int) -> tuple[int, ...]:
    """First tokens, as `ms100=5`."""
    found = [0] * BUCKETS
    for name, count in counts.items():
        found[bisect_left(LATENCY_EDGES_S, int(name.removeprefix("ms")) / 1000)] += count
    return tuple(found)


@st.composite
def tallies(draw: st.DrawFn, least: int = 0) -> Tally:
    requests = draw(st.integers(least, 5000))
    spread = draw(st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 500), max_size=6))
    ttft = tuple(spread.get(bucket, 0) for bucket in range(BUCKETS))
    return Tally(requests, draw(st.integers(0, requests)), ttft)


limits = st.builds(
    Limits,
    min_requests=st.integers(1, 500),
    error_share=st.floats(0, 1),
    ttft_ratio=st.none() | st.floats(1, 10),
    ttft_share=st.floats(0.5, 0.99),
)


@given(tallies(), tallies(), limits)
def test_too_little_data_is_never_a_verdict(canary: Tally, stable: Tally, given_limits: Limits) -> None:
    found = compare(canary, stable, given_limits).outcome
    enough = [min(canary.requests, stable.requests) >= given_limits.min_requests]
    if given_limits.ttft_ratio is not None:
        enough.append(min(canary.first_tokens, stable.first_tokens) >= given_limits.min_requests)
    if not any(enough):
        assert found == "Open"
    if not all(enough):
        assert found != "Good"


@given(tallies(least=1), limits, st.integers(1, 9))
def test_equal_figures_never_fail_it_and_pass_once_there_are_enough(one: Tally, given_limits: Limits, times_more: int) -> None:
    stable = Tally()
    for _ in range(times_more):
        stable += one
    found = compare(one, stable, given_limits).outcome
    streamed = given_limits.ttft_ratio is None or one.first_tokens >= given_limits.min_requests
    assert found == ("Good" if one.requests >= given_limits.min_requests and streamed else "Open")


@given(tallies(), tallies(), limits, st.integers(0, 200))
def test_more_failures_never_make_it_better(canary: Tally, stable: Tally, given_limits: Limits, more: int) -> None:
    worse = replace(canary, failures=min(canary.requests, canary.failures + more))
    order = ("Bad", "Open", "Good")
    before, after = (order.index(compare(it, stable, given_limits).outcome) for it in (canary, worse))
    assert after <= before


@pytest.mark.parametrize(
    ("canary", "stable", "outcome"),
    [
        (Tally(20, 20), Tally(20, 0), "Bad"),
        (Tally(19, 19), Tally(500, 0), "Open"),
        (Tally(500, 500), Tally(19, 0), "Open"),
        (Tally(100, 7), Tally(100, 0), "Open"),  # 7 points above, which 5 points and chance explain
        (Tally(10_000, 700), Tally(10_000, 0), "Bad"),
        (Tally(100, 5), Tally(100, 0), "Good"),
        (Tally(100, 60), Tally(100, 60), "Good"),  # both are bad: the canary is not why
    ],
)
def test_failures(canary: Tally, stable: Tally, outcome: str) -> None:
    assert compare(canary, stable, ERRORS_ONLY).outcome == outcome


@pytest.mark.parametrize(
    ("canary", "stable", "outcome"),
    [
        (times(ms100=100), times(ms100=100), "Good"),
        (times(ms400=100), times(ms100=100), "Bad"),
        (times(ms100=90, ms400=10), times(ms100=100), "Open"),
        (times(ms100=900, ms400=100), times(ms100=1000), "Bad"),
        (times(ms100=97, ms400=3), times(ms100=100), "Good"),  # p95 is what was asked for
        (times(ms400=19), times(ms100=100), "Open"),
        ((), (), "Open"),
    ],
)
def test_time_to_the_first_token(canary: tuple[int, ...], stable: tuple[int, ...], outcome: str) -> None:
    found = compare(Tally(100, 0, canary), Tally(100, 0, stable), LIMITS)
    assert found.outcome == outcome
    assert "0.0% of its 100 requests failed" in found.figures
    assert ("p95 time to the first token" in found.figures) and (bool(canary) or "no streamed answers" in found.figures)


def test_a_tally_tells_what_was_counted_since() -> None:
    before = Tally(10, 1, times(ms100=4))
    assert Tally(15, 3, times(ms100=5, ms400=1)).since(before) == Tally(5, 2, times(ms100=1, ms400=1))
    assert Tally(3, 0, times(ms100=1)).since(before) == Tally(3, 0, times(ms100=1))  # it counts anew
