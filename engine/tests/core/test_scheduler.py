"""The scheduler's rules one by one; the fuzz beside it covers their combinations."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from fake_runner import FAILING_TOKEN, REFUSED_TOKEN, reference
from harness import Machine, make_config, make_request, make_scheduler

from penstock.engine.config import ConfigError, SchedulerConfig
from penstock.engine.core import plan as plan_module
from penstock.engine.core.scheduling.request import RequestStatus
from penstock.engine.core.scheduling.step_builder import StepBuilder
from penstock.engine.messages import FinishReason, LifecycleEvent
from penstock.prompt.hashing import BlockHasher


def tokens_of(machine: Machine, plan) -> dict[int, int]:
    """Request → tokens in this plan; the requests must still run."""
    rows = {request.row: request.index for request in machine.scheduler._tenancy.running}
    return {rows[row]: count for row, count in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True) if row in rows}


@pytest.mark.req("RL-02")
def test_everything_after_preempted_is_finished():
    finished = {status.name for status in RequestStatus if status.is_finished}
    names = ("STOPPED", "LENGTH_CAPPED", "ABORTED", "IGNORED", "ERROR", "REPETITION")
    assert finished == {f"FINISHED_{name}" for name in names} and len(RequestStatus) == 12


@pytest.mark.req("SCH-01", "RL-16")
def test_a_row_is_free_for_the_step_after_its_request_ended():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request(0, [1, 2], 1), make_request(1, [3, 4], 1))
    first, second = machine.step(), machine.step()
    assert first.rows.tolist() == second.rows.tolist() == [0] and second.released.tolist() == [0]
    assert machine.scheduler.schedule(0.0) is None


@pytest.mark.req("SCH-06")
def test_decodes_that_cross_a_border_together_take_their_blocks_together(monkeypatch):
    machine = Machine(make_config(block_size=4, num_blocks=100, caching=False))
    machine.add(*[make_request(index, [index] * 3, 30) for index in range(5)])
    machine.step()
    pool, taken = machine.scheduler.kv.pool, []
    take = pool.get_new_blocks
    monkeypatch.setattr(pool, "get_new_blocks", lambda count: taken.append(count) or take(count))
    for _ in range(8):
        machine.step()
    assert taken == [5, 5]


@pytest.mark.req("SCH-06", "CHK-01", "CHK-07", "LIM-06", "RL-14")
def test_decodes_run_in_every_step_beside_one_slice_of_a_long_prompt():
    machine = Machine(make_config(budget=8, num_blocks=100))
    machine.add(make_request(0, [7] * 50, 4))
    machine.step()
    machine.add(*[make_request(index, [index], 30) for index in range(1, 4)])
    # The long prompt came first and is served first among chunks, so the short ones have to wait for it.
    while 0 not in machine.streams:
        machine.step()
    decoding = Machine(make_config(budget=8, num_blocks=100))
    decoding.add(*[make_request(index, [index], 30) for index in range(1, 4)])
    decoding.step()
    decoding.add(make_request(9, [7] * 50, 4))
    slices = []
    while 9 not in decoding.streams:
        plan = decoding.step()
        counts = tokens_of(decoding, plan)
        assert all(counts[index] == 1 for index in range(1, 4))
        slices.append(counts[9])
    assert slices == [5] * 10 and not any(plan.samples[-1] for plan in decoding.plans[1:-1])


@pytest.mark.req("CHK-03")
@pytest.mark.parametrize(("threshold", "slices"), [(0, [16, 14]), (6, [6] * 5), (100, [16, 14])])
def test_the_long_prefill_threshold_caps_each_slice(threshold, slices):
    machine = Machine(make_config(budget=16, threshold=threshold))
    machine.add(make_request(0, [3] * 30, 2))
    seen = []
    while 0 not in machine.streams:
        seen.append(int(machine.step().num_new_tokens[0]))
    assert seen == slices


@pytest.mark.req("SCH-14", "SCH-15")
def test_the_smallest_priority_goes_first_and_ties_by_arrival():
    machine = Machine(make_config(max_num_seqs=1, policy="priority"))
    for index, priority in enumerate([1, 0, 1, 0]):
        machine.add(make_request(index, [index], 2, priority=priority))
    machine.run()
    assert list(machine.cached_tokens) == [1, 3, 0, 2]


@pytest.mark.req("PRE-01", "PRE-02", "PRE-07", "PRE-15", "SCH-16", "KV-30")
def test_the_last_admitted_is_preempted_first_and_resumes_before_newer_ones():
    # Three that grow to 6 blocks each over 12 usable: one, then the other of the later two must go.
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    machine.add(*[make_request(index, [index] * 12, 12) for index in range(3)])
    machine.add(make_request(9, [9] * 16, 2))  # one block too many to be admitted with them
    seen = []
    while machine.scheduler.indexes():
        before = {request.index for request in machine.scheduler._tenancy.running}
        machine.step()
        gone = before - {request.index for request in machine.scheduler._tenancy.running} - set(machine.finished)
        seen += sorted(gone)
        for index in gone:
            request = machine.scheduler._book._live[index]
            assert request.status is RequestStatus.PREEMPTED and request.num_preemptions == seen.count(index)
            assert machine.scheduler.kv.tables(request) == [()]
    assert seen[0] == 2 and 0 not in seen and machine.scheduler.totals.num_preemptions == len(seen)
    admitted = [int(admission.token_ids[0]) for plan in machine.plans for admission in plan.admissions]
    assert admitted[:3] == [0, 1, 2] and admitted[-1] == 9, "a preempted request resumes before one that never ran"
    for index in range(3):
        assert machine.streams[index] == reference([index] * 12, 12)
    machine.check_no_leak()


@pytest.mark.req("PRE-05")
def test_a_preemption_gives_back_all_and_keeps_what_was_generated():
    machine = Machine(make_config(num_blocks=9, max_model_len=32, budget=32, caching=False))
    machine.add(*[make_request(index, [index + 1] * 12, 12) for index in range(2)])
    book = machine.scheduler._book._live
    while not machine.scheduler.totals.num_preemptions:
        before = list(machine.streams.get(1, []))
        machine.step()
    request = book[1]
    assert (request.status, request.num_preemptions, request.row) == (RequestStatus.PREEMPTED, 1, -1)
    assert machine.scheduler.kv.tables(request) == [()]
    assert machine.scheduler.num_running == 1 and machine.scheduler.waiting() == {"capacity": 1}
    assert list(request.token_ids) == [2] * 12 + machine.streams[1] and len(machine.streams[1]) >= len(before)
    assert machine.lifecycle[1][-1] == (LifecycleEvent.PREEMPTED, machine.now)
    resumed = next(plan for plan in iter(machine.step, None) if plan.admissions)
    (admission,) = resumed.admissions
    assert admission.token_ids.tolist() == list(request.token_ids)[: len(admission.token_ids)]
    assert resumed.num_new_tokens.max() == len(admission.token_ids), "nothing counts as computed any more"
    machine.run().check_no_leak()
    assert machine.streams[1] == reference([2] * 12, 12)


@pytest.mark.req("PC-27", "PRE-04", "SCH-08", "SCH-19")
def test_a_preempted_request_resumes_from_what_is_left_of_its_own_blocks():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    machine.add(make_request(0, [1] * 12, 6), make_request(1, [2] * 31, 10))
    machine.run().check_no_leak()
    # The second one preempted itself; the first one took some of its blocks from the tail.
    (resumed,) = [admission for plan in machine.plans for admission in plan.admissions if len(admission.token_ids) > 31]
    assert machine.scheduler.totals.num_preemptions == 1 and resumed.num_prompt_tokens == 31
    assert 24 <= resumed.num_computed_tokens < 32 and machine.ended["r1"].cached_tokens == 0
    assert machine.streams[1] == reference([2] * 31, 10)


@pytest.mark.req("PRE-06")
def test_what_a_draft_takes_back_leaves_nothing_behind():
    draft = StepBuilder(SchedulerConfig(max_num_batched_tokens=10), 0.0)
    draft.grant_decodes(np.array([4, 2, 7], np.int32))
    draft.grant_chunk(5, 6, samples=False)
    draft.appends |= {2: [[11]], 5: [[12, 13]], 7: [[14]]}
    assert draft.token_budget == 1 and not draft.preempted
    draft.take_back(2)
    draft.take_back(5)
    assert draft.token_budget == 8 and draft.preempted
    plan = draft.build(0, [2, 5], 1)
    assert plan.rows.tolist() == [4, 7] and plan.append_rows[0].tolist() == [7] and plan.append_blocks[0].tolist() == [14]


@pytest.mark.req("PRE-03", "PRE-06")
def test_a_decode_of_lower_priority_gives_up_its_grant_to_a_chunk_of_higher():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=6, policy="priority"))
    machine.add(make_request(0, [1] * 20, 20, priority=1))
    while len(machine.streams.get(0, [])) < 6:
        machine.step()
    # Five blocks are free and promised to the prompt, of which the decode takes one while the prompt is computed in slices.
    machine.add(make_request(1, [2] * 20, 20, priority=0))
    plans = [machine.step() for _ in range(4)]
    assert [len(plan.rows) for plan in plans] == [2, 2, 2, 1] and machine.scheduler.totals.num_preemptions == 1
    plan = plans[-1]
    rows = {request.row for request in machine.scheduler._tenancy.running}
    assert set(plan.rows.tolist()) == rows and {request.index for request in machine.scheduler._tenancy.running} == {1}
    machine.run().check_no_leak()
    assert machine.streams[0] == reference([1] * 20, 20) and machine.streams[1] == reference([2] * 20, 20)


@pytest.mark.req("PRE-10", "PRE-12", "CHK-09", "SCH-11", "OB-05")
def test_a_prompt_starts_only_when_all_of_it_fits_also_beside_prompts_that_are_half_computed():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=16, threshold=8))
    machine.add(make_request(0, [1] * 32, 2), make_request(1, [2] * 20, 2))
    # The first one holds a part of its 8 blocks: the 5 of the second one are free, but not beside what the first is owed.
    for held in (2, 4):
        machine.step()
        assert machine.scheduler.kv.pool.num_used == held and machine.scheduler.waiting() == {"capacity": 1}
    machine.run().check_no_leak()
    assert machine.scheduler.totals.num_preemptions == 0
    assert machine.scheduler.totals.prefix_queries == 32 + 20, "each counts once, however often it was tried"


@pytest.mark.req("SCH-09", "PC-20", "PC-12", "OB-05")
def test_hits_are_counted_once_a_request_in_tokens():
    machine = Machine(make_config(max_num_seqs=1))
    prompt = list(range(20))
    machine.add(make_request(0, prompt, 2), make_request(1, prompt, 2))
    machine.run()
    assert (machine.scheduler.totals.prefix_queries, machine.scheduler.totals.prefix_hits) == (40, 16)
    assert machine.cached_tokens == {0: 0, 1: 16}
    assert [plan.num_new_tokens.tolist() for plan in machine.plans] == [[16], [4], [1], [4], [1]]


@pytest.mark.req("RL-21", "AS-12")
@pytest.mark.parametrize("depth", [1, 2])
def test_no_token_is_computed_twice_and_none_after_the_last(depth):
    machine = Machine(make_config(depth=depth))
    machine.add(make_request(0, [1] * 10, 7))
    machine.run()
    assert machine.runner.prefilled == 10 + 7 - 1


@pytest.mark.req("AS-10")
def test_at_depth_two_a_stop_wastes_one_token_that_nobody_sees():
    prompt = [1] * 10
    stop = reference(prompt, 5)[4]
    cut = reference(prompt, 20, (stop,))
    machine = Machine(make_config(depth=2))
    machine.add(make_request(0, prompt, 20, stop=(stop,)))
    machine.run()
    assert machine.streams[0] == cut and machine.runner.prefilled == 10 + len(cut) - 1 + 1
    assert machine.ended["r0"].output_tokens == len(cut)


@pytest.mark.req("SCH-22", "AS-05")
def test_a_decode_is_planned_before_its_input_is_known():
    machine = Machine(make_config(depth=3))
    machine.add(make_request(0, [1] * 4, 9))
    plans = [machine.step(), machine.step()]
    assert [plan.rows.tolist() for plan in plans] == [[0], [0]] and machine.streams == {}


@pytest.mark.req("SCH-18", "IPC-05")
def test_a_steady_decode_plan_does_not_grow_with_the_context():
    machine = Machine(make_config(num_blocks=400, max_model_len=1000, max_num_seqs=8, budget=8192))
    machine.add(*[make_request(index, [index] * (10 if index < 4 else 800), 60) for index in range(8)])
    machine.step()
    sizes = [len(msgspec.msgpack.encode(machine.step(), enc_hook=plan_module.enc_hook)) for _ in range(40)]
    assert max(sizes) < 300
    assert all(not plan.admissions for plan in machine.plans[1:])


def test_a_plan_and_its_result_survive_the_wire():
    machine = Machine(make_config())
    machine.add(make_request(0, [1, 2, 3], 2))
    plan = machine.step()
    data = msgspec.msgpack.encode(plan, enc_hook=plan_module.enc_hook)
    back = msgspec.msgpack.decode(data, type=plan_module.StepPlan, dec_hook=plan_module.dec_hook)
    assert back.admissions[0].token_ids.tolist() == [1, 2, 3] and back.samples.tolist() == [True]
    assert back.append_blocks[0].dtype == np.int32 and back.append_blocks[0].tolist() == plan.append_blocks[0].tolist()


@pytest.mark.req("PC-01", "PC-02", "PC-25")
@pytest.mark.parametrize("caching", [True, False])
def test_each_full_block_is_hashed_once_and_none_without_caching(caching, monkeypatch):
    hashed = []
    real = BlockHasher.extend

    def counting(self, hashes, tokens, extra):
        before = len(hashes)
        real(self, hashes, tokens, extra)
        hashed.append(len(hashes) - before)

    monkeypatch.setattr(BlockHasher, "extend", counting)
    machine = Machine(make_config(caching=caching))
    machine.add(make_request(0, [1] * 10, 20))
    machine.run()
    # 29 of the 30 tokens were computed: seven blocks of four.
    assert sum(hashed) == (7 if caching else 0)


@pytest.mark.req("PC-07")
def test_a_salt_shares_with_its_own_kind_alone():
    machine = Machine(make_config(max_num_seqs=1))
    for index, salt in enumerate(["a", None, "a", "b"]):
        machine.add(make_request(index, [5] * 12, 1, salt=salt))
    machine.run()
    assert machine.cached_tokens == {0: 0, 1: 0, 2: 8, 3: 0}


@pytest.mark.req("RL-18")
def test_what_cannot_be_served_ends_at_once_and_says_why():
    machine = Machine(make_config(max_model_len=16, max_num_seqs=1, max_num_waiting=1))
    machine.add(make_request(0, []), make_request(1, [1] * 16), make_request(2, [1], 0))
    machine.add(make_request(3, [1] * 15, 9), make_request(4, [1]), make_request(5, [1]))
    assert {index: finished.error for index, finished in machine.finished.items()} == {
        0: "the prompt has no tokens",
        1: "the prompt has 16 tokens; the context is 16, output included",
        2: "max_tokens is 0; it must be at least 1",
        5: "the engine's queue is full; try again later",
    }
    machine.run().check_no_leak()
    assert len(machine.streams[3]) == 1 and machine.finished[3].reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="request 7 is there already"):
        machine.add(make_request(7, [1]), make_request(7, [1]))


@pytest.mark.req("PRE-14", "KV-04")
def test_a_pool_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ConfigError, match="needs 16 KV blocks of 4 tokens, and there are 15: lower --max-model-len to 60"):
        make_scheduler(make_config(num_blocks=16, max_model_len=64))
    make_scheduler(make_config(num_blocks=17, max_model_len=64))


def test_a_result_out_of_turn_is_refused():
    machine = Machine(make_config(depth=2))
    machine.add(make_request(0, [1], 5))
    machine.step()
    result = plan_module.StepResult(5, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match="result of step 5 came while step 0"):
        machine.scheduler.update(result, 1.0)


def test_the_backlog_counts_prompts_and_not_decodes():
    machine = Machine(make_config(budget=8, max_num_seqs=1))
    machine.add(make_request(0, [1] * 20, 9), make_request(1, [2] * 6, 1))
    backlog = [machine.scheduler.prefill_backlog()]
    for _ in range(4):
        machine.step()
        backlog.append(machine.scheduler.prefill_backlog())
    assert backlog == [26, 18, 10, 6, 6]
    machine.abort(0)
    assert machine.scheduler.prefill_backlog() == 6


def test_step_ids_rise_by_one():
    machine = Machine(make_config())
    machine.add(make_request(0, [1], 5))
    machine.run()
    assert all(after.step_id == before.step_id + 1 for before, after in pairwise(machine.plans))


def test_a_request_that_fails_leaves_nothing_in_the_cache():
    """Its first chunks gave no logits, so that nobody saw what they published."""
    machine = Machine(make_config(budget=8))
    machine.add(make_request(1, [*range(20), FAILING_TOKEN, 5]))
    machine.step()
    machine.step()
    assert len(machine.live_hashes) == 4
    machine.run()
    assert machine.finished[1].reason is FinishReason.ERROR and not machine.live_hashes
    machine.add(make_request(2, [*range(20), 5]))
    machine.run()
    assert machine.cached_tokens[2] == 0


def test_a_request_that_fails_by_what_its_client_asked_leaves_the_cache_as_it_is():
    machine = Machine(make_config())
    shared = list(range(12))
    machine.add(make_request(0, [*shared, 5], 1))
    machine.run()
    machine.add(make_request(1, [*shared, REFUSED_TOKEN, 5]))
    machine.run()
    machine.add(make_request(2, [*shared, 6]))
    machine.run()
    assert machine.finished[1].reason is FinishReason.ERROR and machine.streams[2] == reference([*shared, 6], 8)
    assert machine.cached_tokens == {0: 0, 1: 12, 2: 12}


@pytest.mark.req("PC-30")
def test_a_cache_too_small_for_what_comes_round_shows_in_its_counters():
    """Eight prompts in turn: all are found again where they fit, and none where they do not."""
    hits = {}
    for num_blocks in (100, 30):
        machine = Machine(make_config(num_blocks=num_blocks, max_num_seqs=1))
        for index in range(40):
            machine.add(make_request(index, [index % 8] * 20, max_tokens=1))
        machine.run()
        assert machine.scheduler.totals.prefix_queries == 40 * 20
        hits[num_blocks] = machine.scheduler.totals.prefix_hits
    assert hits == {100: 32 * 16, 30: 0}
