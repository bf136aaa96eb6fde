"""What steps with drafts cost, learned from steps that differ in rows, in drafts and in luck."""

import pytest

from penstock.engine.spec.costs import StepCosts, Timing

AT_START = [Timing(1, 0, 1.0), Timing(1, 4, 2.0), Timing(32, 0, 4.0), Timing(32, 4, 8.0)]
DEPTHS = (0, 1, 2, 4)


@pytest.fixture
def costs():
    return StepCosts(32, DEPTHS, AT_START)


def test_it_begins_with_what_was_measured(costs):
    assert [costs.of(32, drafts) for drafts in DEPTHS] == [1.0, 1.25, 1.5, 2.0]
    assert costs.of(32, 3.0) == 1.75 and costs.of(32, 9.0) == 2.0
    few = StepCosts(32, DEPTHS, [*AT_START[:3], Timing(32, 0.25, 6.0), AT_START[3]])
    assert costs.of(32, 0.25) == 1.0625 and few.of(32, 0.25) == 1.5


@pytest.mark.parametrize("plain", [(4.0, 4.0, 40.0), (40.0,)], ids=["the last", "the first and only one"])
def test_one_plain_step_that_was_held_up_makes_drafts_no_cheaper(costs, plain):
    """The first step of a shape has no tape and takes several times as long. While drafts pay, the next one may be far away."""
    for seconds in plain:
        costs.observe(32, 0, seconds)
    for _ in range(100):
        costs.observe(32, 2.0, 12.0)
    assert costs.of(32, 2.0) == pytest.approx(3.0, rel=0.01)


def test_a_step_with_drafts_that_was_held_up_makes_them_no_dearer(costs):
    """The first step of a size with drafts records its tape."""
    costs.observe(32, 0, 4.0)
    for seconds in (80.0, 8.0, 8.0, 80.0, 8.0):
        costs.observe(32, 4.0, seconds)
        assert costs.of(32, 4.0) == 2.0
    for _ in range(100):
        costs.observe(32, 4.0, 12.0)
    assert costs.of(32, 4.0) == pytest.approx(3.0, rel=0.01), "what stays so dear is believed"


def test_more_rows_take_longer_also_without_drafts(costs):
    """A step of 17 rows at the end of a wave is no measure for one of 32 with drafts, though both are of a size."""
    per_row = 3.0 / 31
    for _ in range(3):
        costs.observe(17, 0, 1.0 + 16 * per_row)
    for _ in range(100):
        costs.observe(32, 2.0, 6.0)
    assert costs.of(32, 2.0) == pytest.approx(1.5, rel=0.01)


@pytest.mark.req("SD-28")
def test_few_drafts_teach_little_of_what_many_cost(costs):
    """Where one row of four had drafts the step was cheap, which says nothing of one in which all have four."""
    costs.observe(32, 0, 4.0)
    for _ in range(100):
        costs.observe(32, 0.25, 4.2)
    assert costs.of(32, 0.25) == pytest.approx(1.05, rel=0.01) and costs.of(32, 4.0) == 2.0


def test_a_machine_that_becomes_slow_makes_drafts_no_dearer(costs):
    for _ in range(100):
        costs.observe(32, 0, 40.0)
        costs.observe(32, 4.0, 80.0)
    assert costs.of(32, 4.0) == pytest.approx(2.0) and costs.in_steps(32, 40.0) == pytest.approx(1.0)


def test_what_is_learned_is_forgotten_bit_by_bit(costs):
    costs.observe(32, 0, 4.0)
    for _ in range(100):
        costs.observe(32, 4.0, 16.0)
    assert costs.of(32, 4.0) == pytest.approx(4.0, rel=0.01)
    costs.forget(32, 0.5)
    assert costs.of(32, 4.0) == pytest.approx(3.0, rel=0.01)
