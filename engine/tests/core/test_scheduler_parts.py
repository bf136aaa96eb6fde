"""Parts of the scheduler alone, where a whole life seldom comes: heaps that shrink, guards of resumed rows, late retirements."""

import numpy as np
import pytest
from harness import Machine, make_config, make_request

from penstock.engine.core.scheduling.deadlines import Deadlines
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.repetition import RepetitionGuard
from penstock.engine.core.scheduling.request import Request
from penstock.engine.core.scheduling.token_counters import TokenCounters
from penstock.engine.core.scheduling.waits import SECONDS, Waits
from penstock.engine.messages import AdapterInfo
from penstock.engine.sampling import RepetitionDetection, SamplingParams


def watched(index: int, deadline: float | None) -> Request:
    return Request(make_request(index, [1], deadline=deadline), index)


def test_deadlines_outlive_the_many_that_went_before_theirs() -> None:
    deadlines = Deadlines()
    late, never = watched(0, 500.0), watched(1, None)
    others = [watched(index, 1000.0 + index) for index in range(2, 60)]
    for request in (late, never, *others):
        deadlines.add(request)
    assert len(deadlines) == 59, "one without a deadline is not watched"
    for request in others:
        deadlines.remove(request)
    assert len(deadlines._heap) <= 2 * len(deadlines) + 16
    assert deadlines.take_due(499.9) == []
    assert deadlines.take_due(500.0) == [late]
    assert len(deadlines) == 0 and deadlines.take_due(1e9) == []


def trips(known: list[int], then: list[int], asked: RepetitionDetection | None) -> list[bool]:
    """Whether each further output token of a row trips, after a prompt [7, 7] and these known output tokens."""
    guard = RepetitionGuard(2)
    guard.move_in(1, SamplingParams(max_tokens=30, repetition_detection=asked), [7, 7, *known], 2)
    tokens = np.zeros((2, 40), np.int32)
    tokens[1, : 2 + len(known)] = [7, 7, *known]
    told = []
    for position, token in enumerate(then, 2 + len(known)):
        tokens[1, position] = token
        told.append(bool(guard.trips(np.array([1]), np.array([position]), tokens)[0]))
    return told


def test_a_resumed_row_trips_where_one_that_never_stopped_does() -> None:
    pairs = RepetitionDetection(max_pattern_size=2, min_pattern_size=2, min_count=2)
    assert trips([], [3, 4, 3, 4, 5], pairs) == [False, False, False, True, False]
    for known in range(1, 4):
        output = [3, 4, 3, 4, 5]
        assert trips(output[:known], output[known:], pairs) == [False, False, False, True, False][known:]
    assert trips([], [7, 7], pairs) == [False, False], "the prompt does not count"
    assert trips([], [3, 3, 3, 3], None) == [False] * 4
    threes = RepetitionDetection(max_pattern_size=1, min_count=3)
    assert trips([3], [3, 3, 3, 4], threes) == [False, True, True, False]


def test_an_adapter_that_left_the_hosts_memory_takes_no_other_with_it() -> None:
    table = AdapterTable(max_loras=1, max_cpu_loras=1)
    table.add(AdapterInfo(1, "a", "/a", None))
    first = table.get(1)
    assert (table.num_loads, table.num_reads) == (0, 1), "nothing is in a slot, one file is read"
    ((copy, _),) = table.take_reads()
    assert first is not None and table.read(copy, ok=True) is first
    table.joined(first)
    table.add(AdapterInfo(2, "b", "/b", None))
    ((copy, _),) = table.take_reads()
    table.left(first)  # idle, and there is room for one: it goes while the other is read
    assert table.take_drops() == [0]
    table.retire(first)
    second = table.get(2)
    assert table.is_reading and table.read(copy, ok=True) is second is not None
    assert table.take_drops() == []


def test_counters_of_tokens_begin_at_nothing_and_count_what_preemptions_cost() -> None:
    machine = Machine(make_config(num_blocks=9, max_model_len=32, budget=64, caching=False))
    totals = machine.scheduler.totals
    assert (totals.num_preemptions, totals.preempted_tokens, totals.resumed_cached_tokens) == (0, 0, 0)
    machine.add(*[make_request(index, [index + 1] * 8, 12) for index in range(2)])
    while not totals.num_preemptions:
        machine.step()
    assert totals.preempted_tokens >= 8
    machine.run().check_no_leak()
    assert totals.resumed_cached_tokens == 0, "nothing is cached"


def test_a_tenant_without_requests_is_forgotten_when_its_counter_is_no_more_than_the_least_that_waits() -> None:
    counters = TokenCounters({})
    for name, service in [("idle", 20.0), ("more", 20.5), ("waits", 20.0), ("last", 50.0)]:
        counters.charge_prompt(name, service)
    counters.prune(waiting=["waits"], live=["waits"])
    assert {name: counters[name] for name in ("idle", "more", "waits", "last")} == {
        "idle": 0,
        "more": 20.5,
        "waits": 20,
        "last": 50,
    }


def test_waits_fall_into_the_bucket_whose_bound_they_do_not_exceed() -> None:
    waits = Waits()
    waits.started({"capacity": 0.001, "lora": 1000.0})
    waits.started({"capacity": 0.0011})
    found = waits.buckets()
    assert (found["capacity"].counts[:3], len(found["capacity"].counts)) == ([1, 1, 0], len(SECONDS) + 1)
    assert found["lora"].counts == [0] * len(SECONDS) + [1]
    assert (found["capacity"].total, found["lora"].total) == (pytest.approx(0.0021), 1000.0)
