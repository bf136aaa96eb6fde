"""What every plan promises to whoever runs it."""

import pytest
from harness import Machine, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.cache.layout import KVGroup, full_attention

FULL, WINDOW = KVGroup((0,), 4, None), KVGroup((1,), 4, 9)


@pytest.mark.req("SCH-17")
@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=2, max_size=12), st.integers(17, 40))
def test_rows_are_admitted_once_run_at_most_once_a_step_and_are_released_once(shapes, num_blocks):
    machine = Machine(make_config(num_blocks=num_blocks, max_num_seqs=5, budget=16))
    machine.add(*(make_request(index, [index + 1] * length, outputs) for index, (length, outputs) in enumerate(shapes)))
    machine.run()
    held: set[int] = set()
    for plan in machine.plans:
        released, admitted = plan.released.tolist(), [admission.row for admission in plan.admissions]
        assert len(set(released)) == len(released) and held.issuperset(released)
        held.difference_update(released)
        assert len(set(admitted)) == len(admitted) and held.isdisjoint(admitted), "new and known rows are apart"
        held.update(admitted)
        rows, counts = plan.rows.tolist(), plan.num_new_tokens.tolist()
        assert len(set(rows)) == len(rows) == len(counts) == len(plan.samples)
        assert set(admitted) <= set(rows) <= held
        assert all(counts) and sum(counts) <= machine.config.scheduler.max_num_batched_tokens
        assert all(held.issuperset(group.tolist()) for group in plan.append_rows)


@pytest.mark.req("KV-21")
@pytest.mark.parametrize(
    ("groups", "caching", "cached"),
    [(full_attention(4), False, 0), (full_attention(4), True, 16), ((FULL, WINDOW), False, 0), ((FULL, WINDOW), True, 16)],
)
def test_one_cache_serves_no_caching_one_group_and_several(groups, caching, cached):
    machine = Machine(make_config(caching=caching), groups)
    for index in range(2):
        machine.add(make_request(index, list(range(1, 19)), 3))
        machine.run()
    assert machine.cached_tokens == {0: 0, 1: cached}
    assert machine.streams[0] == machine.streams[1]
    assert bool(machine.live_hashes) is caching
    machine.check_no_leak()
