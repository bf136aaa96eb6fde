"""Drafts: several tokens a row and step, as many as are accepted."""

import numpy as np
import pytest
from fake_runner import reference
from harness import Machine, make_config, make_request
from test_row_table import admit, ints, plan

from penstock.engine.core.plan import StepPlan, StepResult
from penstock.engine.core.row_table import RowTable
from penstock.engine.core.scheduling.guides import told_drafts
from penstock.engine.messages import FinishReason
from penstock.engine.sampling import RepetitionDetection


def eager(**config) -> Machine:
    """A machine whose runner always proposes as much as may be, all of it right, and accepts it."""
    machine = Machine(make_config(**config))
    machine.runner._random.choice = max
    machine.runner._random.randint = lambda low, high: high
    machine.runner._random.random = lambda: 0.0
    return machine


def drafts_of(plan: StepPlan) -> list[int]:
    return plan.num_drafts.tolist() if len(plan.num_drafts) else [0] * len(plan.rows)


@pytest.mark.req("SCH-23")
def test_rejected_drafts_are_as_if_they_had_never_run():
    table = RowTable(2, 40, [4])
    table.apply(plan(admissions=[admit(0, [5, 6])], appends=[(0, 1), (0, 2)], runs=[(0, 2, True)]))
    verifying = [plan(runs=[(0, 4, True)], drafts=[3]) for _ in range(2)]
    starts = [table.apply(one).tolist() for one in verifying]
    assert starts == [[2], [6]] and (table.num_tokens[0], table.num_computed[0]) == (11, 10), "as if all were accepted"
    assert [at.tolist() for at in table.settle(plan(runs=[(0, 2, True)]), ints([1]))] == [[0], [2]]
    assert [at.tolist() for at in table.settle(verifying[0], ints([2]))] == [[2], [4]], "one draft and the token after it"
    assert (table.num_tokens[0], table.num_computed[0]) == (9, 8)
    assert [at.tolist() for at in table.settle(verifying[1], ints([4]))] == [[4], [8]]
    assert table.num_computed[0] == table.num_settled[0] == 8 and table.num_tokens[0] == 9


@pytest.mark.req("SCH-24", "SD-24")
@pytest.mark.parametrize("depth", [1, 2])
def test_what_follows_a_stop_within_a_step_is_neither_sent_nor_counted_nor_found(depth):
    prompt = [1] * 7
    expected = reference(prompt, 30)
    at = next(at for at in range(8, 30) if expected[at] not in expected[:at])
    machine = eager(drafts=6, depth=depth)
    machine.add(make_request(0, prompt, 30, stop=(expected[at],)))
    machine.run().check_no_leak()
    assert machine.streams[0] == expected[: at + 1] == reference(prompt, 30, (expected[at],))
    assert machine.ended["r0"].output_tokens == at + 1 and machine.finished[0].stop_token_id == expected[at]
    assert len(machine.live_hashes) == (len(prompt) + at) // 4, "blocks of the request's own tokens, but for the last"


def test_a_repetition_is_seen_within_a_step():
    machine = eager(drafts=6)
    guard = RepetitionDetection(max_pattern_size=1, min_pattern_size=1, min_count=3)
    machine.add(make_request(0, [1, 2, 3], 30, repetition=guard))
    machine.step()
    plan = machine.scheduler.schedule(1.0)
    assert plan is not None and drafts_of(plan) == [6]
    before = len(machine.streams[0])
    tokens = np.array([[9, 8, 7, 7, 7, 7, 7]], np.int32)
    machine._take(machine.scheduler.update(StepResult(plan.step_id, tokens, np.array([7], np.int32)), 1.0))
    assert machine.streams[0][before:] == [9, 8, 7, 7, 7]
    assert machine.finished[0].reason is FinishReason.REPETITION


@pytest.mark.req("SPV-12", "SCH-04", "SCH-25")
def test_each_row_has_the_drafts_that_it_may_still_use():
    machine = eager(drafts=5, budget=12)
    machine.add(make_request(0, [1], 2), make_request(1, [2], 4), make_request(2, [3], 40))
    machine.step()
    plan = machine.step()
    assert plan is not None and dict(zip(machine.planned, drafts_of(plan), strict=True)) == {0: 0, 1: 2, 2: 5}
    machine.add(make_request(3, [4], 40), make_request(4, [5], 40))
    for _ in range(4):
        plan = machine.step()
        assert plan is not None and plan.num_new_tokens.sum() <= 12
    machine.run()
    assert all(machine.streams[index] == reference([index + 1], {0: 2, 1: 4}.get(index, 40)) for index in range(5))


@pytest.mark.req("SD-19")
def test_drafts_and_a_chunk_of_a_prompt_share_the_budget_of_a_step():
    machine = eager(drafts=5, budget=12)
    machine.add(make_request(0, [1], 40))
    machine.step()
    machine.add(make_request(1, [2] * 30, 3))
    shares = []
    while 1 not in machine.streams or not machine.streams[1]:
        plan = machine.step()
        assert plan is not None and plan.num_new_tokens.sum() <= 12
        shares.append(dict(zip(machine.planned, plan.num_new_tokens.tolist(), strict=True)))
    assert shares[:4] == [{0: 6, 1: 6}] * 4, "a token and five drafts of the one, a chunk of the other"
    machine.run()
    assert machine.streams == {0: reference([1], 40), 1: reference([2] * 30, 3)}


@pytest.mark.req("SD-13")
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_end_where_the_context_does(depth):
    machine = eager(drafts=6, max_model_len=16, num_blocks=5, block_size=4, depth=depth)
    machine.add(make_request(0, [1] * 9, 7))
    machine.run().check_no_leak()
    assert all(plan.num_new_tokens.sum() <= 9 for plan in machine.plans)
    assert machine.streams[0] == reference([1] * 9, 7)


def test_drafts_push_nobody_out():
    """Where blocks run short they go before anybody is preempted."""
    machine = eager(drafts=6, num_blocks=19, block_size=4, max_model_len=40, caching=False)
    machine.add(make_request(0, [1] * 8, 30), make_request(1, [2] * 8, 30))
    machine.run().check_no_leak()
    plain = Machine(make_config(num_blocks=19, block_size=4, max_model_len=40, caching=False))
    plain.add(make_request(0, [1] * 8, 30), make_request(1, [2] * 8, 30))
    plain.run()
    assert machine.scheduler.totals.num_preemptions <= plain.scheduler.totals.num_preemptions and machine.streams == plain.streams
    assert len(machine.plans) < len(plain.plans) / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_without_rows_passes_through_and_still_tells_of_released_rows(depth):
    machine = Machine(make_config(depth=depth))
    machine.add(make_request(0, [1], 30))
    machine.step()
    machine.abort(0)
    while machine._results:
        machine.step()
    plan = machine.step(idle=True)
    assert plan is not None and len(plan.rows) == 0 and plan.released.tolist() == [0]
    assert machine.step() is None and machine.step(idle=True) is not None
    machine.add(make_request(1, [2], 5))
    machine.run().check_no_leak()
    assert machine.streams[1] == reference([2], 5)


def test_told_drafts_include_the_token_of_id_0_and_no_padding():
    drafts = np.array([[3, 0, -1], [-1, -1, -1]], np.int32)
    assert (told_drafts(drafts, 0), told_drafts(drafts, 1), told_drafts(None, 0)) == ([3, 0], [], [])
