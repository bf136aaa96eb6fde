"""What requests wait for, and that none waits for what another one waits for: parking, deadlines, the full queue."""

import gc

import pytest
from fake_runner import reference
from harness import Machine, make_config, make_request

from penstock.engine.config import ConfigError
from penstock.engine.core.scheduling.pause import PauseState
from penstock.engine.core.scheduling.request import Request, RequestStatus
from penstock.engine.core.scheduling.waits import SECONDS
from penstock.engine.messages import (
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    REQUEST_TIMEOUT,
    TENANT_QUEUE_FULL,
    ExtendPrompt,
    FinishReason,
)
from penstock.engine.sampling import RepetitionDetection


class Blocks:
    """An admission rule that holds some requests back for a reason of their own."""

    def __init__(self, *indexes: int) -> None:
        self.indexes = set(indexes)

    def refuses(self, candidate):
        return "lora" if candidate.request.index in self.indexes else None


def admitted(machine: Machine) -> list[int]:
    return list(machine.cached_tokens)


@pytest.mark.req("RL-05", "SCH-10")
@pytest.mark.parametrize("reason", ["grammar", "remote_kv"])
def test_a_parked_head_lets_those_behind_it_pass_in_the_same_step(reason):
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(*[make_request(index, [index], 2) for index in range(3)])
    machine.scheduler.park(0, reason, machine.now)
    assert machine.scheduler.waiting() == {reason: 1, "capacity": 2}
    machine.step()
    assert admitted(machine) == [1]
    machine.scheduler.unpark(0, machine.now)
    machine.run().check_no_leak()
    assert admitted(machine) == [1, 0, 2], "it came before the one that waits still"


@pytest.mark.req("OB-26")
def test_whoever_is_next_and_finds_no_room_waits_for_room_whatever_it_waited_for_before():
    machine = Machine(make_config(max_num_seqs=1))
    blocks = Blocks(0)
    machine.scheduler.rules.append(blocks)
    machine.add(make_request(0, [5], 2), make_request(1, [6], 20))
    machine.step()
    assert machine.scheduler.waiting() == {"lora": 1} and admitted(machine) == [1]
    blocks.indexes.clear()
    machine.step()
    assert machine.scheduler.waiting() == {"capacity": 1}
    machine.run().check_no_leak()


@pytest.mark.req("OB-26")
def test_time_in_the_queue_is_told_by_what_was_waited_for():
    """Three delays of different lengths land in three series, and the rest in a fourth; together they are the queue time."""
    machine = Machine(make_config(max_num_seqs=3))
    blocks = Blocks(2)
    machine.scheduler.rules.append(blocks)
    machine.add(*[make_request(index, [index], 2) for index in range(3)], make_request(3, [3], 2, complete=False))
    machine.scheduler.park(0, "grammar", machine.now)
    machine.scheduler.park(1, "remote_kv", machine.now)
    machine.step()  # at 1 s; who is blocked is found out only here
    machine.now += 9
    machine.scheduler.unpark(0, machine.now)
    machine.now += 20
    machine.scheduler.unpark(1, machine.now)
    machine.now += 40
    machine.scheduler.extend(ExtendPrompt(3, [4], last=True), machine.now)
    blocks.indexes.clear()
    machine.run().check_no_leak()
    found = machine.scheduler.totals.waits.buckets()
    assert {reason: sum(buckets.counts) for reason, buckets in found.items()} == {
        "capacity": 4,
        "grammar": 1,
        "remote_kv": 1,
        "lora": 1,
        "streaming": 1,
    }
    totals = {reason: buckets.total for reason, buckets in found.items()}
    # All four start at 71 s but the last, for which there is room at 73 s alone.
    assert (totals["grammar"], totals["remote_kv"], totals["lora"], totals["streaming"]) == (10, 30, 70, 70)
    assert sum(totals.values()) == 71 * 3 + 73
    assert found["grammar"].counts[SECONDS.index(10)] == 1


@pytest.mark.req("RL-01", "RL-05", "RL-17")
@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("grammar", RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR),
        ("remote_kv", RequestStatus.WAITING_FOR_REMOTE_KVS),
        ("streaming", RequestStatus.WAITING_FOR_STREAMING_REQ),
    ],
)
def test_whoever_is_parked_has_a_status_runs_later_and_can_be_aborted(reason, status):
    machine = Machine(make_config())
    machine.add(make_request(0, [5, 6], 3), make_request(1, [7], 3))
    for index in (0, 1):
        machine.scheduler.park(index, reason, machine.now)
        assert machine.scheduler._book._live[index].status is status
    assert machine.step() is None and not machine.scheduler.has_work
    machine.abort(1)
    machine.scheduler.unpark(0, machine.now)
    machine.scheduler.unpark(0, machine.now)
    machine.scheduler.unpark(1, machine.now)
    machine.run().check_no_leak()
    assert machine.streams == {0: reference([5, 6], 3)} and machine.finished[1].reason is FinishReason.ABORT


@pytest.mark.req("PD-05")
def test_requests_that_wait_for_pages_take_nothing_of_the_step():
    """A hundred of them, beside one that generates and one whose prompt fills the rest of each step."""
    machine = Machine(make_config(num_blocks=300, max_num_seqs=3, budget=16))
    machine.add(make_request(0, [1], 20))
    machine.step()
    for index in range(1, 101):
        machine.add(make_request(index, [index] * 9, 1))
        machine.scheduler.park(index, "remote_kv", machine.now)
    machine.add(make_request(200, list(range(1, 46)), 1))
    for _ in range(3):
        machine.step()
        assert dict(zip(machine.planned, machine.plans[-1].num_new_tokens.tolist(), strict=True)) == {0: 1, 200: 15}
        assert machine.scheduler.waiting() == {"remote_kv": 100}
    for index in range(1, 101):
        machine.scheduler.unpark(index, machine.now)
    machine.run().check_no_leak()
    assert all(machine.streams[index] == reference([index] * 9, 1) for index in range(1, 101))


def test_only_what_waits_can_be_parked():
    machine = Machine(make_config())
    machine.add(make_request(0, [5], 3))
    with pytest.raises(KeyError):
        machine.scheduler.park(0, "capacity", machine.now)
    machine.step()
    for index in (0, 1):
        with pytest.raises(KeyError):
            machine.scheduler.park(index, "grammar", machine.now)


def test_a_preempted_request_can_be_parked_and_loses_nothing():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    machine.add(*[make_request(index, [index] * 12, 12) for index in range(3)])
    while not machine.scheduler.totals.num_preemptions:
        machine.step()
    machine.scheduler.park(2, "remote_kv", machine.now)
    while machine.scheduler.num_running:
        machine.step()
    machine.scheduler.unpark(2, machine.now)
    assert machine.scheduler._book._live[2].status is RequestStatus.PREEMPTED
    machine.run().check_no_leak()
    assert machine.streams[2] == reference([2] * 12, 12)


@pytest.mark.req("SCH-10")
def test_a_reason_of_ones_own_blocks_nobody_else_and_keeps_the_order():
    machine = Machine(make_config(max_num_seqs=2))
    rule = Blocks(0, 2)
    machine.scheduler.rules.append(rule)
    machine.add(*[make_request(index, [index], 2) for index in range(6)])
    machine.step()
    assert admitted(machine) == [1, 3] and machine.scheduler.waiting() == {"lora": 2, "capacity": 2}
    rule.indexes.clear()
    machine.run().check_no_leak()
    assert admitted(machine) == [1, 3, 0, 2, 4, 5]


def test_in_a_pause_nobody_waits_for_capacity():
    machine = Machine(make_config())
    machine.add(make_request(0, [1], 2), make_request(1, [1], 2))
    machine.scheduler.park(1, "grammar", machine.now)
    machine.scheduler.pause_state = PauseState.PAUSED_NEW
    assert machine.scheduler.waiting() == {"paused": 1, "grammar": 1}


@pytest.mark.req("RL-06", "RL-01")
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_may_come_in_parts(caching):
    machine = Machine(make_config(caching=caching))
    machine.add(make_request(0, [1, 2, 3], 5, complete=False), make_request(1, [9], 2))
    machine.step()
    assert admitted(machine) == [1] and machine.scheduler.waiting() == {"streaming": 1}
    assert machine.scheduler._book._live[0].status is RequestStatus.WAITING_FOR_STREAMING_REQ
    machine.scheduler.extend(ExtendPrompt(0, [4, 5, 6, 7], last=False), machine.now)
    machine.step()
    machine.scheduler.extend(ExtendPrompt(0, [8], last=True), machine.now)
    machine.run().check_no_leak()
    assert machine.streams[0] == reference([1, 2, 3, 4, 5, 6, 7, 8], 5)
    assert machine.ended["r0"].prompt_tokens == 8


@pytest.mark.req("RL-18", "RL-01")
def test_a_prompt_in_parts_is_checked_when_it_is_there():
    machine = Machine(make_config(max_model_len=16))
    machine.add(*[make_request(index, [], 5, complete=False) for index in range(3)])
    machine.scheduler.extend(ExtendPrompt(0, [1] * 16, last=False), machine.now)
    machine.scheduler.extend(ExtendPrompt(1, [], last=True), machine.now)
    machine.scheduler.extend(ExtendPrompt(2, [1], last=True), machine.now)
    machine.scheduler.extend(ExtendPrompt(2, [1], last=True), machine.now)
    machine.scheduler.extend(ExtendPrompt(0, [1], last=True), machine.now)
    machine.run().check_no_leak()
    assert machine.finished[0].reason is FinishReason.IGNORED and "16 tokens" in machine.finished[0].error
    assert machine.finished[1].error == "the prompt has no tokens"
    assert machine.finished[2].error == "more of the prompt came after its last part"


def test_a_request_that_ends_before_its_deadline_is_not_kept_until_then():
    machine = Machine(make_config())
    machine.add(*[make_request(index, [index] * 8, 1, deadline=1e9) for index in range(200)])
    machine.run()
    gc.collect()
    assert not [it for it in gc.get_objects() if isinstance(it, Request) and it.deadline == 1e9]
    assert len(machine.scheduler._book._deadlines._heap) < 40, "nor are their deadlines"


def test_a_deadline_ends_a_request_wherever_it_is():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(
        make_request(0, [1], 30, deadline=5.0),
        make_request(1, [2], 3, deadline=3.0),
        make_request(2, [3], 3, deadline=50.0),
        make_request(3, [4], 3, deadline=9.0),
    )
    machine.scheduler.park(3, "grammar", machine.now)
    machine.run().check_no_leak()
    ends = {index: (finished.reason, finished.code) for index, finished in machine.finished.items()}
    assert ends == {
        0: (FinishReason.ERROR, REQUEST_TIMEOUT),
        1: (FinishReason.ERROR, QUEUE_TIMEOUT),
        2: (FinishReason.LENGTH, None),
        3: (FinishReason.ERROR, QUEUE_TIMEOUT),
    }
    assert machine.streams[0] == reference([1], 4) and machine.streams[2] == reference([3], 3)


def test_a_deadline_comes_in_a_pause_too():
    machine = Machine(make_config())
    machine.add(make_request(0, [1], 30, deadline=3.0))
    machine.step()
    machine.scheduler.pause_state = PauseState.PAUSED_ALL
    machine.step()
    machine.step()
    assert machine.finished[0].code == REQUEST_TIMEOUT


def test_a_full_queue_sends_away_the_tenant_with_the_most_in_it():
    machine = Machine(make_config(max_num_seqs=1, max_num_waiting=4))
    machine.add(make_request(0, [1], 9, tenant="noisy"))
    machine.step()
    machine.add(*[make_request(index, [1], 2, tenant="noisy") for index in range(1, 6)])
    assert machine.finished.pop(5).code == QUEUE_FULL, "nobody else is there to share with"
    machine.add(make_request(6, [1], 2, tenant="quiet"), make_request(7, [1], 2, tenant="quiet"))
    assert {index: finished.code for index, finished in machine.finished.items()} == {
        4: TENANT_QUEUE_FULL,
        3: TENANT_QUEUE_FULL,
    }
    machine.add(make_request(8, [1], 2, tenant="quiet"))
    assert machine.finished[8].code == TENANT_QUEUE_FULL, "they have as many each"
    machine.scheduler._book._counters._weights = {"quiet": 3.0}
    machine.add(make_request(9, [1], 2, tenant="quiet"))
    assert machine.finished[2].code == TENANT_QUEUE_FULL and 9 not in machine.finished


@pytest.mark.req("CHK-02")
def test_without_chunks_a_prompt_is_computed_in_one_step_or_not_yet():
    machine = Machine(make_config(budget=32, max_model_len=32, chunked=False))
    machine.add(*[make_request(index, [index] * length, 3) for index, length in enumerate([20, 20, 5])])
    machine.run().check_no_leak()
    for plan in machine.plans:
        for admission in plan.admissions:
            at = plan.rows.tolist().index(admission.row)
            assert plan.num_new_tokens[at] == len(admission.token_ids) - admission.num_computed_tokens and plan.samples[at]
    assert [len(plan.admissions) for plan in machine.plans[:2]] == [1, 2], "the third one does not overtake the second"
    assert all(machine.streams[index] == reference([index] * length, 3) for index, length in enumerate([20, 20, 5]))


@pytest.mark.req("CHK-02")
def test_without_chunks_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ConfigError, match="--max-num-batched-tokens must be at least the context of 64 tokens, not 16"):
        Machine(make_config(chunked=False, max_model_len=64, budget=16))
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold"):
        Machine(make_config(chunked=False, max_model_len=64, budget=64, threshold=8))


@pytest.mark.req("RL-01", "RL-11")
@pytest.mark.parametrize("depth", [1, 2])
def test_an_output_that_repeats_itself_ends(depth, monkeypatch):
    import fake_runner

    period = [3, 1, 4]
    monkeypatch.setattr(fake_runner, "next_token", lambda tokens, adapter: period[len(tokens) % 3])
    machine = Machine(make_config(depth=depth, max_num_seqs=4))
    guard = RepetitionDetection(max_pattern_size=8, min_count=4)
    machine.add(
        make_request(0, [9, 9, 9, 9], 30, repetition=guard),
        make_request(1, [8], 30),
        make_request(2, [7], 30, repetition=RepetitionDetection(max_pattern_size=2, min_count=2)),
        make_request(3, [6], 11, repetition=guard),
    )
    machine.run().check_no_leak()
    reasons = {index: (finished.reason.name, len(machine.streams[index])) for index, finished in machine.finished.items()}
    assert reasons == {0: ("REPETITION", 12), 1: ("LENGTH", 30), 2: ("LENGTH", 30), 3: ("LENGTH", 11)}
    assert machine.ended["r0"].reason == "repetition"


def test_a_preemption_does_not_forget_what_was_repeated(monkeypatch):
    import fake_runner

    monkeypatch.setattr(fake_runner, "next_token", lambda tokens, adapter: len(tokens) % 3)
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    guard = RepetitionDetection(max_pattern_size=3, min_count=4)
    machine.add(*[make_request(index, [20 + index] * 12, 24, repetition=guard if index == 2 else None) for index in range(3)])
    machine.run().check_no_leak()
    assert machine.scheduler.totals.num_preemptions and machine.finished[2].reason is FinishReason.REPETITION
    assert len(machine.streams[2]) == 12
