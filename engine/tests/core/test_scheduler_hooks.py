"""What controls and failures ask of the scheduler."""

import pytest
from fake_runner import reference
from harness import Machine, make_config, make_request

from penstock.engine.core.scheduling.pause import Closed


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preemption_of_all_loses_nothing_but_time(depth):
    machine = Machine(make_config(budget=16, depth=depth))
    for index in range(4):
        machine.add(make_request(index, [index, 1, 2, 3, 4], 12))
    for _ in range(6):
        machine.step()
    while machine._results:
        machine._take(machine.scheduler.update(machine._results.popleft()[1], machine.now))
    machine.scheduler.preempt_all(machine.now)
    assert machine.scheduler.num_running == 0 and machine.scheduler.kv.pool.num_used == 0
    machine.run().check_no_leak()
    for index in range(4):
        assert machine.streams[index] == reference([index, 1, 2, 3, 4], 12)


def test_a_closed_scheduler_refuses_and_an_emptied_one_has_ended_all_by_name():
    machine = Machine(make_config(max_num_seqs=2))
    machine.add(*[make_request(index, [index, 1], 12) for index in range(4)])
    machine.step()
    machine.scheduler.fail_all("the plug was pulled", "pulled")
    machine.scheduler.closed = Closed("gone fishing", "closed")
    machine.add(make_request(4, [1], 2))
    machine.scheduler.closed = None
    machine.add(make_request(5, [1], 2))
    machine.run().check_no_leak()
    ends = [(machine.finished[index].error, machine.finished[index].code) for index in range(6)]
    assert ends == [("the plug was pulled", "pulled")] * 4 + [("gone fishing", "closed"), (None, None)]


@pytest.mark.req("IPC-11")
def test_a_step_that_came_to_nothing_ends_its_requests_and_no_others():
    machine = Machine(make_config(max_num_seqs=2, budget=8))
    machine.add(*[make_request(index, [index] * 8, 6) for index in range(3)])
    machine.step()
    plan = machine.scheduler.schedule(now=1.0)
    assert plan is not None and len(plan.rows) == 2
    machine.runner.execute(plan)
    machine.runner.table.token_ids[plan.rows] = -7  # whatever it left there
    machine._take(machine.scheduler.fail_step("the device coughed", "step_failed", machine.now))
    assert {machine.finished[index].code for index in (0, 1)} == {"step_failed"} and 2 not in machine.finished
    machine.add(make_request(3, [0] * 8, 6))
    machine.run().check_no_leak()
    assert machine.streams[2] == reference([2] * 8, 6)
    assert machine.streams[3] == reference([0] * 8, 6), "nothing of the failed step is found in the cache"
