"""The row table against a dictionary of lists."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.plan import Admission, StepPlan, empty
from penstock.engine.core.row_table import RowTable
from penstock.engine.sampling import SamplingParams


def ints(values) -> np.ndarray:
    return np.array(values, np.int32)


def plan(*, released=(), admissions=(), appends=(), runs=(), drafts=()) -> StepPlan:
    """`appends` are (row, block), `runs` are (row, tokens, samples)."""
    return StepPlan(
        step_id=0,
        released=ints(released),
        admissions=list(admissions),
        append_rows=[ints([row for row, _ in appends])],
        append_blocks=[ints([block for _, block in appends])],
        rows=ints([row for row, _, _ in runs]),
        num_new_tokens=ints([count for _, count, _ in runs]),
        samples=np.array([samples for _, _, samples in runs], np.bool_),
        num_drafts=ints(drafts),
    )


def admit(row: int, tokens: list[int], computed: int = 0) -> Admission:
    return Admission(row, ints(tokens), len(tokens), computed, SamplingParams(max_tokens=1))


@pytest.mark.req("IB-01", "IB-04", "AS-05")
def test_a_request_runs_from_admission_to_release():
    table = RowTable(4, 40, [4])
    starts = table.apply(plan(admissions=[admit(2, [5, 6, 7, 8, 9])], appends=[(2, 11), (2, 3)], runs=[(2, 4, False)]))
    assert starts.tolist() == [0]
    assert (table.num_tokens[2], table.num_computed[2]) == (5, 4)
    assert table.block_tables[0][2, :3].tolist() == [11, 3, 0]
    # The last prompt token runs and samples: the sampled token counts before it is known.
    assert table.apply(plan(runs=[(2, 1, True)])).tolist() == [4]
    assert (table.num_tokens[2], table.num_computed[2]) == (6, 5)
    assert table.apply(plan(runs=[(2, 1, True)])).tolist() == [5]
    table.write_sampled(ints([2, 2]), ints([5, 6]), ints([70, 71]))
    assert table.token_ids[2, :7].tolist() == [5, 6, 7, 8, 9, 70, 71]
    # A new tenant in the same plan as the release finds nothing of the old one.
    table.apply(plan(released=[2], admissions=[admit(2, [1])], appends=[(2, 9)], runs=[(2, 1, True)]))
    assert table.block_tables[0][2].tolist() == [9] + [0] * 9
    assert (table.num_tokens[2], table.num_computed[2], table.num_blocks[0][2]) == (2, 1, 1)


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 999)), max_size=8), max_size=5))
def test_appends_keep_their_order_within_each_row(steps):
    table, expected = RowTable(4, 160, [4]), {row: [] for row in range(4)}
    for appends in steps:
        table.apply(plan(appends=appends))
        places = []
        for row, block in appends:
            places.append(len(expected[row]))
            expected[row].append(block)
        assert table.append_places[0].tolist() == places
    for row, blocks in expected.items():
        assert table.block_tables[0][row, : len(blocks)].tolist() == blocks
        assert table.num_blocks[0][row] == len(blocks)


@pytest.mark.req("IB-02", "IB-08")
def test_each_group_has_a_table_for_its_own_block_size():
    table = RowTable(3, 40, [4, 16])
    assert table.token_ids.shape == (3, 40) and table.token_ids.dtype == np.int32
    assert [blocks.shape for blocks in table.block_tables] == [(3, 10), (3, 3)]
    appends = {"append_rows": [ints([1, 1]), ints([1])], "append_blocks": [ints([7, 8]), ints([9])]}
    table.apply(msgspec.structs.replace(plan(), **appends))
    assert table.block_tables[0][1, :3].tolist() == [7, 8, 0] and table.block_tables[1][1].tolist() == [9, 0, 0]


def test_an_empty_plan_changes_nothing():
    table = RowTable(2, 8, [4])
    assert len(table.apply(plan())) == 0
    assert empty().size == 0 and not table.num_tokens.any()
