"""A device cranked by hand: plan N + 1 is submitted before the result of N is let go, and then anything may happen to N's
requests. What comes out is what a device without overlap gives."""

from collections import deque

import numpy as np
import pytest
from fake_runner import FakeRunner, reference
from harness import Machine, make_config, make_request

from penstock.engine.core.core import EngineCore
from penstock.engine.core.plan import SampleInputs
from penstock.engine.core.scheduling.pause import PauseState
from penstock.engine.messages import AbortRequests, FinishReason


class HandCrankedDevice:
    """An executor that runs a step only when its result is asked for; until then nobody knows anything of it."""

    def __init__(self, config) -> None:
        self.runner = FakeRunner(config)
        self.runner.initialize_kv_cache(config.cache.num_blocks)
        self.plans: deque = deque()
        self.inputs: dict[int, SampleInputs] = {}
        self.log: list[tuple[str, int]] = []

    def submit(self, plan, masked) -> None:
        self.log.append(("submit", plan.step_id))
        self.plans.append(plan)
        if not masked:
            self.sample(SampleInputs(plan.step_id))

    def sample(self, inputs) -> None:
        self.log.append(("sample", inputs.step_id))
        self.inputs[inputs.step_id] = inputs

    def collect(self):
        plan = self.plans.popleft()
        self.log.append(("collect", plan.step_id))
        self.runner.execute(plan)
        return self.runner.sample(self.inputs.pop(plan.step_id))

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, depth: int = 2, **config) -> None:
        self.config = make_config(depth=depth, **config)
        self.device = HandCrankedDevice(self.config)
        self.core = EngineCore(self.config, self.device, self.config.cache.num_blocks, epoch=1)
        self.streams: dict[int, list[int]] = {}
        self.finished = {}

    def crank(self) -> None:
        """One turn: fills the pipeline, then lets the oldest result go."""
        outputs = self.core.step()
        if outputs is None:
            return
        offsets, tokens = np.frombuffer(outputs.offsets, "<i4"), np.frombuffer(outputs.token_ids, "<i4")
        for at, index in enumerate(np.frombuffer(outputs.indexes, "<i8").tolist()):
            assert index not in self.finished, "a token after the end"
            self.streams.setdefault(index, []).extend(tokens[offsets[at] : offsets[at + 1]].tolist())
        self.finished |= {end.index: end for end in outputs.finished}

    def run(self) -> "Bench":
        while self.core.has_work:
            self.crank()
        pool = self.core.scheduler.kv.pool
        assert pool.num_used == 0 and not any(pool.ref_counts)
        return self


@pytest.mark.req("AS-03")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_plan_is_submitted_before_the_result_is_awaited(depth):
    bench = Bench(depth)
    bench.core.handle(make_request(0, [1, 2, 3], 9))
    bench.run()
    seen = bench.device.log
    for step in range(9):
        at = seen.index(("collect", step))
        ahead = [number for what, number in seen[:at] if what == "submit"]
        assert max(ahead) == min(step + depth - 1, 8), "as many steps in flight as the depth says, and no more"
        assert seen.index(("sample", step)) == seen.index(("submit", step)) + 1, "sampling is asked for while the step runs"
    bench.crank()
    assert bench.streams[0] == reference([1, 2, 3], 9) and len(seen) == 27, "with nothing to do the device is left alone"


@pytest.mark.req("AS-10", "AS-12")
def test_a_stop_at_n_drops_what_was_planned_of_n_plus_one():
    prompt = [1] * 10
    stop = reference(prompt, 5)[4]
    streams = []
    for depth in (1, 2):
        bench = Bench(depth)
        bench.core.handle(make_request(0, prompt, 20, stop=(stop,)))
        bench.core.handle(make_request(1, [2], 20))
        streams.append(bench.run().streams)
        assert bench.finished[0].reason is FinishReason.STOP and bench.finished[0].stop_token_id == stop
    assert streams[0] == streams[1] and streams[0][0] == reference(prompt, 20, (stop,))


@pytest.mark.req("AS-10", "AS-15", "RL-17")
def test_an_abort_in_flight_frees_once_and_the_next_tenant_of_the_row_sees_nothing_of_it():
    bench = Bench(max_num_seqs=1, num_blocks=17)
    bench.core.handle(make_request(0, [1] * 20, 20))
    bench.core.handle(make_request(1, [2] * 20, 20))
    for _ in range(4):
        bench.crank()
    assert len(bench.core.scheduler._in_flight) == 1, "a step of request 0 is under way"
    bench.core.handle(AbortRequests([0]))
    bench.run()
    assert bench.streams[1] == reference([2] * 20, 20)
    assert bench.streams[0] == reference([1] * 20, 20)[: len(bench.streams[0])] and len(bench.streams[0]) < 20


@pytest.mark.req("AS-11", "AS-05", "PRE-08")
def test_a_preemption_in_flight_samples_the_lost_token_again():
    streams = []
    for depth in (1, 2, 3):
        bench = Bench(depth, num_blocks=13, max_model_len=48, budget=64)
        for index in range(3):
            bench.core.handle(make_request(index, [index] * 12, 12))
        streams.append(bench.run().streams)
        assert bench.core.scheduler.totals.num_preemptions
    assert streams[0] == streams[1] == streams[2] == {index: reference([index] * 12, 12) for index in range(3)}


@pytest.mark.req("AS-18", "CHK-06", "RL-14")
def test_a_batch_of_decodes_and_partial_prompts_gives_tokens_to_decodes_alone():
    bench = Bench(budget=8, num_blocks=100)
    bench.core.handle(make_request(0, [1], 30))
    bench.crank()
    bench.core.handle(make_request(1, [2] * 40, 3))
    for _ in range(4):
        before = {index: list(stream) for index, stream in bench.streams.items()}
        bench.crank()
        assert len(bench.streams[0]) == len(before[0]) + 1 and 1 not in bench.streams
    bench.run()
    assert bench.streams == {0: reference([1], 30), 1: reference([2] * 40, 3)}


@pytest.mark.req("SCH-12")
def test_a_row_whose_last_token_is_in_flight_stops_nobody():
    bench = Bench()
    bench.core.handle(make_request(0, [1], 2))
    bench.core.handle(make_request(1, [2], 9))
    bench.crank()
    (plan,) = bench.device.plans
    assert len(plan.rows) == 2
    bench.crank()
    (plan,) = bench.device.plans
    table = bench.core.scheduler.table
    assert plan.rows.tolist() == [1], "request 0 has nothing to do, and request 1 goes on"
    assert 0 in bench.finished and table.num_tokens[1] > 2
    assert bench.run().streams == {0: reference([1], 2), 1: reference([2], 9)}


@pytest.mark.req("SCH-21", "AS-05", "RL-08")
def test_tokens_in_flight_count_on_both_sides():
    bench = Bench()
    bench.core.handle(make_request(0, [1, 2, 3], 9))
    bench.crank()
    scheduler = bench.core.scheduler
    assert bench.streams[0] == reference([1, 2, 3], 1)
    assert scheduler.table.num_tokens[0] == 3 + 1 + 1 and scheduler._tenancy.num_known[0] == 3 + 1
    bench.crank()
    assert bench.device.runner.table.num_tokens[0] == 3 + 2, "the runner counts as the plans that it has had"


@pytest.mark.req("SCH-13")
def test_a_pause_with_steps_in_flight_takes_their_results():
    bench = Bench()
    bench.core.handle(make_request(0, [1], 9))
    bench.crank()
    bench.core.scheduler.pause_state = PauseState.PAUSED_ALL
    bench.crank()
    assert not bench.core.has_work and len(bench.streams[0]) == 2
    bench.core.scheduler.pause_state = PauseState.UNPAUSED
    assert bench.run().streams[0] == reference([1], 9)


@pytest.mark.req("SCH-20", "IB-05")
def test_a_row_that_is_left_out_of_steps_needs_no_resending():
    machine = Machine(make_config(budget=2, max_num_seqs=4))
    machine.add(*[make_request(index, [index], 12) for index in range(4)])
    machine.run()
    left_out = [set(range(4)) - set(plan.rows.tolist()) for plan in machine.plans]
    assert any(left_out) and all(machine.streams[index] == reference([index], 12) for index in range(4))
    assert sum(len(plan.admissions) for plan in machine.plans) == 4


@pytest.mark.req("SCH-30")
def test_plans_name_rows_once_and_drop_preempted_ones_before_they_are_taken_again():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    machine.add(*[make_request(index, [index] * 12, 12) for index in range(3)])
    owners: dict[int, int] = {}
    released = 0
    while machine.scheduler.indexes():
        plan = machine.step()
        for row in plan.released.tolist():
            del owners[row]
            released += 1
        for admission in plan.admissions:
            assert admission.row not in owners
            owners[admission.row] = int(admission.token_ids[0])
        assert set(plan.rows.tolist()) <= set(owners) and len(set(plan.rows.tolist())) == len(plan.rows)
        assert plan.num_new_tokens.sum() <= 64
    assert machine.scheduler.totals.num_preemptions and released == machine.scheduler.totals.num_preemptions + 3 - len(owners)


def test_a_core_whose_requests_all_wait_for_reasons_of_their_own_goes_on():
    class Never:
        def refuses(self, candidate):
            return "lora"

    bench = Bench()
    bench.core.scheduler.rules.append(Never())
    bench.core.handle(make_request(0, [1], 3))
    bench.crank()
    bench.core.scheduler.rules.pop()
    assert bench.run().streams[0] == reference([1], 3)
    bench.core.handle(make_request(1, [1] * 9, 3))
    bench.core.scheduler.kv.pool.get_new_blocks(bench.core.scheduler.kv.num_free_blocks)
    with pytest.raises(RuntimeError, match=r"no request can run: 0 running, \{'capacity': 1\} waiting"):
        bench.crank()
