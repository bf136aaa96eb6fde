"""Averages over time, however often one looks."""

import pytest

from penstock.operator.autoscale.windows import mean


def test_hurried_looks_count_for_the_time_between_them_alone() -> None:
    calm = [(float(second), 1.0) for second in range(0, 51, 5)]
    hurried = [(50 + 0.5 * look, 9.0) for look in range(1, 21)]
    assert mean((*calm, *hurried), 0.0) == pytest.approx((50 * 1 + 0.5 * 5 + 9.5 * 9) / 60)


def test_a_mean_needs_no_more_than_one_sample_and_forgets_what_is_older() -> None:
    assert mean((), 0.0) == 0.0
    assert mean(((1.0, 3.0),), 0.0) == 3.0
    assert mean(((1.0, 3.0), (7.0, 5.0)), 2.0) == 5.0
    assert mean(((1.0, 3.0), (1.0, 5.0)), 0.0) == 5.0, "two looks at one time"
