"""What a replica carries, its cold start, and what is kept of both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.capacity import Capacity, StepLine, learn
from penstock.operator.autoscale.coldstart import ColdStart
from penstock.operator.autoscale.correction import Correction
from penstock.operator.autoscale.learned import Learned, extract, restore
from penstock.operator.autoscale.policy import PoolMemory


@given(st.floats(0.001, 0.1), st.floats(1e-5, 0.01), st.lists(st.integers(1, 256), min_size=5, max_size=60, unique=True))
def test_the_line_of_steps_is_found(base: float, slope: float, rows: list[int]) -> None:
    line = StepLine()
    for count in rows:
        line = line.add(count, base + slope * count)
    assert line.step_s(100) == pytest.approx(base + 100 * slope, rel=0.02)
    assert line.slope == pytest.approx(slope, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 2.0)), min_size=1, max_size=50))
def test_no_step_takes_less_time_for_more_rows_or_less_than_none(samples: list[tuple[int, float]]) -> None:
    line = StepLine()
    for rows, seconds in samples:
        line = line.add(rows, seconds)
    assert line.slope >= 0
    assert line.base >= 0
    assert 0 < line.step_s(300) < 1000


def test_rows_are_bound_by_batch_memory_and_the_promised_time_between_tokens() -> None:
    line = StepLine().add(1, 0.021).add(11, 0.031)  # 20 ms and 1 ms for each row
    capacity = Capacity(line=line, max_num_seqs=256, rows_in_kv=50)
    assert capacity.rows(None) == 50
    assert capacity.rows(0.04) == pytest.approx(20)
    assert capacity.output_tokens_per_s(0.04) == pytest.approx(20 / 0.04)
    assert Capacity().output_tokens_per_s(0.04) == 0


def test_a_figure_that_no_report_has_stays() -> None:
    capacity = learn(Capacity(), [LoadReport(1, 1, max_num_seqs=8, prefill_tokens_per_s=500.0)])
    capacity = learn(capacity, [LoadReport(1, 2, max_num_seqs=8), LoadReport(2, 1)])
    assert (capacity.prefill_tokens_per_s, capacity.max_num_seqs) == (500.0, 8)


def test_what_was_learned_comes_back() -> None:
    line = StepLine().add(1, 0.021).add(11, 0.031)
    memory = PoolMemory(capacity=Capacity(5000, line, 256, 50), cold_start=ColdStart(90.0), correction=Correction(1.3))
    kept = extract(memory)
    back = restore(kept)
    assert not extract(back).differs(kept)
    assert back.capacity.output_tokens_per_s(0.04) == pytest.approx(memory.capacity.output_tokens_per_s(0.04))
    assert (back.cold_start.seconds, back.correction.factor) == (90, 1.3)
    assert restore(Learned()).cold_start == ColdStart(), "nothing learned is no cold start of no time"


def test_only_what_changes_by_a_tenth_is_another_figure() -> None:
    assert not Learned(cold_start_s=30).differs(Learned(cold_start_s=32))
    assert Learned(cold_start_s=30).differs(Learned(cold_start_s=40))
