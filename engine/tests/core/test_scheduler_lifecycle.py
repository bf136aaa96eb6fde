"""What becomes of a request between arrival and end, and what is told of it."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from fake_runner import reference
from harness import Machine, make_config, make_request

from penstock.engine import messages
from penstock.engine.core.plan import SampleInputs
from penstock.engine.core.scheduling.pause import PauseState
from penstock.engine.messages import LifecycleEvent, StepOutputs

QUEUED, SCHEDULED, PREEMPTED = LifecycleEvent.QUEUED, LifecycleEvent.SCHEDULED, LifecycleEvent.PREEMPTED


@pytest.mark.req("RL-15")
def test_every_turn_of_a_request_is_told_once_in_order_with_its_time():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    machine.add(*[make_request(index, [index] * 12, 12) for index in range(3)])
    machine.run()
    assert (QUEUED, SCHEDULED, PREEMPTED) == (1, 2, 3)
    assert machine.lifecycle[0] == [(QUEUED, 0.0), (SCHEDULED, 1.0)]
    turns = [event for event, _ in machine.lifecycle[2]]
    assert turns == [QUEUED, SCHEDULED, *[PREEMPTED, SCHEDULED] * machine.scheduler.totals.num_preemptions]
    times = [time for _, time in machine.lifecycle[2]]
    assert all(before < after for before, after in pairwise(times))


@pytest.mark.req("RL-15")
def test_times_never_fall_though_the_clock_does():
    machine = Machine(make_config())
    machine.now = 100.0
    machine.add(make_request(0, [1, 2], 2))
    machine.now = 50.0
    machine.step()
    assert machine.lifecycle[0] == [(QUEUED, 100.0), (SCHEDULED, 100.0)]


def test_a_frame_tells_of_those_to_whom_something_happened_alone():
    machine = Machine(make_config())
    machine.scheduler.add(make_request(7, [1, 2], 3), 4.0)
    frames = []
    for now in (5.0, 6.0):
        plan = machine.scheduler.schedule(now)
        machine.runner.execute(plan)
        outputs = machine.scheduler.update(machine.runner.sample(SampleInputs(plan.step_id)), now)
        frames.append(messages.decode_output(messages.encode(outputs.frame(0, plan.step_id, now))))
    first, second = frames
    assert isinstance(first, StepOutputs) and second.lifecycle is None
    assert np.frombuffer(first.lifecycle.indexes, "<i8").tolist() == [7, 7]
    assert list(first.lifecycle.events) == [QUEUED, SCHEDULED]
    assert np.frombuffer(first.lifecycle.times, "<f8").tolist() == [4.0, 5.0]


@pytest.mark.req("SCH-13")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_loses_nothing(depth):
    machine = Machine(make_config(depth=depth, max_num_seqs=2))
    machine.add(*[make_request(index, [index], 10) for index in range(3)])
    machine.step()
    machine.scheduler.pause_state = PauseState.PAUSED_ALL
    assert [machine.step() for _ in range(3)] == [None] * 3
    assert not machine.scheduler.has_work and machine.scheduler.num_running == 2
    machine.scheduler.pause_state = PauseState.PAUSED_NEW
    while machine.scheduler.has_work:
        machine.step()
    assert set(machine.streams) == {0, 1} and machine.scheduler.num_running == 0, "running ones drain, nobody is admitted"
    assert machine.step() is None
    machine.scheduler.pause_state = PauseState.UNPAUSED
    machine.run().check_no_leak()
    assert all(machine.streams[index] == reference([index], 10) for index in range(3))


def test_the_end_of_a_request_tells_how_long_its_first_token_took():
    machine = Machine(make_config(max_num_seqs=1))
    machine.now = 100.0
    for index, arrival in enumerate((99.5, 100.0, 100.0)):
        machine.add(msgspec.structs.replace(make_request(index, [index, 7], 3), arrival_time=arrival))
    machine.abort(2)
    machine.run()
    assert [machine.ended[f"r{index}"].ttft_s for index in range(3)] == [1.5, 4.0, 0.0]


def test_a_preempted_request_has_one_first_token():
    machine = Machine(make_config(num_blocks=13, max_model_len=48, budget=64))
    machine.add(*[msgspec.structs.replace(make_request(index, [index] * 12, 12), arrival_time=0.0) for index in range(3)])
    machine.run()
    assert machine.scheduler.totals.num_preemptions
    assert [machine.ended[f"r{index}"].ttft_s for index in range(3)] == [1.0, 1.0, 1.0]
