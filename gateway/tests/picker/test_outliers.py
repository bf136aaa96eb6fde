"""Replicas that fail come last, return on probation, and are never given up for good."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.outliers import BASE_S, ERRORS, FORGET_S, MAX_S, RECOVERED, UNTROUBLED, WINDOW_S, Outliers

KEY, OTHER = ReplicaKey("u1", 80), ReplicaKey("u2", 80)


def ejected(outliers: Outliers, now: float, key: ReplicaKey = KEY) -> bool:
    return now < outliers.standing(key).ejected_until


def test_one_that_never_failed_has_no_record() -> None:
    outliers = Outliers()
    outliers.answered(KEY, 1.0)
    outliers.heard(KEY, 1.0)
    assert outliers.standing(KEY) == UNTROUBLED
    assert not outliers.records


def test_a_lost_connection_ejects_at_once_and_others_stay() -> None:
    outliers = Outliers()
    assert outliers.unreachable(KEY, 10.0)
    assert not outliers.unreachable(KEY, 10.5)  # the same cause, seen by another request
    assert outliers.standing(KEY).ejected_until == 10.0 + BASE_S
    assert outliers.standing(OTHER) == UNTROUBLED
    assert outliers.ejections == 1


def test_a_sign_of_life_ends_the_ejection_and_probation_spares_it_the_herd() -> None:
    outliers = Outliers()
    outliers.unreachable(KEY, 10.0)
    outliers.heard(KEY, 10.2)
    assert not ejected(outliers, 10.2)
    allowed: list[float] = []
    while (allowance := outliers.standing(KEY).allowance) < inf:
        allowed.append(allowance)
        outliers.answered(KEY, 10.3)
    assert allowed == [1, 2, 4]
    assert allowed[-1] * 2 == RECOVERED


def test_single_errors_are_no_outlier_and_a_streak_is() -> None:
    outliers = Outliers()
    for n in range(ERRORS - 1):
        assert not outliers.error(KEY, 10.0 + n)
    assert outliers.error(KEY, 10.0 + ERRORS - 1)
    later = Outliers()
    for n in range(3 * ERRORS):
        assert not later.error(KEY, n * WINDOW_S)  # as many, and far apart


def test_errors_among_many_answers_are_no_outlier() -> None:
    outliers = Outliers()
    outliers.error(KEY, 10.0)
    for n in range(30):
        outliers.answered(KEY, 10.0 + n / 100)
    assert not any(outliers.error(KEY, 10.5) for _ in range(2 * ERRORS))


def test_life_signs_do_not_excuse_errors() -> None:
    outliers = Outliers()
    for _ in range(ERRORS):
        outliers.error(KEY, 10.0)
    outliers.heard(KEY, 10.1)
    outliers.answered(KEY, 10.1)  # of a request that it had before
    assert ejected(outliers, 10.2)
    assert outliers.standing(KEY).allowance == 1


def test_failing_again_on_probation_doubles_the_ejection_up_to_a_bound() -> None:
    outliers, now, lengths = Outliers(), 10.0, list[float]()
    for _ in range(8):
        outliers.unreachable(KEY, now)
        start = now
        while ejected(outliers, now):
            now += 0.25
        lengths.append(now - start)
    assert lengths[:3] == [BASE_S, 2 * BASE_S, 4 * BASE_S]
    assert lengths[-1] == MAX_S


def test_one_that_is_full_is_spared_for_a_while_and_is_no_outlier() -> None:
    outliers = Outliers()
    outliers.refused(KEY, 10.0)
    assert outliers.standing(KEY) == (10.0 + BASE_S, inf)
    outliers.heard(KEY, 10.1)  # its reports go on
    assert ejected(outliers, 10.2)
    assert outliers.ejections == 0


def test_an_old_failure_is_forgotten() -> None:
    outliers = Outliers()
    outliers.unreachable(KEY, 10.0)
    for _ in range(4):
        outliers.answered(KEY, 20.0)
    outliers.answered(KEY, 20.0 + FORGET_S)
    assert not outliers.records
    outliers.unreachable(KEY, 200.0)
    assert not ejected(outliers, 200.0 + BASE_S)


@given(
    st.lists(
        st.tuples(st.sampled_from(["unreachable", "error", "refused", "heard", "answered"]), st.floats(0.0, 20.0)), max_size=60
    )
)
@pytest.mark.req("RT-17")
def test_nobody_is_ejected_for_ever(events: list[tuple[str, float]]) -> None:
    outliers, now = Outliers(), 0.0
    for name, pause in events:
        now += pause
        getattr(outliers, name)(KEY, now)
        assert not ejected(outliers, now + MAX_S)
        assert outliers.standing(KEY).allowance >= 1  # on probation it may always have one
